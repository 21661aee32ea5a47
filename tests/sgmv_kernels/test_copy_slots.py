"""Keys and values of single tokens copied inside the pool: every bit of it as in the reference."""

import random

import numpy as np
import pytest
import torch
from float_pages import float_format
from toy_kv import TOY

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import copy_slots_reference

LAYERS, PAGES, HEADS = 3, 7, 2
every_backend = pytest.mark.parametrize("ops", ["torch", "numba", "triton"], indirect=True)


def make_layers(ops: Ops, kv_format, page: int, dim: int) -> list[KvPages]:
    """One pool of random bytes, layer after layer, without NaN, whose bits torch does not promise."""
    slabs = torch.randint(0, 120, (LAYERS, PAGES * kv_format.page_bytes(HEADS, dim, page)), dtype=torch.uint8)
    return [KvPages(slab, kv_format, HEADS, page, dim) for slab in slabs.to(ops.device)]


def random_moves(rng: random.Random, page: int) -> np.ndarray:
    """Those of a few sequences, ascending, towards their fronts; some stay where they are."""
    order, moves = rng.sample(range(PAGES), PAGES), []
    for table in (order[:4], order[4:]):
        slots = len(table) * page
        count = rng.randrange(1, 9)
        sources = sorted(rng.sample(range(slots), count))
        first = rng.randrange(sources[0] + 1)
        moves += [(table[s // page], s % page, table[t // page], t % page) for t, s in enumerate(sources, first)]
    return np.array(moves, dtype=np.int32)


@pytest.mark.parametrize(("page", "dim"), [(16, 64), (4, 24), (16, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@every_backend
def test_every_bit(ops: Ops, dtype: torch.dtype, page: int, dim: int) -> None:
    for seed in range(3):
        layers = make_layers(ops, float_format(dtype), page, dim)
        want = [KvPages(kv.slab.cpu().clone(), kv.format, HEADS, page, dim) for kv in layers]
        moves = random_moves(random.Random(seed), page)
        ops.copy_slots(layers, moves)
        for got, kept in zip(layers, want, strict=True):
            copy_slots_reference(kept.keys, kept.values, moves.tolist())
            assert torch.equal(got.slab.cpu(), kept.slab)


@pytest.mark.parametrize("ops", ["torch"], indirect=True)
def test_any_format(ops: Ops) -> None:
    """Codes whose scales lie beside them."""
    layers = make_layers(ops, TOY, 16, 32)
    for kv in layers:
        every, slot = torch.arange(PAGES).repeat_interleave(16), torch.arange(16).repeat(PAGES)
        kv.write(every, slot, torch.randn(len(every), HEADS, 32), torch.randn(len(every), HEADS, 32))
    before = [kv.read(torch.arange(PAGES)) for kv in layers]
    moves = random_moves(random.Random(1), 16)
    ops.copy_slots(layers, moves)
    for kv, (keys, values) in zip(layers, before, strict=True):
        copy_slots_reference(keys, values, moves.tolist())
        got = kv.read(torch.arange(PAGES))
        torch.testing.assert_close(got, (keys, values), rtol=1e-6, atol=1e-6)


@every_backend
def test_nothing_to_move(ops: Ops) -> None:
    layers = make_layers(ops, float_format(torch.float32), 4, 8)
    before = [kv.slab.clone() for kv in layers]
    ops.copy_slots(layers, np.empty((0, 4), dtype=np.int32))
    assert all(torch.equal(kv.slab, slab) for kv, slab in zip(layers, before, strict=True))


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([(7, 0, 1, 0)], "outside the pool"),
        ([(1, 0, 1, 4)], "outside the pool"),
        ([(1, 0, -1, 0)], "outside the pool"),
        ([(1, 1, 1, 2), (1, 2, 1, 3)], "page 1, slot 2 is overwritten"),
        ([(1, 1, 1)], r"int32 \[N, 4\]"),
    ],
)
def test_bad_moves(ops: Ops, moves: list, message: str) -> None:
    layers = make_layers(ops, float_format(torch.float32), 4, 8)
    with pytest.raises(KernelArgumentError, match=message):
        ops.copy_slots(layers, np.array(moves, dtype=np.int32))


def test_layers_of_one_pool_only(ops: Ops) -> None:
    layers = make_layers(ops, float_format(torch.float32), 4, 8)
    with pytest.raises(KernelArgumentError, match="layers must be those of one pool"):
        ops.copy_slots([layers[0], layers[2], layers[1]], np.array([(1, 1, 1, 0)], dtype=np.int32))
