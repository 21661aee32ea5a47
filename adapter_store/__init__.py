"""Adapters on disk and in host memory: PEFT files, versions and digests. Knows nothing about the device pool."""
