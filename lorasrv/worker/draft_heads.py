"""Draft heads: Medusa heads of the base and of adapters, ready to compute.

Those of an adapter are read when a draft is first wanted, beside the steps: until then, and while their memory is
taken by others', the adapter's answers are drafted by the base's heads, or not.

Source: Medusa (Cai et al. 2024, arXiv:2401.10774), heads beside adapters after LoRAX.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from cachetools import LRUCache
from torch import Tensor
from torch.nn.functional import linear, silu

from adapter_store.errors import AdapterError, ProblemList
from adapter_store.formats.draft_heads import HEADS_NAME, match_heads, read_own_header
from adapter_store.formats.weights import HeadArrays, head_arrays
from adapter_store.spec import AdapterKey
from lorasrv.errors import ConfigError, LorasrvError
from lorasrv.worker.disk_threads import DiskThreads

_LOG = logging.getLogger(__name__)
READ_TIMEOUT_S = 60.0
MAX_UNUSABLE = 4096
"""Adapters whose heads are not asked for again, at most."""


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
        """Return what the output layer reads to guess the token `depth` places behind the next one.

        Args:
            states: [N, H] normed last hidden states.
        Returns: [N, H].
        """
        x = states
        for weight, bias in self.heads[depth]:
            x = x + silu(linear(x.to(weight.dtype), weight, bias)).to(x.dtype)
        return x


def read_heads(path: Path, hidden_size: int) -> HeadArrays:
    """Read the heads of the base from a file, or from the one that a folder holds.

    Raises:
        ConfigError: there are none, or they do not fit the base.
    """
    file_path = path / HEADS_NAME if path.is_dir() else path
    problems = ProblemList()
    try:
        with file_path.open("rb") as file:
            header = read_own_header(file)
            names = match_heads(header, header.tensors, hidden_size, problems)
            problems.raise_if_any()
            file.seek(0)
            return head_arrays(bytearray(file.read()), header, names)
    except OSError as error:
        raise ConfigError(f"--draft-heads {path}: {file_path.name} cannot be read: {error.strerror}") from error
    except AdapterError as error:
        raise ConfigError(f"--draft-heads {path}: {error}") from error


class DraftHeads:
    """Find the heads that draft for an adapter. Called by the engine thread; reads run in a thread of their own.

    Args:
        base: heads of the base.
        read: reads the heads of an adapter, float32; None: there are no adapters.
        max_bytes: memory for the heads of adapters; the least recently used go first.
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
        self._arriving: dict[AdapterKey, Future[MedusaHeads]] = {}
        self._unusable: LRUCache[AdapterKey, None] = LRUCache(MAX_UNUSABLE)
        self._threads = DiskThreads(1, "draft-heads", READ_TIMEOUT_S)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the heads that are loaded."""
        return int(self._loaded.currsize) + (0 if self._base is None else self._base.nbytes)

    def find(self, adapter: AdapterKey | None, *, has_own: bool) -> MedusaHeads | None:
        """Return the heads to draft with now; begin to read the adapter's own if they are not there.

        Args:
            has_own: whether the adapter has heads.
        """
        if adapter is None or not has_own:
            return self._base
        self._take_arrived()
        if (own := self._loaded.get(adapter)) is not None:
            return own
        if self._read is not None and adapter not in self._arriving and adapter not in self._unusable:
            self._arriving[adapter] = self._threads.submit(adapter, partial(self._load, self._read, adapter))
        return self._base

    def _load(self, read: Callable[[AdapterKey], HeadArrays], adapter: AdapterKey) -> MedusaHeads:
        return MedusaHeads.of(read(adapter), self._dtype, self._device)

    def _take_arrived(self) -> None:
        for adapter in [key for key, result in self._arriving.items() if result.done()]:
            try:
                # Raises ValueError if they are larger than the cache.
                self._loaded[adapter] = self._arriving.pop(adapter).result()
            except (AdapterError, LorasrvError, OSError, ValueError) as error:
                self._unusable[adapter] = None
                _LOG.warning("the draft heads of adapter %s are not used: %s", adapter[:12], error)
