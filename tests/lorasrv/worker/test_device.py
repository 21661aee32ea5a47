"""What `--device` means, and how numbers of a step get there."""

import numpy as np
import pytest
import torch

from lorasrv.errors import ConfigError
from lorasrv.worker.device import DeviceMemory, activation_dtype, is_out_of_memory, resolve_device
from sgmv_kernels.metadata.h2d import upload

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_cuda, device in ((True, CUDA), (False, CPU)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        assert resolve_device("auto") == device
        assert resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"--device cuda: .* sees no CUDA device; use --device cpu"):
        resolve_device("cuda")


def test_activations() -> None:
    assert activation_dtype(CPU, torch.bfloat16) == torch.float32
    assert activation_dtype(CUDA, torch.bfloat16) == torch.bfloat16
    assert activation_dtype(CUDA, torch.float32) == torch.float32


def test_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    assert DeviceMemory.of(CUDA) == DeviceMemory(1000, 4000, on_gpu=True)
    host = DeviceMemory.of(CPU)
    assert 0 < host.free <= host.total
    assert not host.on_gpu


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        # Of pinned memory, a graph, a launch.
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_a_shortage_of_memory_looks_like(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_uploaded_numbers() -> None:
    arrays = [np.arange(3, dtype=np.int32), np.array([], dtype=np.int64), np.array([1 << 30])]
    for got, array in zip(upload(arrays, CPU), arrays, strict=True):
        assert got.dtype == torch.int64
        assert got.tolist() == array.tolist()
