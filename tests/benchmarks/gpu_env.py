"""Print what this machine is: versions, driver, and the bandwidth, products and launches that floors come from.

    python tests/benchmarks/gpu_env.py        # rows as lines of JSON; docs/gpu.md

Also whether the server finds what it imports, which a later stage starts.
"""

import importlib
import platform
import shutil
import subprocess

import numpy as np
import torch
import triton
from gpu_cases import DRY_RUN, copy_bandwidth, eager_us, emit, graph_us, need_gpu

SIZE = 64 if DRY_RUN else 8192


def main() -> None:
    device = need_gpu()
    emit(
        "versions",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=triton.__version__,
        numpy=np.__version__,
    )
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit"
        told = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True).stdout
        emit("device", nvidia_smi=told.strip())
    if not DRY_RUN:
        held = torch.cuda.get_device_properties(device)
        emit(
            "device",
            name=held.name,
            processors=held.multi_processor_count,
            bytes=held.total_memory,
            l2=held.L2_cache_size,
        )
    try:
        importlib.import_module("api.server")
        emit("server", ok=True)
    except ImportError as error:
        emit("server", ok=False, why=str(error))
    emit("bandwidth", copy_gb_s=copy_bandwidth(device) / 1e9)
    a = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    emit("product", bf16_tflop_s=2 * SIZE**3 / graph_us([lambda: a @ a] * 4) * 1e-6)
    one = torch.zeros(1, device=device)
    calls = [lambda: one.add_(1)] * 200
    emit("launch", in_a_graph_us=graph_us(calls), eager_us=eager_us(calls))


if __name__ == "__main__":
    main()
