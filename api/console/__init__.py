"""The console: a page for operators, served as plain files that ask the server's own routes."""
