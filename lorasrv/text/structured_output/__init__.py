"""Grammars and JSON schemas -> token masks (llguidance), compiled in a sandbox process."""
