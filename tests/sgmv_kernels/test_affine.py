"""Gains and shifts of adapters by every backend against the reference; Triton compiled on a CUDA device, else
interpreted."""

import itertools

import numpy as np
import pytest
import torch

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.adapter_panels import GAIN, SHIFT, AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.metadata.segments import BASE, build_segments
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import affine_reference

SITES, PLACES, PAGE = (SiteDims(64, (48, 24)),), (72, 40, 1300), 1024
PLAIN = AdapterLayout(SITES, (((4, 2),), ((4, 2),)), 4)
# Of each layer and place.
KINDS = (
    ((GAIN, GAIN | SHIFT, 0), (0, SHIFT, GAIN | SHIFT)),
    ((0, 0, SHIFT), (GAIN, 0, GAIN)),
)
RANKS = ((((4, 2),), ((0, 0),)), (((0, 0),), ((0, 3),)))


class VectorPool:
    """A pool of two layers with one adapter without vectors and two with some."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        layouts = [
            PLAIN,
            *(AdapterLayout(SITES, r, 4, places=PLACES, vectors=k) for r, k in zip(RANKS, KINDS, strict=True)),
        ]
        self.slabs = torch.full((2, 64 * PAGE), 0xFF, dtype=torch.uint8)
        self.placed: list[PlacedAdapter] = []
        for i, layout in enumerate(layouts):
            placed = layout.place([(20 * i, 8), (20 * i + 9, 8)], PAGE)
            assert placed is not None
            self.placed.append(placed)
        self.vectors = [[[self._write(p, layer, at) for at in range(3)] for layer in range(2)] for p in self.placed]

    def _write(self, placed: PlacedAdapter, layer: int, place: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not placed.layout.vectors:
            return None, None
        made = []
        for panel in placed.layout.vector_panels[layer, place].tolist():
            made.append(None if panel < 0 else torch.randn(PLACES[place]))
            if made[-1] is not None:
                at = int(placed.offsets[layer][panel])
                self.slabs[layer, at : at + made[-1].nbytes] = made[-1].view(torch.uint8)
        return made[0], made[1]

    def check(self, ops: Ops, rows: list[int], layer: int, place: int, dtype: torch.dtype = torch.float32) -> None:
        segments = build_segments(rows)
        y = torch.randn(len(rows), PLACES[place]).to(dtype)
        expected = affine_reference(y, segments, [own[layer][place] for own in self.vectors])
        got = y.to(ops.device, copy=True)
        plan = ops.plan_sgmv(segments, self.placed, torch.float32)
        ops.affine_(got, self.slabs[layer].to(ops.device), plan, layer, place)
        torch.testing.assert_close(
            got.cpu(), expected.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6
        )
        without = [i for i, row in enumerate(rows) if row == BASE or self.vectors[row][layer][place] == (None, None)]
        assert torch.equal(got.cpu()[without], y[without])


@pytest.mark.parametrize("ops", ["torch", "numba", "triton"], indirect=True)
@pytest.mark.parametrize(("layer", "place"), [*itertools.product(range(2), range(3))])
def test_rows_get_their_own(ops: Ops, layer: int, place: int) -> None:
    pool = VectorPool()
    for rows in ([1], [2, 1, BASE, 0, 1, 2, 2], [1] * 9, [BASE, 2]):
        pool.check(ops, rows, layer, place)


@pytest.mark.parametrize("ops", ["torch", "numba", "triton"], indirect=True)
def test_shifts_of_sums_have_weights(ops: Ops) -> None:
    """A second pass in which one adapter has vectors, after a first in which none has."""
    pool, weights = VectorPool(), [0.5, 1.0, -1.5]
    first, second = build_segments([0, BASE, 0]), build_segments([2, BASE, BASE])
    plan = ops.plan_sgmv(first, pool.placed, torch.float32, weights, [second])
    y = torch.randn(3, PLACES[2])
    got = y.to(ops.device, copy=True)
    ops.affine_(got, pool.slabs[0].to(ops.device), plan, 0, 2)
    gain, shift = pool.vectors[2][0][2]
    assert gain is None
    assert shift is not None
    torch.testing.assert_close(got.cpu()[0], y[0] - 1.5 * shift, rtol=1e-6, atol=1e-6)
    assert torch.equal(got.cpu()[1:], y[1:])


@pytest.mark.parametrize("ops", ["torch", "triton"], indirect=True)
def test_narrow_activations(ops: Ops) -> None:
    VectorPool().check(ops, [1, BASE, 2, 0], 0, 1, torch.bfloat16)


def test_deltas_beside_vectors_are_found() -> None:
    """Panels of a layer are indexed as without vectors, which lie behind them."""
    pool = VectorPool()
    for own in pool.placed:
        for layer, ranks in enumerate(own.layout.ranks):
            plain = AdapterLayout(SITES, (ranks,), 4)
            assert own.layout.panels[layer] == plain.panels[0]
            assert (own.layout.packed_offsets[layer][: len(plain.packed_offsets[0])] == plain.packed_offsets[0]).all()


def test_steps_without_vectors_have_no_table() -> None:
    pool, ops = VectorPool(), Ops(torch.device("cpu"), "torch")
    plan = ops.plan_sgmv(build_segments([0, BASE]), pool.placed[:1], torch.float32)
    assert not plan.tables.has_vectors
    assert plan.tables.vectors.size == 0
    y = torch.randn(2, 7)
    ops.affine_(y, pool.slabs[0], plan, 5, 9)


def test_moved_adapters() -> None:
    pool, ops = VectorPool(), Ops(torch.device("cpu"), "torch")
    moved = pool.placed[1].moved({(20, 8): (50, 8)})
    pool.slabs[:, 50 * PAGE : 58 * PAGE] = pool.slabs[:, 20 * PAGE : 28 * PAGE]
    pool.slabs[:, 20 * PAGE : 28 * PAGE] = 0xFF
    pool.placed[1] = moved
    assert (moved.vectors >= -1).all()
    pool.check(ops, [1, 2, 1], 0, 1)


def test_wrong_arguments() -> None:
    pool, ops = VectorPool(), Ops(torch.device("cpu"), "torch")
    plan = ops.plan_sgmv(build_segments([1, 2]), pool.placed, torch.float32)
    y = torch.zeros(2, 72)
    for wrong in (
        lambda: ops.affine_(y, pool.slabs[0], plan, 0, 3),
        lambda: ops.affine_(y, pool.slabs[0], plan, 2, 0),
        lambda: ops.affine_(y, pool.slabs[0], plan, 0, 1),
        lambda: ops.affine_(y[:1], pool.slabs[0], plan, 0, 0),
        lambda: ops.affine_(y, pool.slabs[0][:100], plan, 0, 0),
    ):
        with pytest.raises(KernelArgumentError):
            wrong()
    other = AdapterLayout(SITES, RANKS[0], 4, places=(72, 40, 1301), vectors=KINDS[0]).place([(0, 30)], PAGE)
    with pytest.raises(KernelArgumentError, match="same places"):
        ops.plan_sgmv(build_segments([0, 1]), [pool.placed[1], other], torch.float32)
    assert np.array_equal(y.numpy(), np.zeros((2, 72)))
