"""Compile cache, OpenMP team, and launches that run at once or are recorded."""
