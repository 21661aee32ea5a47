"""A rank that is steps behind rank 0 fills pages only when it has caught up."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fake_gpu import DEVICE, FakeGpu
from partitions import ONE, SHORT, ranks, replica
from peft_adapters import peft_adapter
from tiny_engine import BLOCK, GREEDY

from lorasrv.config import PartitionOptions
from lorasrv.distributed import rank_worker
from lorasrv.distributed.frames import Frame, Link, LinkClosed
from lorasrv.distributed.rank_adapters import WRITE
from lorasrv.distributed.rank_links import AFTER, DONE, STOP, RankSockets
from lorasrv.distributed.rank_worker import FILL, RankWorker
from lorasrv.distributed.step_frames import STEP
from lorasrv.errors import AdapterLoadFailed, EngineDead, NotEnoughMemory, OutOfMemory
from lorasrv.models.spec import ModelSpec
from lorasrv.worker.cuda_streams import StagingRing
from lorasrv.worker.device_pool import DevicePool
from sgmv_kernels.formats.kv_format import KV_FORMATS

SPEC = ModelSpec("llama", 1, 32, 48, 2, 1, 16, 40, 64, 1e-5)
STEPS, ROWS, PAGES = 8, 16, 19
PROMPT = [(11 * i) % 300 + 5 for i in range(STEPS * ROWS + 40)]


@pytest.mark.parametrize(("text", "copies"), [("0;1", 1), ("cp=2", 2)])
def test_an_adapter_does_not_overtake_late_steps(text: str, copies: int, model: Path, tmp_path: Path) -> None:
    """A request is aborted in the middle of its prompt, of which a slow rank has computed little yet; an adapter then
    arrives in its pages."""
    peft_adapter(model, tmp_path / "a", seed=1, r=16)
    compute, write = RankWorker._compute, RankWorker._write
    done: list[int] = []

    def slow(worker: RankWorker, frame: Frame) -> None:
        time.sleep(0.03)
        compute(worker, frame)
        done[-1] += 1

    def noted(worker: RankWorker, frame: Frame) -> Frame:
        filled.append(done[-1])
        return write(worker, frame)

    filled: list[int] = []

    def answered(options: PartitionOptions, pages: int) -> list[list[int]]:
        done.append(0)
        config = {"pool_bytes": pages * BLOCK, "max_num_batched_tokens": ROWS, "max_num_seqs": ROWS}
        with replica(model, options, **config) as llm:
            llm.add_adapter("a", tmp_path / "a")
            message = llm._message(PROMPT, replace(GREEDY, max_tokens=2), llm._find(None))
            llm.engine.add_request(message)
            for _ in range(STEPS):
                llm.engine.step()
            llm.engine.abort(message.request_id)
            return [llm.generate([PROMPT[:20]], SHORT, [name])[0].token_ids for name in ("a", "a", None)]

    with patch.object(RankWorker, "_compute", slow), patch.object(RankWorker, "_write", noted):
        told = answered(ranks(text), PAGES * copies)
    assert filled == [STEPS]
    assert told == answered(ONE, PAGES)


@pytest.mark.parametrize(
    ("error", "raised", "logged"),
    [(MemoryError(), OutOfMemory, "rank 1: MemoryError"), (ValueError("odd"), AdapterLoadFailed, "rank 1: odd")],
)
def test_a_load_that_fails_in_a_rank(
    error: Exception, raised: type[Exception], logged: str, model: Path, tmp_path: Path, caplog: Any
) -> None:
    """Short memory passes, so the request may come again; the adapter is not to blame for either."""
    peft_adapter(model, tmp_path / "a", seed=1, r=4)
    with replica(model, ranks("0;1")) as llm:
        llm.add_adapter("a", tmp_path / "a")
        with patch.object(rank_worker, "pack_adapter", side_effect=error), pytest.raises(raised):
            llm.generate([PROMPT[:20]], SHORT, ["a"])
        assert logged in caplog.text
        llm.engine.check_integrity()
        assert llm.generate([PROMPT[:20]], SHORT, ["a"])[0].token_ids


def test_every_rank_warms_up_before_the_first_step(model: Path) -> None:
    """As rank 0 does: for the same adapters and drafts."""
    warm_up = pytest.importorskip("lorasrv.worker.warm_up")
    compute, done = RankWorker._compute, list[object]()

    def warmed(decoder: Any, memory: Any, limits: Any, ops: Any, max_rank: int, *, has_trees: bool) -> None:
        assert (memory.num_pages, limits.max_samples) == (64, 8)
        done.append((decoder.weights.spec.part.rank, max_rank, has_trees))

    def noted(worker: RankWorker, frame: Frame) -> None:
        done.append("step")
        compute(worker, frame)

    with (
        patch.object(rank_worker, "compiles_kernels", lambda device, ops: True),
        patch.object(warm_up, "warm_up", warmed),
        patch.object(RankWorker, "_compute", noted),
        replica(
            model, ranks("0;1;2"), pool_bytes=64 * BLOCK, max_num_seqs=8, max_lora_rank=24, draft_trees=True
        ) as llm,
    ):
        assert llm.generate([PROMPT[:20]], SHORT)[0].token_ids
    assert sorted(done[:2]) == [(1, 24, True), (2, 24, True)]  # type: ignore[type-var]
    assert set(done[2:]) == {"step"}


@pytest.mark.parametrize(
    ("error", "raised", "why"),
    [
        (torch.OutOfMemoryError("no room"), NotEnoughMemory, "^rank 1: no room"),
        (ValueError("odd"), EngineDead, "^a rank cannot warm up: rank 1: odd"),
    ],
)
def test_a_rank_that_cannot_warm_up(error: Exception, raised: type[Exception], why: str, model: Path) -> None:
    with (
        patch.object(RankWorker, "_warm_up", side_effect=error),
        pytest.raises(raised, match=why),
        replica(model, ranks("cp=2")),
    ):
        pass


@pytest.mark.parametrize("text", ["0;1", "0&1", "cp=2"])
def test_no_rank_is_behind_with_pages_that_get_memory(text: str, model: Path) -> None:
    """A request that comes waits for one piece, of the slowest rank, and not for all that rank 0 was faster with."""
    commit, done = RankWorker._commit, list[object]()

    def slow(worker: RankWorker, frame: Frame) -> Any:
        time.sleep(0.02)
        done.append(frame.fields["piece"])
        return commit(worker, frame)

    with (
        patch.object(RankWorker, "_commit", slow),
        replica(model, ranks(text), pool_bytes=40_000 * BLOCK, enable_prefix_caching=False) as llm,
    ):
        behind = []
        while llm.engine.commit_ahead():
            behind.append(len(behind) + 1 - len(done))
        assert len(behind) >= 4
        assert set(behind) == {0}
        assert llm.generate([PROMPT[:20]], SHORT)[0].token_ids


def test_pages_are_filled_behind_steps_that_a_gpu_computes_later() -> None:
    """An order is done once its work is in the device's queue."""
    rows, copies = np.full((1, 2048), 7, dtype=np.uint8), np.array([(0, 1)])

    def read(seed: int) -> Any:
        with FakeGpu(seed) as gpu:
            memory = DevicePool(SPEC, 2, 16, KV_FORMATS["float32"], DEVICE, scratch=False)
            memory._ring = StagingRing(DEVICE, 512)
            gpu.synchronize()
            worker, found = RankWorker(cast("Any", SimpleNamespace(memory=memory))), list[torch.Tensor]()

            def receive() -> Iterator[Frame]:
                yield Frame(STEP)
                worker._fill(Frame(FILL, {}, [rows, copies]))
                yield Frame(STOP)

            with patch.object(RankWorker, "_compute", lambda *_: found.append(memory.slabs.clone())):
                worker.serve(cast("Any", SimpleNamespace(receive=receive().__next__)))
            gpu.synchronize()
            return found[0].count_nonzero().item(), memory.slabs.count_nonzero().item()

    assert {read(seed) for seed in range(20)} == {(0, 2048)}


def test_what_waits_for_orders_ends_with_them() -> None:
    """A step is done while an adapter is being filled; a fill behind steps that never come ends with the link."""
    own, other = RankSockets.pair()
    worker = RankWorker(cast("Any", SimpleNamespace(memory=SimpleNamespace(page_bytes=1, order_writes=lambda: None))))
    computed = threading.Event()

    def written(_: RankWorker, frame: Frame) -> Frame:
        assert computed.wait(30) == (frame.fields[AFTER] == 0)
        return Frame(DONE)

    with (
        patch.object(RankWorker, "_compute", lambda *_: computed.set()),
        patch.object(RankWorker, "_write", written),
    ):
        bulk = threading.Thread(target=worker.serve_bulk, args=(Link(other.bulk),), daemon=True)
        bulk.start()
        Link(own.bulk).send(Frame(WRITE, {AFTER: 0}))
        Link(own.orders).send(Frame(STEP))
        Link(own.bulk).send(Frame(WRITE, {AFTER: 2}))
        own.orders.close()
        with pytest.raises(LinkClosed):
            worker.serve(Link(other.orders))
        assert Link(own.bulk).receive().kind == DONE
        bulk.join(30)
        assert not bulk.is_alive()
    own.close()
    other.close()
