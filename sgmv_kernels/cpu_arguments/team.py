"""Words of a `cpu_runtime.team.Team`, and arguments of the kernels that its threads run."""

from sgmv_kernels.cpu_arguments.block import COUNTERS

STATE, RELEASED, ITEMS, COUNT, BASE, CLOCK, LEFT, STOP, HELPERS, SLEEPERS = 0, 8, 16, 17, 18, 19, 20, 24, 25, 32
"""Words of a team: the state of its region; the number of launches completed so far; the region's launches, their
number, the value of RELEASED at its beginning, and its clock; the launch after which the opener left; whether the
threads must end; their number; for each thread, whether it sleeps, and its semaphore."""
SLEEPER_WORDS = 8
TEAM, NEW_ITEMS, NEW_COUNT, NEW_CLOCK, TICKS = range(COUNTERS, COUNTERS + 5)
"""Indices in the arguments of the kernel that opens a region and takes part in it."""
NUMBER = TEAM + 1
"""Index of a thread's number in the arguments of the kernel that all other threads run."""
NEVER = 2**62
"""Number of ticks with which a thread never leaves a region early."""
ITEM_WORDS = 3
"""Words of a launch of a region: kernel, block, kind."""
