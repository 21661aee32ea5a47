"""Attention over draft trees: each row against the plain reference on its own path, written out as a sequence."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import BF16, CLOSE, CPU_HEADS, FLOAT, GPU_HEADS, Case, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgmv_kernels.backend import Scoring
from sgmv_kernels.errors import CapacityExceeded, KernelArgumentError
from sgmv_kernels.metadata.draft_trees import MAX_SLOTS, ancestor_words, build_trees, depths_of
from sgmv_kernels.metadata.plans import plan_of
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import paged_attention_reference

CHAIN = range(-1, MAX_SLOTS - 1)
exact_backends = pytest.mark.parametrize("ops", ["numba", "triton"], indirect=True)
every_backend = pytest.mark.parametrize("ops", ["torch", "numba", "triton"], indirect=True)


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


def random_tree(size: int, seed: int) -> list[int]:
    """Wide ones and deep ones."""
    rng = random.Random(seed)
    near = rng.choice((1, 3, 64))
    return [max(-1, i - 1 - rng.randrange(near)) for i in range(size)]


def grow(case: Case, seed: int, *sizes: int) -> Case:
    """Trees of these sizes in the last slots of the sequences."""
    case.parents = [random_tree(size, seed + i) for i, size in enumerate(sizes)]
    return case


def on_paths(case: Case, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    """The reference, of each row alone behind the keys of its path and no others."""
    out, row, scoring = [], 0, Scoring(scale, window, softcap, case.slopes)
    for table, n, length, parents in zip(case.tables, case.query_lens, case.kv_lens, case.parents, strict=True):
        used = table[: -(-length // case.kv.page_size)].tolist()
        keys, values = case.kv.keys[used].permute(1, 2, 0, 3).flatten(2), case.kv.values[used].transpose(0, 1)
        values = values.flatten(1, 2)
        start = length - len(parents)
        for slot in range(length - n, length):
            path, node = [], slot - start
            while node >= 0:
                path.append(start + node)
                node = parents[node]
            path = [*range(min(start, slot + 1)), *reversed(path)]
            alone = (keys[None, :, :, path], values[None, :, path], [[0]], [1], [len(path)])
            out.append(paged_attention_reference(case.q[row : row + 1], *alone, scoring))
            row += 1
    return torch.cat(out)


def check(
    case: Case, ops: Ops, window: int | None = None, softcap: float | None = None, **close: float
) -> torch.Tensor:
    """The kernels and the reference over the tree, against the paths."""
    got, want = case.attend(ops, 0.3, window, softcap), on_paths(case, 0.3, window, softcap)
    torch.testing.assert_close(got.float(), want, check_dtype=False, **(CLOSE[case.q.dtype] | close))
    torch.testing.assert_close(case.reference(0.3, window, softcap), want, **(CLOSE[FLOAT] | close))
    return got


@pytest.mark.parametrize("ops", ["torch", "numba"], indirect=True)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree(ops: Ops, data: st.DataObject) -> None:
    """Several sequences, some without a tree, known tokens before the drafts, rows that are only the last of a tree."""
    draw, parents, query_lens, kv_lens = data.draw, [], [], []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([0, 1, 5, 20, MAX_SLOTS]))
        parents.append([draw(st.integers(-1, i - 1)) for i in range(size)])
        kv_lens.append(draw(st.integers(1, 200)) + size)
        query_lens.append(draw(st.integers(1, min(kv_lens[-1], size + 6))))
    heads, kv_heads = draw(st.sampled_from([(3, 1), (2, 2)]))
    case = make_case(query_lens, kv_lens, heads, kv_heads, 32, page=draw(st.sampled_from([4, 16])))
    case.parents = parents
    check(case, ops, draw(st.sampled_from([None, 1, 3, 30, 100])), draw(st.sampled_from([None, 2.0])))


@pytest.mark.parametrize(
    ("ops", "heads", "window", "dtype"),
    [
        *itertools.product(("torch", "numba"), CPU_HEADS, (None, 7, 40), (FLOAT, BF16)),
        ("triton", GPU_HEADS[1], 7, FLOAT),
        *(
            long("triton", heads, window, FLOAT)
            for heads, window in zip(GPU_HEADS, (7, 1, 40, 1, 7, None), strict=True)
        ),
    ],
    indirect=["ops"],
    ids=str,
)
def test_every_shape_of_heads(ops: Ops, heads: tuple[int, int, int], window: int | None, dtype: torch.dtype) -> None:
    """Trees that begin in the middle and at the border of a page, one over two blocks of keys."""
    check(grow(make_case([1, 13, 40, 18], [57, 61, 150, 34], *heads, dtype), 5, 0, 12, 40, 18), ops, window)


@pytest.mark.parametrize(
    ("ops", "page", "softcap"),
    [*itertools.product(("torch", "numba"), (4, 16, 32), (None, 2.0)), ("triton", 4, 2.0)],
    indirect=["ops"],
)
def test_pages_and_softcap(ops: Ops, short_parts: None, page: int, softcap: float | None) -> None:
    if ops.name == "triton":
        check(grow(make_case([9, 17], [17, 90], 4, 2, 64, page=page), 9, 8, 17), ops, 33, softcap)
        return
    check(grow(make_case([17, 65, 9], [17, 300, 72], 4, 2, 64, page=page), 9, 16, 64, 9), ops, 33, softcap)


@pytest.mark.parametrize(
    ("ops", "window"),
    [*itertools.product(("torch", "numba", "triton"), (None, 33))],
    indirect=["ops"],
)
def test_slopes_count_depths(ops: Ops, short_parts: None, window: int | None) -> None:
    case = grow(make_case([17, 65, 9, 1], [17, 300, 72, 40], 4, 2, 64), 9, 16, 64, 9, 0)
    case.slopes = torch.tensor([0.5, 0.25, 2.0, 0.0])
    check(case, ops, window)


@pytest.mark.parametrize(
    ("ops", "window"),
    [
        *itertools.product(("numba",), (None, 5, 40)),
        ("triton", 40),
        *(pytest.param("triton", window, marks=pytest.mark.exhaustive) for window in (None, 5)),
    ],
    indirect=["ops"],
)
def test_a_chain_has_the_bits_of_a_chain(ops: Ops, short_parts: None, window: int | None) -> None:
    """Main branches too, beside others; and sequences without a tree those of a step without one. A GPU cuts the keys
    of many rows into parts only where they are a tree."""
    case = make_case([66 if ops.name == "numba" else 32, 1, 20, 12], [130, 57, 20, 70], 4, 2, 32, BF16)
    plain = case.attend(ops, window=window).split(case.query_lens)
    case.parents = [CHAIN, (), (), [*CHAIN[:8], -1, 8, 0]]
    got = case.attend(ops, window=window).split(case.query_lens)
    assert all(torch.equal(got[i], plain[i]) for i in range(3))
    assert torch.equal(got[3][:9], plain[3][:9])
    assert not torch.equal(got[3][9:], plain[3][9:])


@exact_backends
def test_a_row_has_the_same_bits_whatever_is_beside_it(ops: Ops, short_parts: None) -> None:
    """Other sequences, and the rows of its own tree."""
    case = grow(make_case([20, 7, 9], [140, 33, 9], 9, 3, 64, BF16), 1, 19, 7, 0)
    together = case.attend(ops).split(case.query_lens)
    for i in range(3):
        assert torch.equal(case.attend(ops, order=[i]), together[i])
    if ops.name == "numba":
        case.q, case.query_lens = case.q[15:20].contiguous(), [5]
        assert torch.equal(case.attend(ops, order=[0]), together[0][15:])


@every_backend
def test_other_branches_are_not_read(ops: Ops) -> None:
    """Whatever stands in them."""
    case = make_case([6], [40], 4, 2, 32)
    case.parents = [[-1, 0, -1, 2, 1, 3]]
    before = case.attend(ops)
    pages, slots = case.tables[0, [36 // 16, 37 // 16, 39 // 16]], torch.tensor([36, 37, 39]) % 16
    case.kv.keys[pages, :, :, slots] *= -3
    case.kv.values[pages, :, slots] += 5
    after = case.attend(ops)
    assert torch.equal(after[[0, 1, 4]], before[[0, 1, 4]])
    assert not torch.isclose(after[[2, 3, 5]], before[[2, 3, 5]]).all(-1).any()


@every_backend
def test_scores_far_below_zero(ops: Ops) -> None:
    """Where a row sees nothing of a block of keys, nothing of it stays: the first 8 slots are in the block before."""
    case = make_case([41], [161], 4, 2, 32)
    case.q, case.parents = -30 * case.q.abs(), [CHAIN[:41]]
    case.kv.keys.abs_()
    check(case, ops, window=5, atol=1e-2)


def test_words_and_positions() -> None:
    parents = [-1, 0, 0, -1, 2]
    assert ancestor_words(parents) == [0b00001, 0b00011, 0b00101, 0b01000, 0b10101]
    assert depths_of(parents) == [1, 2, 2, 1, 3]
    trees = build_trees([parents, (), CHAIN], *np.array([[7, 1, 2], [12, 5, 100]], dtype=np.int32))
    assert trees.starts.tolist() == [7, 5, 36]
    assert trees.positions.tolist() == [5, 6, 7, 8, 8, 7, 9, 4, 98, 99]
    assert trees.words.tolist() == [0, 0, 1, 3, 5, 8, 21, 0, (1 << 63) - 1, -1]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([(), range(-1, 64)], "a tree of 65 slots"),
        ([(), range(-1, 4)], "a tree of 5 slots"),
        ([(-1, 1), ()], "indices of earlier draft tokens"),
        ([(-2,), ()], "indices of earlier draft tokens"),
        ([(-1,)], "one entry a sequence"),
    ],
)
def test_bad_trees(ops: Ops, parents: list, message: str) -> None:
    case = make_case([1, 4], [90, 4], 4, 2, 32)
    with pytest.raises(KernelArgumentError, match=message):
        ops.plan_attention(case.tables, case.query_lens, case.kv_lens, 16, case.kv.num_pages, parents)


@pytest.mark.parametrize("ops", ["triton"], indirect=True)
def test_graphs_have_no_trees(ops: Ops) -> None:
    from sgmv_kernels.triton_ops.attention_metadata import AttentionCapacity, AttentionTables, Shape

    lens = np.array([3], dtype=np.int32)
    plan = plan_of(np.zeros((1, 1), dtype=np.int32), lens, lens, 16, 1, ops.device)
    held = AttentionTables(plan, ops.device, AttentionCapacity(1, 1, 8, 8, 8, 8))
    held.buffer(Shape(4, 4, 64, 64), 1)
    with pytest.raises(CapacityExceeded, match="draft trees"):
        held.update(replace(plan, trees=build_trees([(-1, -1)], lens, lens)))
