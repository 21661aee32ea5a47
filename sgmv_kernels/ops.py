"""Public ops, which other packages use: they check arguments and call the kernels of the chosen backend.

The methods are in the modules of the base classes: `adapter_ops`, `attention_ops`, `linear_ops`, `pointwise_ops`.
"""

import logging
from typing import TYPE_CHECKING

import torch

from sgmv_kernels.adapter_ops import AdapterOps
from sgmv_kernels.attention_ops import AttentionOps
from sgmv_kernels.backend import KernelsUnavailable, Progress, choose_backend, load_backend
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.forward_pass import ProgramShape, Stages
from sgmv_kernels.linear_ops import LinearOps
from sgmv_kernels.pointwise_ops import PointwiseOps

if TYPE_CHECKING:
    from sgmv_kernels.cpu_ops.recorded_step import RecordedStep

logger = logging.getLogger(__name__)


class Ops(AdapterOps, AttentionOps, LinearOps, PointwiseOps):
    """Run the ops on one device. A plan is made once per step and is used for every layer.

    Args:
        device: where the tensors are.
        kernels: one of `KERNELS`; None selects the fastest that run on the device.
        copies: linears may keep a bf16 copy for many rows; without it, a row's result does not depend on other rows.
    Raises:
        KernelsUnavailable: the kernels chosen by name cannot run here.
    """

    def __init__(self, device: torch.device, kernels: str | None = None, *, copies: bool = False) -> None:
        self._chosen = kernels is not None
        super().__init__(device, choose_backend(device) if kernels is None else load_backend(kernels), copies=copies)
        if self._backend.name == "numba" and device.type != "cpu":
            raise KernelsUnavailable("kernels 'numba' run on the CPU only")

    @property
    def name(self) -> str:
        """Return the name of the kernels."""
        return self._backend.name

    @property
    def can_record(self) -> bool:
        """Return whether launches can be recorded and run together (`cpu_ops.recorded_step`)."""
        return self._backend.can_record

    @property
    def is_batch_invariant(self) -> bool:
        """Return whether a row's results have the same bits for any other rows."""
        has_copies = self._copies and self._backend.wide_rows() is not None
        return self._backend.is_batch_invariant and not has_copies

    def best_threads(self, most: int) -> int:
        """Return the fastest number of threads up to `most`; this may run measurements in the calling thread's team."""
        return self._backend.best_threads(most)

    def program(self, stages: Stages, shape: ProgramShape) -> "RecordedStep":
        """Return a program that runs a model's passes from recordings, for numbers of rows with the same kernels."""
        from sgmv_kernels.cpu_ops.recorded_step import RecordedStep

        return RecordedStep(stages, shape.below(self._backend.wide_rows() if self._copies else None), self)

    def warm_up(
        self, adapter_dtype: torch.dtype, kv_format: KVFormat, progress: Progress = lambda what, share: None
    ) -> None:
        """Compile the kernels for these adapter panels and KV pages, so that no request waits for compilation.

        If the kernels cannot run and were not chosen by name, plain torch replaces them.

        Raises:
            KernelsUnavailable: the kernels chosen by name do not compile, or do not read this KV format.
        """
        try:
            if not self._reads(kv_format):
                raise KernelsUnavailable(f"they do not read the KV format {kv_format.name!r}")
            self._backend.warm_up(adapter_dtype, kv_format, progress)
        except Exception as error:
            if self._chosen:
                raise KernelsUnavailable(f"kernels {self.name!r} cannot run here: {error}") from error
            logger.warning("kernels %r cannot run here: %s; using plain torch, which is slower", self.name, error)
            self._backend = load_backend("torch")
