"""One replica over several processes: who computes which part of a model, and how parts meet (docs/partition.md)."""
