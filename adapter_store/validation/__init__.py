"""Does this adapter fit this base: every problem found, one report."""
