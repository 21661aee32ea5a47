"""Counters, histograms, per-request and per-adapter statistics, traffic traces. Torch-free."""
