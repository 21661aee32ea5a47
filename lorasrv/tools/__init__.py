"""Tool calls: how a chat template's model writes them, read back from its text, or forced by a grammar."""
