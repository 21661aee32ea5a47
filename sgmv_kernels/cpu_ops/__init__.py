"""CPU backend as seen from Python: launchers, weight packing, the recorded step."""
