"""Account for the page pool: KV tables, cached prefixes, adapters, eviction, swap. Torch-free."""
