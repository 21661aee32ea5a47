"""Read PEFT and MLX folders: config fields, tensor names, safetensors, weights to numpy."""
