"""Plain torch backend: runs on every device, and replaces other backends that cannot run."""
