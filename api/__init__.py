"""The outside of lorasrv: HTTP and the command line. Start it with the `lorasrv` command, never by import path."""
