"""Bodies of the Numba kernels, imported only to compile them."""
