"""Readers of PEFT and MLX folders: config fields, tensor names, safetensors headers, weights to NumPy."""
