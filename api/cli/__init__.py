"""The `lorasrv` command."""
