"""Error of arguments that an op refuses before it reads or writes anything."""


class KernelArgumentError(ValueError):
    """An argument of an op is wrong: dtype, shape, alignment or range. The message names the argument."""


class CapacityExceeded(ValueError):
    """A step does not fit the capacity of its buffer."""
