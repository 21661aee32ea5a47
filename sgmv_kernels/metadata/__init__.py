"""Per-step metadata for kernels (segments, tables, one upload)."""
