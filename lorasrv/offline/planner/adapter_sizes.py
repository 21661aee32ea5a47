"""Determine the sizes of a trace's adapters: from the store, from the trace, or from an assumed rank. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from adapter_store.errors import AdapterError
from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.store import AdapterStore
from lorasrv.metrics.trace import TraceRequest
from lorasrv.models.lora_sites import adapter_layout, full_layout
from lorasrv.models.spec import ModelSpec
from lorasrv.offline.planner.what_if import name_of_size
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

PIECES = 4
"""Sites of a layout if only its bytes are known: gives about as many panels as an adapter usually has."""
PIECE_RANK = 16


@dataclass(frozen=True)
class AdapterSizes:
    """Hold what is known about the sizes of adapters."""

    spec: ModelSpec
    itemsize: int
    # Rank on every linear, for adapters of unknown size.
    rank: int
    # Layouts from the store.
    told: Mapping[str, AdapterLayout]
    # Bytes from the trace.
    recorded: Mapping[str, int]

    @classmethod
    def of(
        cls, spec: ModelSpec, itemsize: int, rank: int, trace: Sequence[TraceRequest], store: AdapterStore | None = None
    ) -> "AdapterSizes":
        recorded = {r.adapter: r.adapter_bytes for r in trace if r.adapter is not None and r.adapter_bytes is not None}
        told = {}
        if store is not None:
            names = {r.adapter for r in trace if r.adapter is not None}
            found = {name: _spec_in(store, name) for name in names}
            told = {name: adapter_layout(spec, known, itemsize) for name, known in found.items() if known is not None}
        return cls(spec, itemsize, rank, told, recorded)

    def maker(self) -> Callable[[str], AdapterLayout]:
        """Return a function from name to layout that builds each layout once."""

        @cache
        def layout_of(name: str) -> AdapterLayout:
            like = name_of_size(name)
            if like in self.told:
                return self.told[like]
            nbytes = self.recorded.get(like)
            return self._of_rank() if nbytes is None else layout_of_bytes(nbytes, self.spec.num_slabs, self.itemsize)

        return layout_of

    def assumed(self, names: Sequence[str]) -> list[str]:
        """Return the names whose size is neither stored nor recorded."""
        return [name for name in names if name not in self.told and name not in self.recorded]

    def _of_rank(self) -> AdapterLayout:
        return full_layout(self.spec, self.rank, self.itemsize)


@cache
def layout_of_bytes(nbytes: int, num_slabs: int, itemsize: int) -> AdapterLayout:
    """Return a layout of about `nbytes` bytes, in equal slabs."""
    width = max(1, round(nbytes / (num_slabs * PIECES * 2 * PIECE_RANK * itemsize)))
    sites = (SiteDims(width, (width,)),) * PIECES
    return AdapterLayout(sites, (((PIECE_RANK,),) * PIECES,) * num_slabs, itemsize)


def _spec_in(store: AdapterStore, name: str) -> AdapterSpec | None:
    """Look up an adapter in the store by name or digest; None if it is missing."""
    try:
        key = store.resolve(name).key
        return None if key is None else store.spec(key)
    except (AdapterError, OSError):
        pass
    try:
        return store.spec(AdapterKey(name))
    except (AdapterError, OSError):
        return None
