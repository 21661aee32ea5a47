"""Compile cache, team of threads, and launches that run immediately or are recorded."""
