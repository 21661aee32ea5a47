"""Read checkpoints with quantized linears, one module per format, if possible without rounding the values again."""
