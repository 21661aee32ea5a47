"""Guesses of what answers go on with, which a step verifies: several tokens of a request in one step. No torch."""
