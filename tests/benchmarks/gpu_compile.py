"""Compile the Triton kernels of a server of Llama-3-8B's shape in every format, and print what ptxas made of each.

    python tests/benchmarks/gpu_compile.py        # rows as lines of JSON; docs/gpu.md

They are the kernels of the server's own warm-up, and stay in Triton's cache on disk for the stages behind this one. A
dry run compiles a few of one format for an sm90 that is not there.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from gpu_cases import DRY_RUN, MOST_COMPILERS, emit, need_gpu

FORMATS = (
    (("int4", "k8v4"),)
    if DRY_RUN
    else (
        ("int4", "bfloat16"),
        ("int8", "bfloat16"),
        ("int4", "int8"),
        ("int4", "k8v4"),
        ("q3h", "bfloat16"),
        ("bf16", "bfloat16"),
    )
)
"""Of weights, and of keys and values."""
MAX_LEN, MAX_ROWS, SLOTS, MAX_RANK, PAGES = 2048, 2048, 256, 256, 400
"""As a server's on CUDA, but the length, which decides about no kernel."""
DRY_KERNELS = 3


def passes_of(quantization: str, kv_format: str, device: torch.device) -> Sequence[Callable[[], object]]:
    """Return the passes of a warm-up: what decides about kernels is in one layer."""
    from gpu_step import SPEC, random_weights

    from lorasrv.worker.decoder import Decoder, DecoderLimits
    from lorasrv.worker.device_pool import DevicePool
    from lorasrv.worker.warm_up import WarmUpSteps, passes
    from sgmv_kernels.formats.kv_format import KV_FORMATS
    from sgmv_kernels.ops import Ops

    spec, ops = replace(SPEC, num_layers=1), Ops(device, "triton")
    memory = DevicePool(spec, PAGES, 16, KV_FORMATS[kv_format], device, scratch=True)
    limits = DecoderLimits(MAX_LEN, MAX_ROWS, SLOTS, torch.bfloat16, torch.bfloat16)
    decoder = Decoder(random_weights(spec, ops, quantization, torch.bfloat16), memory, limits, ops)
    return passes(WarmUpSteps(spec, memory, limits, MAX_RANK, has_trees=True), decoder, memory, limits, ops)


def compiled(key: Any) -> Any:
    """Return the kernel that was compiled for a key."""
    from triton.runtime import driver

    kernel = getattr(importlib.import_module(key.module), key.name)
    return kernel.device_caches[driver.active.get_current_device()][0][json.loads(key.data)["key"]]


def without_a_gpu() -> None:
    """Make Triton take this machine for one with an sm90."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(mock.Mock(get_current_device=lambda: 0, get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        importlib.import_module("sgmv_kernels.triton_ops.backend")


def main() -> None:
    device = torch.device("meta") if DRY_RUN else need_gpu()
    if DRY_RUN:
        without_a_gpu()
    from compiled_kernels import facts_of

    from sgmv_kernels.triton_ops import kernel_compiler

    kernel_compiler.MOST_PROCESSES = MOST_COMPILERS
    held: dict[Any, str] = {}
    for quantization, kv_format in FORMATS:
        with torch.inference_mode(), kernel_compiler.noted() as keys:
            for run in passes_of(quantization, kv_format, device):
                run()
        held |= {key: f"{quantization}, {kv_format} pages" for key in keys if key not in held}
    wanted = list(held)[:DRY_KERNELS] if DRY_RUN else list(held)
    started = time.perf_counter()
    kernel_compiler.load(wanted, lambda what, share: print(what, f"{share:.0%}", file=sys.stderr, flush=True))
    emit("time", kernels=len(wanted), seconds=time.perf_counter() - started)
    for key in wanted:
        facts = facts_of(key.name, held[key], compiled(key))
        words = {"loop": facts.loop, "barriers": facts.barriers, "waits": facts.waits, "copy_bytes": facts.copy_bytes}
        emit("kernels", format=held[key], kernel=key.name, registers=facts.registers, spills=facts.spills, **words)


if __name__ == "__main__":
    main()
