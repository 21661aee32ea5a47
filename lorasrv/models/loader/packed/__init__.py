"""Read checkpoints whose linears are quantized already, with one module per format; values are not rounded again."""
