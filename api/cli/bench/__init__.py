"""`lorasrv bench`: load generator for any OpenAI-compatible server."""
