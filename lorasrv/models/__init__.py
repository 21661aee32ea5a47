"""Model families as data, and the checkpoints and weight formats that the decoder is built from."""
