"""Which kernels a server needs on this machine. Imports no torch."""

from functools import cache

from sgmv_kernels.cpu_runtime.processor import SIGNED_DOT, features

Kernel = tuple[str, str]
"""A module of `cpu_kernels`, and the kernel's name in it."""
_KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "int8", "k8v4": "k8v4"}


def common_kernels(adapter_dtype: str, kv_format: str) -> tuple[Kernel, ...]:
    """Return the kernels of most models with these adapter panels and KV pages, the slowest to compile first.

    Args:
        adapter_dtype: torch's name of it.
        kv_format: name of a KV format that these kernels read.
    """
    int8 = "int8_signed" if needs_signed() else "int8"
    return (
        ("attention", _KINDS[kv_format]),
        ("sgmv", _KINDS[adapter_dtype]),
        *(("linear", entry) for entry in (int8, "int4")),
        ("pointwise", f"rope_{_KINDS[kv_format]}"),
        ("weight_rows", "rows"),
        ("program", "compute"),
        ("linear", "round8"),
        *(("pointwise", entry) for entry in ("norm", "silu", "take")),
        ("likeliest", "rows"),
        ("program", "help"),
    )


OF_SOME_MODELS: tuple[Kernel, ...] = (
    ("linear", "q3h"),
    *(("pointwise", entry) for entry in ("layer_norm", "gelu", "gelu_exact", "heads", "cap", "add")),
)
"""A model that needs one of them often needs another."""


def further_kernels(adapter_dtype: str, kv_format: str) -> tuple[Kernel, ...]:
    """Return the kernels of some models, adapters and requests, the slowest to compile first.

    Args:
        adapter_dtype, kv_format: as of `common_kernels`.
    """
    return (
        ("sgmv", f"{_KINDS[adapter_dtype]}_codes"),
        ("page_mass", _KINDS[kv_format]),
        *OF_SOME_MODELS,
        ("slots", "copy"),
        ("affine", "rows"),
    )


@cache
def needs_signed() -> bool:
    """Return whether int8 codes are multiplied as signed bytes: by ARM's products, or by magnitude and sign where a
    product of bytes can overflow.
    """
    has = features().get
    return bool(has(SIGNED_DOT) or (has("avx2") and not (has("avx512vnni") or has("avxvnni"))))
