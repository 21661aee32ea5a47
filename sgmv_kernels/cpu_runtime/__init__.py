"""Compile cache, team of threads, and launches that run at once or are recorded."""
