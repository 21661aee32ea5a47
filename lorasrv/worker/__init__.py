"""Compute on the device: weights, decoder, batch tensors, the pool's bytes, CUDA graphs, adapter loading."""
