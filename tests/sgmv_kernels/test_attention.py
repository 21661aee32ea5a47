"""Paged attention by every backend against its fp32 reference, with NaN in every slot that no token owns; Triton
compiled on a CUDA device, else interpreted."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import BF16, CLOSE, CPU_HEADS, FLOAT, GPU_HEADS, HALF, make_case
from kernel_pools import pages_on

from sgmv_kernels.backend import Scoring
from sgmv_kernels.errors import CapacityExceeded, KernelArgumentError
from sgmv_kernels.metadata.plans import AttentionPlan, plan_of
from sgmv_kernels.ops import Ops


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


every_backend = pytest.mark.parametrize("ops", ["torch", "numba", "triton"], indirect=True)
exact_backends = pytest.mark.parametrize("ops", ["numba", "triton"], indirect=True)
"""Not torch: its matrix products differ in the last bits by shape."""
triton = pytest.mark.parametrize("ops", ["triton"], indirect=True)


MIXED = ([1, 20, 1, 5], [57, 41, 130, 50])


@pytest.mark.parametrize(
    ("ops", "heads", "window", "dtype"),
    [
        *itertools.product(("torch", "numba"), CPU_HEADS, (None, 7, 40), (FLOAT, BF16)),
        *(("triton", heads, 40, FLOAT) for heads in GPU_HEADS),
        *(long("triton", heads, None, FLOAT) for heads in GPU_HEADS),
    ],
    indirect=["ops"],
    ids=str,
)
def test_matches_reference(ops: Ops, heads: tuple[int, int, int], window: int | None, dtype: torch.dtype) -> None:
    lens = MIXED if ops.name == "triton" else ([1, 20, 1, 33, 5, 1], [1, 20, 57, 33, 50, 30])
    make_case(*lens, *heads, dtype).check(ops, heads[2] ** -0.5, window)


@pytest.mark.parametrize("active", [FLOAT, long(HALF), long(BF16)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@triton
def test_half_pages(ops: Ops, dtype: torch.dtype, active: torch.dtype) -> None:
    assert make_case(*MIXED, 4, 2, 64, dtype, active=active).check(ops).dtype == active


@pytest.mark.parametrize(
    ("ops", "page", "dim", "window"),
    [
        *itertools.product(("torch", "numba"), (4, 16, 32), (8, 24), (None,)),
        *itertools.product(("triton",), (4, 24, 128), (24,), (33,)),
    ],
    indirect=["ops"],
)
def test_small_pages_and_odd_dims(ops: Ops, page: int, dim: int, window: int | None) -> None:
    make_case([1, 3, 11, 1], [6, 3, 70, 130], 6, 2, dim, page=page).check(ops, 0.3, window)


@pytest.mark.parametrize("window", [None, 1, long(9), long(100)])
@triton
def test_parts_of_keys(ops: Ops, short_parts: None, window: int | None) -> None:
    make_case([1, 9, 40, 1], [300, 70, 40, 64], 4, 2, 64).check(ops, window=window)


@pytest.mark.parametrize(
    ("ops", "softcap", "window"),
    [*itertools.product(("torch", "numba"), (50.0, 0.5), (None, 9)), ("triton", 2.0, None), long("triton", 2.0, 9)],
    indirect=["ops"],
)
def test_softcap(ops: Ops, short_parts: None, softcap: float, window: int | None) -> None:
    case = make_case([1, 9, 40, 1], [300, 70, 40, 64], 4, 2, 64)
    case.q *= 5
    got = case.check(ops, 0.5, window, softcap)
    assert not torch.allclose(got, case.attend(ops, 0.5, window), atol=1e-3)


@pytest.mark.parametrize("window", [None, 9])
@every_backend
def test_slopes(ops: Ops, short_parts: None, window: int | None) -> None:
    """A row's bias counts tokens back from its own: chunks, single rows and rows alone have the same bits."""
    case = make_case([1, 9, 40, 1], [300, 70, 40, 64], 4, 2, 64)
    case.slopes = torch.tensor([1.0, 0.25, 0.0, 0.0625])
    got = case.check(ops, 0.5, window)
    heads = (got - replace(case, slopes=None).attend(ops, 0.5, window)).abs().amax(dim=(0, 2))
    assert (heads > 0.1).tolist() == [True, True, False, True]
    if ops.name == "numba":
        case.q, case.query_lens, case.kv_lens = case.q[5:6].contiguous(), [1], [66]
        case.tables = case.tables[1:2]
        assert torch.equal(case.attend(ops, 0.5, window), got[5:6])


@every_backend
def test_softcap_keeps_nan_and_bits(ops: Ops) -> None:
    case = make_case([5], [45], 4, 2, 64)
    case.q[0, 1] = float("nan")
    got = case.attend(ops, softcap=30.0)
    assert got[0, 1].isnan().all()
    assert got[1:].isfinite().all()
    if ops.name != "torch":
        case.q, case.query_lens, case.kv_lens = case.q[2:3].contiguous(), [1], [43]
        assert torch.equal(case.attend(ops, softcap=30.0), got[2:3])


@triton
def test_cutting_changes_little(ops: Ops, request: pytest.FixtureRequest) -> None:
    case = make_case([1, 3], [700, 301], 4, 2, 64)
    whole = case.check(ops)
    request.getfixturevalue("short_parts")
    assert not torch.equal(whole, case.check(ops))


@every_backend
def test_large_logits_are_safe(ops: Ops, short_parts: None) -> None:
    case = make_case([1, 4, 30], [200, 4, 31], 4, 2, 64)
    case.q *= 1e4
    assert case.check(ops, 1.0).isfinite().all()


@pytest.mark.parametrize(
    ("ops", "dim", "dtype"), [("torch", 64, BF16), ("numba", 64, BF16), long("triton", 16, HALF)], indirect=["ops"]
)
def test_long_context(ops: Ops, dim: int, dtype: torch.dtype) -> None:
    make_case([1, 3], [8192, 8001], 3, 1, dim, dtype).check(ops, rtol=1e-3, atol=1e-4)


@exact_backends
def test_a_row_has_the_same_bits_whatever_sequences_are_beside_it(ops: Ops, short_parts: None) -> None:
    case = make_case([1, 7, 1, 25], [57, 33, 200, 90], 9, 3, 64, BF16)
    together = case.attend(ops).split(case.query_lens)
    for i in range(4):
        assert torch.equal(case.attend(ops, order=[i]), together[i])
    mixed = case.attend(ops, order=[3, 1, 0, 2]).split([25, 7, 1, 1])
    assert all(torch.equal(mixed[k], together[i]) for k, i in enumerate((3, 1, 0, 2)))


@pytest.mark.parametrize("ops", ["numba"], indirect=True)
def test_a_row_has_the_same_bits_in_any_chunk(ops: Ops) -> None:
    case = make_case([150], [150], 6, 2, 64, BF16)
    whole, q = case.attend(ops), case.q
    for begin, end in ((0, 1), (0, 37), (37, 38), (37, 149), (120, 130), (149, 150)):
        case.q, case.query_lens, case.kv_lens = q[begin:end].contiguous(), [end - begin], [end]
        assert torch.equal(case.attend(ops), whole[begin:end]), (begin, end)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, under the interpreter
@every_backend
def test_nan_stays_nan(ops: Ops) -> None:
    """A request whose adapter overflows must fail, not answer something."""
    case = make_case([1, 9], [40, 30], 4, 2, 64)
    case.q[0, 1] = float("nan")
    case.q[3] = float("inf")
    got = case.attend(ops)
    assert got[0, 1].isnan().all()
    assert got[3].isnan().any()
    assert got[[1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("window", [5, 8, 20])
@every_backend
def test_keys_and_values_before_the_window_are_not_seen(ops: Ops, window: int) -> None:
    case = make_case([1], [40], 4, 2, 64)
    want = case.reference(0.125, window)
    for t in range(40 - window):
        page = case.tables[0, t // 16]
        case.kv.keys[page, :, :, t % 16] = float("nan")
        case.kv.values[page, :, t % 16] = float("nan")
    torch.testing.assert_close(case.attend(ops, window=window), want, **CLOSE[FLOAT])


@pytest.mark.long
@triton
def test_a_capacity_takes_other_sequences(ops: Ops, short_parts: None) -> None:
    """The buffer that a graph was captured with: the same memory and grid, the bits of exact tables."""
    from sgmv_kernels.triton_ops import attention
    from sgmv_kernels.triton_ops.attention_metadata import AttentionCapacity, AttentionTables

    case, device = make_case([1, 1, 1, 3], [57, 200, 16, 130], 4, 2, 32), ops.device
    held, kv = None, pages_on(case.kv, device)
    for order in ([1, 0, 3], [2], [3, 1], [0, 1, 2]):
        lens = ([case.query_lens[i] for i in order], [case.kv_lens[i] for i in order])
        plan = plan_of(case.tables[order], *lens, case.kv.page_size, case.kv.num_pages, device)
        held = held or AttentionTables(plan, device, AttentionCapacity(4, 20, 12, 0, 8, 12))
        held.update(plan)
        got = attention.attention(case.q_of(order, device), kv, replace(plan, prepared=held), Scoring(0.125))
        assert torch.equal(got.cpu(), case.attend(ops, order=order))
    with pytest.raises(CapacityExceeded, match="sequences"):
        held.update(plan_of(np.zeros((5, 1), dtype=np.int32), [1] * 5, [1] * 5, 16, 1, device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lens": [1, 3]}, "sum to the rows"),
        ({"kv_lens": [30, 3]}, "at most kv_lens"),
        ({"kv_lens": [33, 4]}, "too short"),
        ({"kv_lens": [30]}, "one entry a sequence"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"slopes": torch.ones(3)}, "slopes must be contiguous float32"),
        ({"page": 999}, "outside the pool"),
    ],
)
def test_bad_arguments(ops: Ops, change: dict, message: str) -> None:
    case = make_case([1, 4], [30, 4], 4, 2, 64)
    case.tables[0, 1] = change.get("page", case.tables[0, 1])
    case.slopes = change.get("slopes")
    with pytest.raises(KernelArgumentError, match=message):
        case.attend(ops, **{name: value for name, value in change.items() if name not in ("page", "slopes")})


# At full size, in tensor cores: only a CUDA device can show that.

BIG = ([1, 200, 1, 17, 512], [57, 200, 4000, 900, 1024])


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@on_gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 2, 80), (8, 1, 256)])
@triton
def test_matches_reference_at_full_size(ops: Ops, heads, dtype: torch.dtype, window: int | None) -> None:
    make_case(*BIG, *heads, dtype, active=dtype).check(ops, heads[2] ** -0.5, window)


@on_gpu
@triton
def test_a_graph_replays_with_other_sequences(ops: Ops) -> None:
    from sgmv_kernels.triton_ops import attention
    from sgmv_kernels.triton_ops.attention_metadata import AttentionCapacity, AttentionTables

    case = make_case([1] * 8, [57, 200, 4000, 900, 1024, 1, 16, 17], 32, 8, 128, BF16, active=BF16)
    orders = ([0, 1, 2, 3], [4, 5, 6, 7], [2, 2, 2, 2])

    def plan_for(order: list[int]) -> AttentionPlan:
        lens = [case.kv_lens[i] for i in order]
        return plan_of(case.tables[order], [1] * 4, lens, 16, case.kv.num_pages, ops.device)

    kv, q = pages_on(case.kv, ops.device), case.q_of(orders[0], ops.device)
    held = AttentionTables(plan_for(orders[0]), ops.device, AttentionCapacity(4, 256, 256, 0, 4, 256))
    planned = replace(plan_for(orders[0]), prepared=held)
    attention.attention(q, kv, planned, Scoring(0.1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attention(q, kv, planned, Scoring(0.1))
    for order in orders:
        held.update(plan_for(order))
        graph.replay()
        lens = [case.kv_lens[i] for i in order]
        eager = ops.plan_attention(case.tables[order], [1] * 4, lens, 16, case.kv.num_pages)
        assert torch.equal(out, ops.paged_attention(q, kv, eager, Scoring(0.1)))
