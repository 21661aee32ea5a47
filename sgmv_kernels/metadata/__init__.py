"""Metadata of a step for the kernels: segments, tables, one upload."""
