"""Validation of an adapter against the base: every problem found, one report."""
