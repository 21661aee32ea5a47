"""One replica over several processes: which process computes which part of a model, and how parts are combined
(docs/partition.md)."""
