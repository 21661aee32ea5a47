"""Kernels for batches whose rows belong to different LoRA adapters. Import `sgmv_kernels.ops`, nothing else."""
