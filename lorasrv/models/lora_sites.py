"""Derive the modules that the store validates, and the sites of the kernels, from a `ModelSpec`.

Matrices outside the layers have a column or row per token of the vocabulary. They are cut into blocks of tokens, one
for each slab of the pool (`VocabBlocks`), so that no slab becomes much larger than others.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from adapter_store.spec import INT8, AdapterSpec, BaseShapes
from adapter_store.validation.vocab_rows import MAX_ADDED_TOKENS
from lorasrv.models.spec import ModelSpec, SiteShape
from sgmv_kernels.formats.adapter_panels import (
    CODE_BYTES,
    GAIN,
    MAX_RANK,
    MAX_SLICES,
    PANEL_RANKS,
    SHIFT,
    AdapterLayout,
    LayerRanks,
    LayerVectors,
    RowTokens,
    SiteDims,
)

if TYPE_CHECKING:
    from lorasrv.models.loader.checkpoint import Checkpoint

TokenIds = npt.NDArray[np.int64]
HEAD = "lm_head"
"""Full name of the head in a model of transformers."""
HEAD_A, HEAD_B, EMBEDDING_A, EMBEDDING_B = range(4)
"""Sites of the ends. The head's A and the embedding's B are in slab 0; each slab has a block of the columns of the
head's B and of the embedding's A.
"""
HEAD_ROWS, EMBEDDING_ROWS = range(2)
"""Sites of the rows that adapters have for tokens of the vocabulary."""
BLOCK_ROWS, LEAST_ROWS = MAX_SLICES * MAX_RANK, PANEL_RANKS
"""Maximum and minimum of own rows in a block (except the last): the ranks of a site, and those of a panel."""
BLOCK_TOKENS = 64
"""Blocks are multiples of this many tokens, so that they begin on cache lines of logits."""


@dataclass(frozen=True, slots=True)
class VocabBlocks:
    """Cut a vocabulary into `count` blocks of `width` tokens. The last blocks may overlap, or own no token."""

    vocab_size: int
    count: int

    @classmethod
    def of(cls, spec: ModelSpec) -> "VocabBlocks":
        """Return the blocks of a base: one for each slab."""
        return cls(spec.vocab_size, spec.num_slabs)

    @property
    def width(self) -> int:
        """Return the number of tokens of a block."""
        share = -(-self.vocab_size // self.count)
        return min(self.vocab_size, -(-share // BLOCK_TOKENS) * BLOCK_TOKENS)

    def start(self, block: int) -> int:
        """Return a block's first token; every block lies inside the vocabulary."""
        return min(block * self.width, self.vocab_size - self.width)

    def owned(self, block: int) -> range:
        """Return the tokens that a block owns: those that are in no earlier block."""
        first = min(block * self.width, self.vocab_size)
        return range(first, min(first + self.width, self.vocab_size))


def base_shapes(spec: ModelSpec, name: str = "", checkpoint: str = "") -> BaseShapes:
    """Return every linear and norm of a layer with its widths, for validation in `adapter_store`.

    Args:
        spec: the base model.
        name: served name of the base.
        checkpoint: name of its file or folder (`checkpoint_name`); an adapter trained on another gets a warning.
    """
    modules = {
        module: (site.in_features, out)
        for site in spec.sites()
        for module, out in zip(site.modules, site.out_features, strict=True)
    }
    norms = dict(spec.norms(0).values())
    layers = range(spec.num_layers)
    found = {(layer, m) for layer in layers for site in spec.sites_of(layer) for m in site.modules}
    found |= {(layer, path) for layer in layers for path, _ in spec.norms(layer).values()}
    return BaseShapes(
        family=spec.family,
        num_layers=spec.num_layers,
        modules=modules,
        lacking=frozenset((layer, m) for layer in layers for m in (*modules, *norms)) - found,
        layer_prefix=spec.names.layers,
        name=name,
        checkpoint=checkpoint,
        biased=frozenset(m for site in spec.sites() if spec.has_bias(site.name) for m in site.modules),
        norms=norms,
        final_norm=spec.names.final_norm,
        ends={
            HEAD: (spec.hidden_size, spec.vocab_size),
            spec.names.embedding: (spec.vocab_size, spec.hidden_size),
        },
        embedding=spec.names.embedding,
        tied=spec.tied_head,
    )


def base_sample(checkpoint: "Checkpoint") -> list[float]:
    """Return numbers that identify the base in a store, whatever its quantization: the weights of the last norm.

    Every file of a model has these weights in floating point, and no known method changes them: methods that scale a
    linear's inputs (AWQ) fold the scales into the norms inside the layers.
    """
    norm = checkpoint.tensor("model.norm.weight").float()
    values: list[float] = (norm + 1 if checkpoint.spec.norms_less_one else norm).tolist()
    return values


def site_dims(spec: ModelSpec) -> tuple[SiteDims, ...]:
    """Return the linear sites of a layer as the kernels describe them."""
    return tuple(SiteDims(site.in_features, site.out_features) for site in spec.sites())


def adapter_layout(
    spec: ModelSpec, adapter: AdapterSpec, itemsize: int, row_tokens: tuple[TokenIds, TokenIds] | None = None
) -> AdapterLayout:
    """Return the layout of a validated adapter in the pool, from its spec, without reading weights.

    Args:
        itemsize: bytes of a weight in the adapter dtype.
        row_tokens: tokens of its own rows, in the head and in the embedding; None if the weights are unknown, which
            takes as many as the spec allows.
    """
    ranks = {(m.layer, m.module): m.rank for m in adapter.modules}
    size = CODE_BYTES if adapter.stored == INT8 else itemsize
    head, embedding = (ranks.get((spec.num_layers, name), 0) for name in (HEAD, spec.names.embedding))
    ends = ends_layout(spec, head, embedding, size)
    rows = rows_layout(spec, _most_tokens(spec, adapter) if row_tokens is None else row_tokens, itemsize)
    return _layout(spec, lambda layer, module: ranks.get((layer, module), 0), size, _vectors(spec, adapter), ends, rows)


def full_layout(spec: ModelSpec, rank: int, itemsize: int) -> AdapterLayout:
    """Return the layout of an adapter that has the same rank on every linear."""
    return _layout(spec, lambda layer, module: rank, itemsize)


def with_everything(spec: ModelSpec, layout: AdapterLayout, rank: int, block_rows: int) -> AdapterLayout:
    """Return the layout of an adapter that also scales and shifts every output, with this rank outside the layers if it
    may change anything there. It has `block_rows` own rows in each block; the last is that of a token which the base
    lacks."""
    places = place_widths(spec)
    vectors = ((GAIN | SHIFT,) * len(places),) * layout.num_layers
    if not spec.adapts_ends:
        return replace(layout, places=places, vectors=vectors)
    tokens = np.arange(max(0, spec.vocab_size + 1 - block_rows * spec.num_slabs), spec.vocab_size + 1)
    ends, rows = ends_layout(spec, rank, rank, layout.itemsize), rows_layout(spec, (tokens, tokens), layout.itemsize)
    return replace(layout, places=places, vectors=vectors, ends=ends, rows=rows)


def _layout(
    spec: ModelSpec,
    rank_of: Callable[[int, str], int],
    itemsize: int,
    vectors: tuple[LayerVectors, ...] = (),
    ends: AdapterLayout | None = None,
    rows: AdapterLayout | None = None,
) -> AdapterLayout:
    """Return a layout from the ranks of (layer, module)."""

    def layer_ranks(layer: int) -> LayerRanks:
        own = spec.site_indices(layer)
        return tuple(
            tuple(rank_of(layer, module) if index in own else 0 for module in site.modules)
            for index, site in enumerate(spec.sites())
        )

    ranks = tuple(layer_ranks(layer) for layer in range(spec.num_layers))
    places = place_widths(spec) if vectors else ()
    return AdapterLayout(site_dims(spec), ranks, itemsize, spec.kv_slabs, places, vectors, ends, rows)


def ends_layout(spec: ModelSpec, head: int, embedding: int, itemsize: int) -> AdapterLayout | None:
    """Return the layout of the parts outside the layers, from the ranks there; None if there are none."""
    if not head and not embedding:
        return None
    hidden, width = spec.hidden_size, VocabBlocks.of(spec).width
    sites = SiteDims(hidden, (0,)), SiteDims(0, (width,)), SiteDims(width, (0,)), SiteDims(0, (hidden,))
    first, others = ((head,), (head,), (embedding,), (embedding,)), ((0,), (head,), (embedding,), (0,))
    return AdapterLayout(sites, (first, *(others,) * (spec.num_slabs - 1)), itemsize)


def _most_tokens(spec: ModelSpec, adapter: AdapterSpec) -> tuple[TokenIds, TokenIds]:
    """Return the tokens for which an adapter may have rows, in the head and in the embedding.

    If the adapter has a copy of the base's table, these are only the tokens that the base lacks.
    """
    found = []
    for module in (HEAD, spec.names.embedding):
        own = [r.token_ids for r in adapter.rows if r.module == module and not r.frozen]
        size = adapter.vocab_size or spec.vocab_size
        parts = [np.arange(size) if ids is None else np.array(ids, dtype=np.int64) for ids in own]
        parts.append(np.arange(spec.vocab_size, size))
        found.append(np.unique(np.concatenate(parts)))
    return found[0], found[1]


def rows_layout(spec: ModelSpec, tokens: tuple[TokenIds, TokenIds], itemsize: int) -> AdapterLayout | None:
    """Return the layout of own rows, of tokens of the head and of the embedding: blocks of about equal size.

    The number of blocks is a multiple of the number of slabs, or less than it.
    """
    if not any(map(len, tokens)):
        return None
    slabs = spec.num_slabs

    def blocks(count: int) -> int:
        return max(1, -(-count // (slabs * BLOCK_ROWS)))

    widths = tuple(max(LEAST_ROWS, -(-len(own) // (slabs * blocks(len(own))))) for own in tokens)

    def ranks(site: int, layer: int) -> tuple[int, ...]:
        count = max(0, min(widths[site], len(tokens[site]) - layer * widths[site]))
        return tuple(len(range(part, count, MAX_SLICES)) for part in range(MAX_SLICES))

    num_layers = slabs * blocks(spec.vocab_size + MAX_ADDED_TOKENS)
    layers = tuple((ranks(HEAD_ROWS, layer), ranks(EMBEDDING_ROWS, layer)) for layer in range(num_layers))
    dims = SiteDims(spec.hidden_size, (0,) * MAX_SLICES)
    turns = tuple(layer % slabs for layer in range(num_layers))
    return AdapterLayout((dims, dims), layers, itemsize, turns, row_tokens=RowTokens(tokens, widths))


def place_widths(spec: ModelSpec) -> tuple[int, ...]:
    """Return the widths of the outputs of a layer that adapters may scale and shift, in the order of `places`."""
    return tuple(spec.places().values())


def _vectors(spec: ModelSpec, adapter: AdapterSpec) -> tuple[LayerVectors, ...]:
    """Return which vectors the adapter has at each place of each layer; empty if it has none."""
    found = [[0] * len(spec.places()) for _ in range(spec.num_layers)]
    for m in (own for own in adapter.modules if own.layer < spec.num_layers):
        place, site = site_place(spec, m.layer, m.module)
        scaled = GAIN | (SHIFT if spec.has_bias(site.name) else 0)
        found[m.layer][place] |= (scaled if m.magnitude else 0) | (SHIFT if m.b_bias else 0)
    for saved in adapter.saved:
        if norm := norm_place(spec, saved.layer, saved.module):
            found[saved.layer][list(spec.places()).index(norm)] |= GAIN
        else:
            found[saved.layer][site_place(spec, saved.layer, saved.module)[0]] |= SHIFT
    return tuple(map(tuple, found)) if any(map(any, found)) else ()


def site_place(spec: ModelSpec, layer: int, module: str) -> tuple[int, SiteShape]:
    """Return the index of a linear's output in `ModelSpec.places`, and its site."""
    sites = zip(spec.site_indices(layer), spec.sites_of(layer), strict=True)
    return next((index, site) for index, site in sites if module in site.modules)


def norm_place(spec: ModelSpec, layer: int, module: str) -> str:
    """Return the name of a norm's output in `ModelSpec.places`; "" for a linear."""
    if module == spec.names.final_norm:
        return "final_norm"
    name = next((name for name, (path, _) in spec.norms(layer).items() if path == module), "")
    if name in ("q_norm", "k_norm"):
        return "qk_norm" if spec.has_own_kv(layer) else "q_norm"
    return name
