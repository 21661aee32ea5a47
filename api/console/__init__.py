"""Console: a page for operators, served as plain files that call the server's own routes."""
