"""Numba kernel bodies; imported only to compile."""
