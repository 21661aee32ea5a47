"""The memory plan: what is refused or warned of before a base is loaded."""

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from partitions import ranks, replica
from tiny_engine import BLOCK, GREEDY, LONG

from lorasrv.config import EngineConfig, MemoryOptions, PartitionOptions, SchedulerOptions, SpeculationOptions, size
from lorasrv.engine import memory_plan
from lorasrv.engine.memory_plan import LIBRARY_BYTES, MIN_POOL_PAGES, MemoryPlan, pool_size
from lorasrv.errors import ConfigError, NotEnoughMemory
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.sampling.sampler import DRAW_BYTES
from lorasrv.speculation.speculator import MAX_MODEL_DRAFT
from lorasrv.worker.device import DeviceMemory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "on_gpu", "pool"),
    [
        ({}, False, 4 * GIB),
        ({}, True, int(0.85 * 16 * GIB)),
        ({"pool_bytes": 70}, True, 70),
        # 8 GiB of 24 are in use already, by others and the base.
        ({"gpu_memory_utilization": 0.75}, False, 10 * GIB),
        ({"gpu_memory_utilization": 0.75}, True, 10 * GIB),
        ({"gpu_memory_utilization": 0.25}, True, 0),
    ],
)
def test_the_size_of_the_pool(options: dict[str, Any], on_gpu: bool, pool: int) -> None:
    assert pool_size(MemoryOptions(**options), DeviceMemory(16 * GIB, 24 * GIB, on_gpu)) == pool


def test_the_pool_leaves_what_a_step_takes() -> None:
    """On a small GPU that is more than the share which others leave."""
    for options, pool in (({}, 3), ({"gpu_memory_utilization": 1.0}, 3), ({"gpu_memory_utilization": 0.5}, 0)):
        assert pool_size(MemoryOptions(**options), DeviceMemory(4 * GIB, 8 * GIB, on_gpu=True), GIB) == pool * GIB


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """plan(on_gpu=, max_num_batched_tokens=, memory options) -> the built-in base beside 16 GiB of free memory."""
    monkeypatch.setattr(memory_plan, "free_bytes", lambda: 16 * GIB)

    def make(
        on_gpu: bool = False, max_num_batched_tokens: int = 512, corpus_bytes: int = 64 << 20, **memory: Any
    ) -> MemoryPlan:
        monkeypatch.setattr(DeviceMemory, "of", lambda *_: DeviceMemory(16 * GIB, 24 * GIB, on_gpu))
        scheduler = SchedulerOptions(max_num_batched_tokens=max_num_batched_tokens)
        speculation = SpeculationOptions(corpus_bytes=corpus_bytes)
        config = EngineConfig(memory=MemoryOptions(**memory), scheduler=scheduler, speculation=speculation)
        return MemoryPlan.of(config, read_model_shape("smollm2-135m").spec, "int4", torch.device("cpu"))

    return make


def test_its_parts(plan: Any) -> None:
    """Against what a server took when measured: 35.3 KiB for each further token of a step, 92.1 MiB of weights."""
    one, more = plan(max_num_batched_tokens=512), plan(max_num_batched_tokens=1512)
    assert (more.step - one.step) / 1000 == pytest.approx(35.3 * 1024, rel=0.05)
    assert one.base == pytest.approx(92.1 * (1 << 20), rel=0.1)
    assert one.block == 360 << 10
    # Random numbers and sorted probabilities of 64 rows.
    assert plan(on_gpu=True).step - one.step == one.heads + 64 * 49_152 * DRAW_BYTES


def test_a_pool_leaves_room_for_graphs_and_workspaces(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the size is not given; without Triton there are no graphs."""
    whole = plan(on_gpu=True, gpu_memory_utilization=1.0)
    assert whole.pool == 16 * GIB - whole.base - whole.step - whole.beside
    monkeypatch.setattr(memory_plan, "find_spec", lambda name: None)
    assert LIBRARY_BYTES < plan(on_gpu=True).beside < whole.beside - GIB // 4
    assert plan().beside == 0


def test_what_drafters_draw_from_is_counted(plan: Any) -> None:
    """With rejection sampling: a table of the vocabulary for each draft token, of each drafter."""
    spec = read_model_shape("smollm2-135m").spec
    steps = {}
    for accept in ("same-draw", "rejection"):
        for layers in (None, 4):
            speculation = SpeculationOptions(accept=accept, draft_layers=layers, draft_head_bytes=0)
            config = EngineConfig(speculation=speculation)
            steps[accept, layers] = MemoryPlan.of(config, spec, "int4", torch.device("cpu")).step
    table = spec.vocab_size * 8 * config.scheduler.max_num_seqs * MAX_MODEL_DRAFT
    assert steps["rejection", None] == steps["same-draw", None]
    assert steps["rejection", 4] == steps["same-draw", 4] + table


@pytest.mark.parametrize(
    ("options", "blocks", "tables"),
    [
        ({}, 1, 1),
        # Two of three key heads in both ranks; the embedding is in both, the head once.
        ({"tp": 2}, 4 / 3, 3),
        ({"pp": 2}, 1, 2),
        ({"cp": 4}, 4, 4),
    ],
)
def test_all_ranks_are_counted(options: dict[str, int], blocks: float, tables: int) -> None:
    """Pages and weights; those of rows are copies."""
    spec, config = read_model_shape("smollm2-135m").spec, EngineConfig(partition=PartitionOptions(**options))
    plan = MemoryPlan.of(config, spec, "none", torch.device("cpu"))
    assert plan.block == blocks * (360 << 10)
    assert plan.base == 2 * (spec.linear_weights * options.get("cp", 1) + spec.table_weights * tables)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_rank_with_the_most_layers_has_no_larger_share_of_its_gpu(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on a CPU share its memory."""
    free = 32 * GIB
    own = free // 2 if on_gpu else free
    monkeypatch.setattr(DeviceMemory, "of", lambda *_: DeviceMemory(own, own, on_gpu))
    spec, device, options = read_model_shape("smollm2-135m").spec, torch.device("cpu"), MemoryOptions()
    config = EngineConfig(partition=PartitionOptions(partition="0@0-9;1@10-29"))
    planned = MemoryPlan.of(config, spec, "none", device)
    plan = planned.measured(options, 0, device, [DeviceMemory(own, own, on_gpu)])
    assert plan.pool == pytest.approx(0.85 * (free / 2) * 30 / 20 if on_gpu else free / 4)
    fuller = planned.measured(options, 0, device, [DeviceMemory(own // 2, own, on_gpu)])
    assert fuller.pool == pytest.approx(plan.pool / 2 if on_gpu else plan.pool), (
        "as many pages as the fullest has room for"
    )
    larger = MemoryPlan.of(replace(config, memory=MemoryOptions(pool_bytes=int(0.8 * free))), spec, "none", device)
    assert ("as if every rank had the most layers" in larger.too_large()) is on_gpu


def test_the_rank_that_draws_has_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "of", lambda *_: DeviceMemory(16 * GIB, 16 * GIB, on_gpu=True))
    spec, speculation = read_model_shape("smollm2-135m").spec, SpeculationOptions(draft_head_bytes=0)
    alone, divided = (EngineConfig(partition=PartitionOptions(cp=n), speculation=speculation) for n in (1, 2))
    steps = [MemoryPlan.of(config, spec, "none", torch.device("cpu")).step for config in (alone, divided)]
    assert steps[1] == 2 * steps[0], "each rank of rows has the whole model"


def test_a_process_asks_about_no_gpu_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer about another one would take half a gigabyte there, in the process of rank 0."""
    asked: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 32 * GIB, 32 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config, device = EngineConfig(partition=PartitionOptions(cp=4)), torch.device("cuda")
    plan = MemoryPlan.of(config, read_model_shape("smollm2-135m").spec, "none", device)
    assert plan.free == 4 * 32 * GIB
    plan.measured(config.memory, 0, device, [DeviceMemory(GIB, GIB, on_gpu=True)] * 3)
    assert asked == [device, device]


def test_each_rank_says_what_memory_it_has(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sequence[DeviceMemory]] = []
    measured = MemoryPlan.measured

    def noted(plan: MemoryPlan, options: Any, base: int, device: Any, others: Sequence[DeviceMemory]) -> MemoryPlan:
        told.append(others)
        return measured(plan, options, base, device, others)

    def of(device: torch.device) -> DeviceMemory:
        rank = threading.current_thread().name.removeprefix("rank-")
        return DeviceMemory((10 + int(rank)) * GIB if rank.isdigit() else 16 * GIB, 16 * GIB)

    monkeypatch.setattr(DeviceMemory, "of", of)
    monkeypatch.setattr(MemoryPlan, "measured", noted)
    with replica(model, ranks("cp=3")):
        pass
    assert [[memory.free // GIB for memory in others] for others in told] == [[11, 12]]


def test_a_refused_partition_says_which_pool_is_enough(model: Path) -> None:
    enough = 3 * MIN_POOL_PAGES * BLOCK
    says = f"--pool-bytes must be {size(enough)} or more"
    with pytest.raises(ConfigError, match=says), replica(model, ranks("cp=3"), pool_bytes=enough - 1):
        pass
    with replica(model, ranks("cp=3"), pool_bytes=enough) as llm:
        assert llm.generate([LONG[:8]], replace(GREEDY, max_tokens=2))[0].token_ids


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, None, ""),
        ({"pool_bytes": 15 * GIB}, None, ""),
        ({"pool_bytes": 16 * GIB}, NotEnoughMemory, "16.0 GiB of memory are free, .* smaller --pool-bytes"),
        ({"gpu_memory_utilization": 1.0}, None, ""),
        ({"max_num_batched_tokens": 10**8}, NotEnoughMemory, "100000000 tokens 3361.* --max-num-batched-tokens"),
        (
            {"pool_bytes": 4 * (360 << 10) - 1},
            ConfigError,
            "for 4 pages .* --pool-bytes must be 1.4 MiB or more",
        ),
        ({"gpu_memory_utilization": 0.2}, ConfigError, "a pool of 0 bytes is too small"),
    ],
)
def test_what_is_refused(plan: Any, options: dict[str, Any], error: type[Exception] | None, says: str) -> None:
    if error is None:
        plan(**options).check()
    else:
        with pytest.raises(error, match=says):
            plan(**options).check()


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, None),
        ({"host_cache_bytes": 11 * GIB}, None),
        ({"host_cache_bytes": 12 * GIB}, "11.9 GiB"),
        ({"swap_bytes": 12 * GIB}, "11.9 GiB"),
        ({"corpus_bytes": 12 * GIB}, "11.9 GiB"),
        ({"pool_bytes": 15 * GIB}, "908.7 MiB"),
        ({"pool_bytes": 15 * GIB, "on_gpu": True}, None),
        ({"host_cache_bytes": 16 * GIB, "on_gpu": True}, "16.0 GiB"),
    ],
)
def test_what_is_warned_of(plan: Any, options: dict[str, Any], left: str | None) -> None:
    found = re.search(r"but ([\d.]+ \w+) are left", plan(**options).warning())
    assert (found and found[1]) == left
