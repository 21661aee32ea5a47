"""Where a model computes: the device that `--device` means here, its activations, what it has free."""

import torch

from lorasrv.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where torch sees it.

    Raises:
        ConfigError: `cuda` was asked for, and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        built = f"torch {torch.__version__} sees no CUDA device"
        raise ConfigError(f"--device cuda: {built}; use --device cpu, or install a torch for your driver")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def activation_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """fp32 on a CPU (ARCHITECTURE.md says why); what `--dtype` says elsewhere."""
    return torch.float32 if device.type == "cpu" else dtype


def free_device_bytes(device: torch.device) -> int:
    """What a CUDA device has left, once torch has given back what it only keeps."""
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info(device)[0]
    return free
