"""Read checkpoints whose linears are quantized already, one file for each format; values are never rounded again."""
