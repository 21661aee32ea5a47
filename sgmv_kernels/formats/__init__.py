"""Encodings of adapter panels, group-quantized weights, fp8 and KV pages."""
