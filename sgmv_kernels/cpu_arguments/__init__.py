"""Arguments of the CPU kernels: where a launcher (`cpu_ops`) writes what a kernel (`cpu_kernels`) reads.

A kernel gets one block of int64 words; the constants are indices in it, after the two counters. Imports no torch, so
that a process can compile kernels without it.
"""
