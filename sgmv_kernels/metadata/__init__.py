"""Metadata of a step for the kernels: segments, tables, and their copy to the device."""
