"""Drafts on the kernels of a GPU, in Triton's interpreter: answers are those of the torch kernels without drafts."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from drafted import Ask, Drafted, Said, ScriptedDrafter, mixed
from fake_gpu import FakeGpu
from late_executor import LaunchedAtOnce
from peft_adapters import peft_adapter
from tiny_checkpoints import TinyCheckpoint, filled_store

from adapter_store.store import AdapterStore
from lorasrv.config import SpeculationOptions
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.device_pool import DevicePool

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("compiled kernels do not run on the CPU", allow_module_level=True)

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ASKS = [Ask(tuple(range(10, 30)), GREEDY), Ask(tuple(range(40, 49)), GREEDY, "one")]


@pytest.fixture(scope="module")
def least(tiny_hf_checkpoints: dict[str, TinyCheckpoint]) -> Path:
    """A model of few programs: each takes tens of milliseconds in the interpreter."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_hf_checkpoints["llama"](num_hidden_layers=1, **shape)


@pytest.fixture(scope="module")
def shelf(least: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterStore]:
    folder = tmp_path_factory.mktemp("shelf")
    peft_adapter(least, folder / "one")
    yield from filled_store(folder / "store", least, {"one": folder / "one"})


@pytest.fixture(scope="module")
def want(least: Path, shelf: AdapterStore) -> dict[RequestId, Said]:
    with closing(Drafted(least, shelf, kernels="torch", drafters=[])) as plain:
        return plain.run(ASKS)


@pytest.mark.parametrize("names", [("one",), ("one", "two", "three")], ids=["chain", "tree"])
def test_answers_with_drafts_are_those_without(
    least: Path,
    shelf: AdapterStore,
    want: dict[RequestId, Said],
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved, copy = [0], DevicePool.copy_slots

    def counted(self: DevicePool, moves: object, ops: object) -> None:
        moved[0] += sum(len(move.sources) for move in moves)  # type: ignore[attr-defined]
        copy(self, moves, ops)  # type: ignore[arg-type]

    monkeypatch.setattr(DevicePool, "copy_slots", counted)
    drafters = [ScriptedDrafter(name) for name in names]
    for seed, drafter in enumerate(drafters):
        drafter.answers = {rid: said.token_ids for rid, said in want.items()}
        drafter.script, drafter.rng = mixed, random.Random(seed)
    options = SpeculationOptions(draft_trees=len(names) > 1, draft_head_bytes=0)
    given = {"kernels": "triton", "late": LaunchedAtOnce, "drafters": drafters, "speculation": options}
    with closing(Drafted(least, shelf, **given)) as engine, FakeGpu():  # type: ignore[arg-type]
        assert engine.run(ASKS) == want
        counts = engine.scheduler.speculator.accounts.by_drafter
        assert engine.steps < GREEDY.max_tokens
    assert all(count.drafted > count.accepted > 0 for count in counts.values())
    assert (moved[0] > 0) == (len(names) > 1)
