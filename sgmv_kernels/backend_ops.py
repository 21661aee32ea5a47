"""Common base of the public ops: one backend on one device, and the check of activations, which depends on both."""

import torch
from torch import Tensor

from sgmv_kernels.backend import Backend
from sgmv_kernels.errors import KernelArgumentError


class BackendOps:
    """Check arguments and call the kernels of one backend.

    Args:
        device: where the tensors are.
        backend: the kernels.
        copies: linears may keep a bf16 copy for many rows.
    """

    def __init__(self, device: torch.device, backend: Backend, *, copies: bool = False) -> None:
        self.device, self._backend, self._copies = device, backend, copies

    def _check_activation(self, x: Tensor, name: str) -> None:
        if x.dtype not in self._backend.activations:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._backend.activations)
            raise KernelArgumentError(f"{name} must be {names} for these kernels, not {x.dtype}")
        if x.device.type != self.device.type:
            raise KernelArgumentError(f"{name} is on {x.device}, these kernels are for {self.device}")
