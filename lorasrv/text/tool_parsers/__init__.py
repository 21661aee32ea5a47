"""Tool-call formats: detect, parse, force."""
