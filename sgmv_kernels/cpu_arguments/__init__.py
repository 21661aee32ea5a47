"""Arguments of the CPU kernels: where a launcher (`cpu_ops`) writes what a kernel (`cpu_kernels`) reads.

A kernel gets one block of int64 words; most constants are indices in it, after the two counters. The others are numbers
that launcher and kernel share. Imports no torch, so that a process can compile kernels without it.
"""
