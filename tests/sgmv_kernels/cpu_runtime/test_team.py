"""Teams: kernels give the same bits with any number of threads, whoever else computes, and however threads come."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from float_pages import float_pages

from sgmv_kernels.backend import Scoring
from sgmv_kernels.cpu_runtime import team
from sgmv_kernels.ops import Ops


@pytest.fixture
def threads():
    """Sets torch's threads; puts them back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_size_follows_torch(threads) -> None:
    for count in (3, 1):
        threads(count)
        assert team.team_size() == count


def test_same_bits_with_any_number_of_threads(threads) -> None:
    ops = Ops(torch.device("cpu"))
    x, weight = torch.randn(101, 576), torch.randn(576)
    results = []
    for n in (1, 2, 5):
        threads(n)
        results.append(ops.add_rms_norm_(x, None, weight, 1e-5))
    assert all(torch.equal(results[0], r) for r in results[1:])


def test_two_threads_of_the_process_may_run_kernels_at_once() -> None:
    ops = Ops(torch.device("cpu"))
    inputs = [torch.randn(64, 512) for _ in range(4)]
    expected = [ops.silu_mul(x) for x in inputs]

    def is_right(i: int) -> bool:
        return all(torch.equal(ops.silu_mul(inputs[i]), expected[i]) for _ in range(50))

    with ThreadPoolExecutor(4) as workers:
        assert all(workers.map(is_right, range(4)))


def test_a_plan_keeps_its_threads(threads) -> None:
    """Scratch memory is made for the threads that there are when a step is planned."""
    ops = Ops(torch.device("cpu"))
    threads(1)
    plan = ops.plan_attention(np.arange(12, dtype=np.int32).reshape(12, 1), [1] * 12, [16] * 12, 16, 12)
    kv = float_pages(torch.randn(12 * 2 * 2 * 16 * 32).view(torch.uint8), torch.float32, 2, 16, 32)
    q = torch.randn(12, 4, 32)
    expected = ops.paged_attention(q, kv, plan, Scoring(0.2))
    threads(5)
    assert torch.equal(ops.paged_attention(q, kv, plan, Scoring(0.2)), expected)
