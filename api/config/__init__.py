"""Server settings and where each came from; `--lora-modules`."""
