"""Which kernels a server needs on this machine. Imports no torch."""

from functools import cache

import llvmlite.binding as llvm

Kernel = tuple[str, str]
"""A module of `cpu_kernels`, and the kernel's name in it."""
_KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "int8", "k8v4": "k8v4"}


def needed_kernels(adapter_dtype: str, kv_format: str) -> tuple[Kernel, ...]:
    """Return the kernels of every model with these adapter panels and KV pages, the slowest to compile first.

    Args:
        adapter_dtype: torch's name of it.
        kv_format: name of a KV format that these kernels read.
    """
    linear = ("q3h", "int4", "int8", *(("int8_signed",) if needs_signed() else ()), "round8")
    rest = ("heads", "cap", "take", "likeliest")
    pointwise = (f"rope_{_KINDS[kv_format]}", "norm", "layer_norm", "silu", "gelu", "gelu_exact", *rest)
    return (
        ("attention", _KINDS[kv_format]),
        ("page_mass", _KINDS[kv_format]),
        ("sgmv", _KINDS[adapter_dtype]),
        *(("linear", entry) for entry in linear),
        *(("pointwise", entry) for entry in pointwise),
        ("affine", "rows"),
        ("weight_rows", "rows"),
        ("slots", "copy"),
        ("program", "compute"),
        ("program", "help"),
    )


@cache
def needs_signed() -> bool:
    """Return whether int8 codes are multiplied by magnitude and sign, because the processor has no product of bytes
    that cannot overflow.
    """
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx2")) and not (features.get("avx512vnni") or features.get("avxvnni"))
