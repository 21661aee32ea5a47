"""Compile cache, OpenMP team, launch/record."""
