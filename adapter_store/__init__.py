"""Adapters on disk and in host memory: PEFT files, versions and digests. Independent of the device pool."""
