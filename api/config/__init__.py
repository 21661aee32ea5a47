"""Settings of the server, their sources, and `--lora-modules`."""
