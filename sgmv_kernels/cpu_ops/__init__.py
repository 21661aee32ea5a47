"""CPU backend: launchers, weight packing, the recorded step."""
