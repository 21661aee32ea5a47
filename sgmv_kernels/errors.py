"""Errors that ops raise before they read or write anything."""


class KernelArgumentError(ValueError):
    """Report a wrong argument of an op: dtype, shape, alignment or range. The message names the argument."""


class CapacityExceeded(ValueError):
    """Report that a step exceeds the capacity of its buffer."""
