"""Define the public ops between the linears: norms, gates, softcaps; see `sgmv_kernels.ops`.

Shapes: T token rows, H hidden, F intermediate.
"""

import torch
from torch import Tensor

from sgmv_kernels.backend_ops import BackendOps
from sgmv_kernels.checks import check_added, check_gated, check_heads, check_normed, require


class PointwiseOps(BackendOps):
    """Compute the row-wise ops between the linears.

    Args: as `BackendOps`.
    """

    def add_(self, x: Tensor, delta: Tensor) -> None:
        """Add to the residual stream in place, without a norm after it (OLMo 2).

        Semantics: x += delta

        Args:
            x: [T, H] contiguous.
            delta: [T, H] contiguous of x's dtype.
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit.
        """
        self._check_activation(x, "x")
        check_added(x, delta)
        self._backend.add_(x, delta)

    def add_rms_norm_(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add to the residual stream in place, and norm the sum.

        Semantics: x += delta; x / sqrt(mean(x^2) + eps) * weight

        Args:
            x: [T, H] contiguous; written in place if `delta` is given.
            delta: [T, H] contiguous of x's dtype, or None for 0.
            weight: [H] fp32.
            eps: added to the mean square.
        Returns: [T, H] in x's dtype, a new tensor.
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit.
        """
        self._check_activation(x, "x")
        check_normed(x, delta, weight)
        return self._backend.add_rms_norm_(x, delta, weight, eps)

    def add_layer_norm_(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add to the residual stream in place, and norm the sum minus its mean.

        Semantics: x += delta; c / sqrt(mean(c^2) + eps) * weight, c = x - mean(x)

        Args, Returns, Raises: as `add_rms_norm_`.
        """
        self._check_activation(x, "x")
        check_normed(x, delta, weight)
        return self._backend.add_layer_norm_(x, delta, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Gate by SiLU.

        Semantics: silu(gate) * up, gate and up the halves of the last dimension

        Args:
            gate_up: [T, 2F] contiguous.
        Returns: [T, F] in gate_up's dtype, a new tensor.
        Raises:
            KernelArgumentError: a shape or dtype that does not fit.
        """
        self._check_activation(gate_up, "gate_up")
        check_gated(gate_up)
        return self._backend.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Gate by GELU in its tanh form (Hendrycks and Gimpel 2016).

        Semantics: gelu(gate) * up, gate and up the halves of the last dimension

        Args:
            gate_up: [T, 2F] contiguous.
        Returns: [T, F] in gate_up's dtype, a new tensor.
        Raises:
            KernelArgumentError: a shape or dtype that does not fit.
        """
        self._check_activation(gate_up, "gate_up")
        check_gated(gate_up)
        return self._backend.gelu_mul(gate_up)

    def gelu(self, x: Tensor) -> Tensor:
        """Apply GELU in its exact form, by the error function.

        Semantics: x * (1 + erf(x / sqrt(2))) / 2

        Args:
            x: [T, F] contiguous.
        Returns: [T, F] in x's dtype, a new tensor.
        Raises:
            KernelArgumentError: a shape or dtype that does not fit.
        """
        self._check_activation(x, "x")
        require(x.dim() == 2 and x.is_contiguous(), "x must be contiguous [T, F]")
        return self._backend.gelu(x)

    def norm_heads_(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, kv_heads: int, eps: float) -> None:
        """Norm every head of q and k in place, as Qwen 3 and Gemma 3 do before rotation.

        For OLMo 2, which norms all heads of q or k together, they count as one head here.

        Semantics: x / sqrt(mean(x^2) + eps) * weight over the numbers of a head, the weight q's or k's; v is unchanged

        Args:
            qkv: [T, heads * D + 2 kv_heads * K] contiguous.
            q_weight: [D] fp32.
            k_weight: [K] fp32.
            kv_heads: key heads.
            eps: added to the mean square.
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit.
        """
        self._check_activation(qkv, "qkv")
        check_heads(qkv, q_weight, k_weight, kv_heads)
        self._backend.norm_heads_(qkv, q_weight, k_weight, kv_heads, eps)

    def softcap_(self, x: Tensor, cap: float) -> None:
        """Bound logits in place (Gemma 2).

        Semantics: x = cap * tanh(x / cap)

        Args:
            x: [T, V] contiguous.
            cap: positive bound.
        Raises:
            KernelArgumentError: a shape, dtype or cap that does not fit.
        """
        self._check_activation(x, "x")
        require(x.dim() == 2 and x.is_contiguous() and cap > 0, "x must be contiguous [T, V], cap positive")
        self._backend.softcap_(x, cap)

    def take_rows(self, x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
        """Copy rows.

        Semantics: out = x[rows]

        Args:
            x: [T, H] contiguous.
            rows: [N] int64, below T.
            out: [N, H] contiguous, of x's dtype.
        Returns: `out`.
        Raises:
            KernelArgumentError: shapes or dtypes that do not fit; nothing has been written.
        """
        self._check_activation(x, "x")
        require(x.dim() == 2 and x.is_contiguous(), "x must be contiguous [T, H]")
        require(rows.dtype == torch.int64 and rows.dim() == 1, "rows must be int64 [N]")
        fits = out.shape == (len(rows), x.shape[1]) and out.dtype == x.dtype and out.is_contiguous()
        require(fits, f"out must be contiguous [{len(rows)}, {x.shape[1]}] of x's dtype")
        return self._backend.take_rows(x, rows, out)

    def likeliest(self, logits: Tensor) -> Tensor:
        """Find the largest logit of each row.

        Semantics: argmax(logits, -1), the first of equals; `NO_TOKEN` for a row with NaN or infinity, in torch also
        for one whose numbers add up to infinity

        Args:
            logits: [B, V] fp32, rows contiguous.
        Returns: [B] int64, a new tensor.
        Raises:
            KernelArgumentError: a shape or dtype that does not fit.
        """
        fits = logits.dim() == 2 and logits.dtype == torch.float32 and logits.shape[1] > 0 and logits.stride(1) == 1
        require(fits, "logits must be fp32 [B, V], rows contiguous")
        return self._backend.likeliest(logits)
