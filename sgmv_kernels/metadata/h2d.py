"""Copy of a step's integers to a device: one asynchronous copy for all arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.integer[Any]]


def upload(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Copy arrays [n] of numbers below 2^31 to int64 tensors [n] on the device.

    On a GPU the arrays share a new pinned int32 buffer; torch reuses pinned memory only after copies from it are done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array.astype(np.int64)) for array in arrays]
    sizes = [array.size for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for target, array in zip(torch.split(packed, sizes), arrays, strict=True):
        target.copy_(torch.from_numpy(array.astype(np.int32)))
    return list(torch.split(packed.to(device, non_blocking=True).long(), sizes))


def take(table: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows [N, ...] of a table. A list as an index would be copied by a copy that waits for the device."""
    (places,) = upload([np.array(rows, dtype=np.int64)], table.device)
    return table.index_select(0, places)
