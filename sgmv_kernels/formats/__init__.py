"""How bytes are encoded: adapter panels, group-quantized weights, fp8, KV pages."""
