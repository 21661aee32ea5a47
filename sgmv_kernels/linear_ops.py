"""Public ops of base linears over packed codes; see `sgmv_kernels.ops`.

Shapes: T token rows, H inputs, O outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgmv_kernels.backend import PackedLinear, PackedParts
from sgmv_kernels.backend_ops import BackendOps
from sgmv_kernels.checks import require
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight, join_codes


class LinearOps(BackendOps):
    """Pack the codes of base linears, and multiply by them.

    Args: as `BackendOps`.
    """

    def reads(self, codes: GroupQuantizedWeight) -> bool:
        """Return whether these kernels can read codes with this group size and these factors."""
        try:
            self._backend.check_codes(codes)
        except KernelArgumentError:
            return False
        return True

    def pack_linear(
        self, codes: GroupQuantizedWeight, bias: Tensor | None = None, *, few_rows: bool = False
    ) -> PackedLinear:
        """Return weight codes in the order that these kernels read, copied if needed.

        Args:
            codes: [O, H], on these kernels' device.
            bias: [O] fp32, or None for 0.
            few_rows: True for an embedding or a head, which is never multiplied with as many rows as a layer.
        Returns: the linear for `linear`.
        Raises:
            KernelArgumentError: groups that the kernels cannot read, or shapes that do not fit.
        """
        require(codes.codes.device.type == self.device.type, f"codes must be on {self.device}")
        fits = bias is None or (bias.shape == (codes.out_features,) and bias.dtype == torch.float32)
        require(fits, f"bias must be float32 [{codes.out_features}]")
        return self._backend.pack_linear(codes, bias, few_rows or not self._copies)

    def pack_parts(self, parts: Sequence[GroupQuantizedWeight], bias: Tensor | None = None) -> PackedLinear:
        """Return weight codes of different kinds, with the same inputs, as one linear in these kernels' order.

        Args:
            parts: codes of the outputs, in order; they are joined into as few weights as possible (`join_codes`).
            bias: fp32, for the outputs of all parts, or None for 0.
        Returns: the linear for `linear`.
        Raises:
            KernelArgumentError: as `pack_linear`, or parts with different inputs.
        """
        require(len({part.in_features for part in parts}) == 1, "parts must have the same inputs")
        joined = join_codes(parts)
        widths = [part.out_features for part in joined]
        fits = bias is None or bias.shape == (sum(widths),)
        require(fits, f"bias must be float32 [{sum(widths)}]")
        biases = [None] * len(joined) if bias is None else torch.split(bias, widths)
        packed = tuple(self.pack_linear(part, own) for part, own in zip(joined, biases, strict=True))
        return packed[0] if len(packed) == 1 else PackedParts(packed)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """Compute a base linear over packed codes.

        Semantics: x @ W^T + bias, W from `GroupQuantizedWeight.dequantize`. On the CPU with Numba, activations are
        rounded first: every 32 neighbours of a row, in the order of the weight's columns, to multiples of 1/127 of
        their largest magnitude.

        Args:
            x: [T, H] contiguous.
            packed: from `pack_linear` or `pack_parts` of these ops.
        Returns: [T, O] in x's dtype; sums are fp32, and a row's result does not depend on other rows, unless there are
            so many that the CPU computes them in bf16 (`cpu_ops.linear_autotune`).
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit.
        Source: group-wise scales, ggml (Gerganov) and GPTQ (Frantar et al. 2022).
        """
        self._check_activation(x, "x")
        fits = x.dim() == 2 and x.is_contiguous() and x.shape[1] == packed.in_features
        require(fits, f"x must be contiguous [T, {packed.in_features}]")
        if isinstance(packed, PackedParts):
            return self._backend.linear_parts(x, packed.parts)
        return self._backend.linear(x, packed)
