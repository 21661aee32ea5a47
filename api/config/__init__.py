"""Settings of the server, their sources, and the registration of `--lora-modules`."""
