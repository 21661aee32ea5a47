"""Draft heads: Medusa heads of the base and of adapters, ready to compute.

The heads of an adapter are read while steps run, one adapter after another. Until they are loaded, or while other heads
take their memory, the base's heads draft the adapter's answers, or none do.

Source: Medusa (Cai et al. 2024, arXiv:2401.10774), heads beside adapters after LoRAX.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor
from torch.nn.functional import linear, silu

from adapter_store.errors import AdapterError, ProblemList
from adapter_store.formats.draft_heads import match_heads, read_own_header
from adapter_store.formats.peft_dir import HEADS_NAME
from adapter_store.formats.weights import HeadArrays, head_arrays
from adapter_store.spec import AdapterKey
from lorasrv.config import size
from lorasrv.errors import ConfigError
from lorasrv.worker.device import compute_alone
from lorasrv.worker.disk_threads import DiskThreads

_LOG = logging.getLogger(__name__)
READ_TIMEOUT_S = 60.0
READ_AGAIN_S, RETRY_S = 60.0, 600.0
"""Seconds between two reads of the same heads: if other heads have taken their memory, and after a failed read."""
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Hold heads on a device: the weight [H, H] and bias [H] of each block."""

    heads: tuple[tuple[tuple[Tensor, Tensor | None], ...], ...]

    @classmethod
    def of(cls, arrays: HeadArrays, dtype: torch.dtype, device: torch.device) -> "MedusaHeads":
        """Convert heads from float32 arrays."""

        def tensor(array: object) -> Tensor:
            return torch.tensor(array, dtype=torch.float32).to(device=device, dtype=dtype)

        return cls(
            tuple(
                tuple((tensor(weight), None if bias is None else tensor(bias)) for weight, bias in head)
                for head in arrays
            )
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of all blocks."""
        return sum(w.nbytes + (0 if b is None else b.nbytes) for head in self.heads for w, b in head)

    def guess(self, states: Tensor, depth: int) -> Tensor:
        """Return the output layer's input for guessing the token `depth` places after the next one.

        Args:
            states: [N, H] normed last hidden states.
        Returns: [N, H].
        """
        x = states
        for weight, bias in self.heads[depth]:
            x = x + silu(linear(x.to(weight.dtype), weight, bias)).to(x.dtype)
        return x


def read_heads(path: Path, hidden_size: int) -> HeadArrays:
    """Read the heads of the base from a file, or from the file `HEADS_NAME` in a folder.

    Raises:
        ConfigError: there are no heads, or they do not fit the base.
    """
    file_path = path / HEADS_NAME if path.is_dir() else path
    problems = ProblemList()
    try:
        with file_path.open("rb") as file:
            header = read_own_header(file)
            names = match_heads(header, header.tensors, hidden_size, problems)
            problems.raise_if_any()
            file.seek(0)
            heads = head_arrays(bytearray(file.read()), header, names)
    except OSError as error:
        raise ConfigError(f"--draft-heads: {file_path} cannot be read: {error.strerror}") from error
    except AdapterError as error:
        raise ConfigError(f"--draft-heads {path} holds no Medusa heads of this base: {error}") from error
    if not all(np.isfinite(array).all() for head in heads for block in head for array in block if array is not None):
        raise ConfigError(f"--draft-heads {path} holds NaN or infinite values")
    return heads


class DraftHeads:
    """Find the heads that draft for an adapter. Called by the engine thread; reads run in a thread of their own.

    Args:
        base: heads of the base.
        read: reads the heads of an adapter, float32; None: there are no adapters.
        max_bytes: memory for the heads of adapters; the least recently used are dropped first.
    """

    def __init__(
        self,
        base: MedusaHeads | None,
        read: Callable[[AdapterKey], HeadArrays] | None,
        max_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._base, self._read = base, read
        self._dtype, self._device = dtype, device
        self._loaded: LRUCache[AdapterKey, MedusaHeads] = LRUCache(max_bytes, getsizeof=lambda heads: heads.nbytes)
        # Heads being read, of at most one adapter.
        self._arriving: dict[AdapterKey, Future[MedusaHeads]] = {}
        # When heads may be read again.
        self._next_read_s: LRUCache[AdapterKey, float] = LRUCache(MAX_REMEMBERED)
        self._threads = DiskThreads(1, "draft-heads", READ_TIMEOUT_S, compute_alone)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the heads that are loaded."""
        return int(self._loaded.currsize) + (0 if self._base is None else self._base.nbytes)

    def find(self, adapter: AdapterKey | None, *, has_own: bool) -> MedusaHeads | None:
        """Return the heads to draft with now; begin to read the adapter's own if they are not loaded.

        Args:
            has_own: whether the adapter has heads.
        """
        self._take_arrived()
        if adapter is None or not has_own:
            return self._base
        if (own := self._loaded.get(adapter)) is not None:
            return own
        is_due = time.monotonic() >= self._next_read_s.get(adapter, 0.0)
        if self._read is not None and is_due and not self._arriving:
            self._arriving[adapter] = self._threads.submit(adapter, partial(self._load, self._read, adapter))
        return self._base

    def close(self) -> None:
        """Stop reading heads; do not wait for a read under way."""
        self._threads.close(wait_s=0.0)

    def _load(self, read: Callable[[AdapterKey], HeadArrays], adapter: AdapterKey) -> MedusaHeads:
        return MedusaHeads.of(read(adapter), self._dtype, self._device)

    def _take_arrived(self) -> None:
        for adapter in [key for key, result in self._arriving.items() if result.done()]:
            wait_s = RETRY_S
            try:
                heads = self._arriving.pop(adapter).result()
                if heads.nbytes <= self._loaded.maxsize:
                    self._loaded[adapter], wait_s = heads, READ_AGAIN_S
                else:
                    most = f"--draft-head-bytes {size(int(self._loaded.maxsize))}"
                    _LOG.warning("the draft heads of adapter %s take %s, %s", adapter[:12], size(heads.nbytes), most)
            except Exception as error:  # whatever the error, answers continue without the heads
                _LOG.warning("the draft heads of adapter %s are not used: %s", adapter[:12], error)
            self._next_read_s[adapter] = time.monotonic() + wait_s
