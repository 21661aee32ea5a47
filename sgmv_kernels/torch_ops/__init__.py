"""Plain torch backend: runs on every device, and is the fallback of the others."""
