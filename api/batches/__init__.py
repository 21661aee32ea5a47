"""Batches: files of requests that are answered when there is room, by the command and by the server alike."""
