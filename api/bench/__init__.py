"""Load for a server, and what it came to: any OpenAI-compatible one, seen from outside."""
