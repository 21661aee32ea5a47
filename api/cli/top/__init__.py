"""`lorasrv top`: live view of a running server."""
