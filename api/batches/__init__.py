"""Batches: files of requests computed at low priority, by the command and by the server."""
