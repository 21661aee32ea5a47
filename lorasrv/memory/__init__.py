"""Accounts of the one page pool: KV tables, cached prefixes, adapters, eviction, swap. Torch-free."""
