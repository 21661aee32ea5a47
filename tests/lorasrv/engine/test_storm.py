"""A storm of requests over a thousand marker adapters: no token may ever come from another adapter, page or prompt.

`markers.py` makes the model and says what it can see. The storm drives one `Engine` as `LLM` and `AsyncEngine` build
it, with a pool for some eight adapters beside the keys and values of some sixteen requests, and a host cache of forty:
adapters come and go all the time. Requests arrive in bursts, share prefixes, are aborted and stopped; names are deleted
and uploaded anew with other contents. After every step each token is compared with what the request's own adapter says.

That a storm can tell at all is shown by taking guards away, one at a time, with no integrity check to help (`GUARDS`):

    pinned adapters stay              AdapterManager.evict_lowest evicts what running requests need
    a page has one writer             PagePool.allocate_singles gives out pages that are in use
    pages come back                   PagePool.release keeps them
    shared pages have counts          PagePool.release frees a page that others hold
    prefixes by adapter               root_hash leaves the adapter out
    prefixes by tokens                page_hash leaves the tokens out
    recomputed from the start         Scheduler._preempt keeps num_computed_tokens though the pages are gone
    swapped pages come back           DeviceMemory does nothing for SwapIn
    pages are arranged first          Engine gives its orders before pages are swapped out
    tables follow moves               KVCacheManager.move leaves its tables as they are
    what moves is copied              DeviceMemory does nothing for CopyPages
    what is being filled is not read  AdapterManager.place says that it is resident
    placements are asked every step   AdapterCache.placed remembers where an adapter lay first
    pages are filled at every return  DeviceMemory.write_adapter does nothing for a copy that it has written once
    segments are built every step     batch.build_segments remembers them by the number of rows
    tokens go to their own rows       ModelRunner takes the scheduler's order for the batch's
    host copies by key                AdapterSource caches by name
    loads by key                      AdapterStore reads what the name means by now
    what is asked for stays stored    AdapterSource.hold holds nothing, and names are deleted
    one end for each request          Scheduler._emit tells of an abort twice
    drafts are compared               _Path takes the drafter's token in place of the model's
    rejected drafts are not computed  ScheduledRequest.num_known_tokens counts them

What a storm cannot see, because the same adapter would say the same: choices of one request in each other's pages
(`test_memory_manager.py`, `test_pool_machine.py`).
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import markers as m
import pytest
import storm
import torch
from all_drafts import every_draft
from storm_guards import GUARDS

from adapter_store.store import AdapterStore
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.outputs import AdapterTier
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.device import compute_alone, compute_in_parallel

pytestmark = pytest.mark.aside
NUM_NAMES = 1000
SHORT_TOKENS, LONG_TOKENS = 5_000, 50_000


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """So small a model gains nothing from a team of threads, which on a busy machine wait for each other."""
    compute_alone()
    yield
    compute_in_parallel()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_file: Path) -> Path:
    return m.write_model(tmp_path_factory.mktemp("marked"), tiny_tokenizer_file.read_bytes())


@pytest.mark.parametrize(("number", "variety"), [(None, 0), (0, 0), (3, 3 % len(m.VARIETIES)), (1017, -1)])
def test_transformers_and_peft_agree_with_the_markers(
    model: Path, tmp_path: Path, number: int | None, variety: int
) -> None:
    """Markers are certain, or the storm would cry wolf: any prompt, and the first and the last number."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    oracle, rng = AutoModelForCausalLM.from_pretrained(model), random.Random(5)
    adapters = {}
    if number is not None:
        adapters["a"] = m.write_adapter(tmp_path / "a", number, m.VARIETIES[variety])
        oracle = PeftModel.from_pretrained(oracle, adapters["a"])
    prompts = [[rng.randrange(3, m.VOCAB) for _ in range(length)] for length in (1, 60, rng.randint(2, 59))]
    with storm.small_pages(), LLM(str(model), storm.config(model, pages=200)) as llm:
        for name, folder in adapters.items():
            llm.add_adapter(name, folder)
        greedy = SamplingParams(max_tokens=storm.MAX_NEW, temperature=0.0, ignore_eos=True)
        answers = llm.generate(prompts, greedy, [next(iter(adapters), None)] * len(prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        said = [m.said_by(token) for token in answer.token_ids]
        assert {s.marker for s in said} == {m.marker(number)}
        assert {s.topic for s in said} <= {m.topic_of(token) for token in prompt}
        with torch.no_grad():
            logits = oracle.eval()(torch.tensor([[*prompt, *answer.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer.token_ids


@pytest.fixture(scope="module")
def filled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("library")
    checkpoint = open_checkpoint(str(model))
    checkpoint.close()
    with AdapterStore(folder / "store", base_shapes(checkpoint.spec)) as store:
        library = m.Library(store, folder / "peft")
        library.fill(NUM_NAMES)
        yield library


@pytest.fixture
def library(filled: Any) -> Any:
    """A thousand names, as they were at first."""
    filled.reset()
    return filled


@pytest.fixture
def start(model: Path, library: Any) -> Iterator[Callable[..., storm.Started]]:
    """start(threaded, preemption) -> an engine whose pool and host cache are too small for what comes."""
    started: list[storm.Started] = []

    def run(threaded: bool, preemption: str = "auto") -> storm.Started:
        started.append(storm.start(model, library, threaded=threaded, preemption=preemption))
        return started[-1]

    yield run
    for one in started:
        one.engine.close()


def _assert_stormy(tally: storm.Tally) -> None:
    print(tally)
    assert tally.preemptions
    assert tally.evictions
    assert tally.cached_tokens
    assert set(tally.tiers) == {tier.value for tier in AdapterTier}
    assert {"length", "abort", "stop"} <= set(tally.ends)
    assert tally.uploads
    assert tally.deletes


@pytest.mark.parametrize(
    ("threaded", "preemption"),
    [
        pytest.param(False, "recompute", id="inline", marks=pytest.mark.long),
        pytest.param(True, "swap", id="threads"),
    ],
)
def test_storm_short(start, library, threaded: bool, preemption: str) -> None:
    tally = storm.storm(start(threaded, preemption), library, SHORT_TOKENS)
    _assert_stormy(tally)
    assert (tally.swaps > 0) == (preemption == "swap")


@pytest.mark.parametrize("drafts", [True, pytest.param(False, marks=pytest.mark.long)])
def test_storm_with_late_steps(model: Path, library: Any, drafts: bool) -> None:
    """With drafts in them, of which many are lies, or taking tokens of the step before."""
    drafter = storm.UnreliableDrafter() if drafts else None
    started = storm.start(model, library, threaded=True, drafter=drafter, late=True)
    with every_draft():
        tally = storm.storm(started, library, SHORT_TOKENS)
    started.engine.close()
    _assert_stormy(tally)
    if drafter is not None:
        count = started.engine._scheduler.speculator.accounts.by_drafter[drafter.name]
        assert min(count.accepted, count.drafted - count.accepted) > 300
    assert started.engine._executor.most_under_way == 2


@pytest.mark.long
def test_storm(start, library) -> None:
    tally = storm.storm(start(threaded=True), library, LONG_TOKENS // 2, seed=1, integrity_every=100)
    _assert_stormy(tally)
    assert tally.tokens >= LONG_TOKENS // 2


@pytest.mark.long
@pytest.mark.parametrize("name", GUARDS)
def test_each_guard_is_needed(model, library, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Taken away, it fails the storm that passes otherwise (`test_storm`), most of them soon."""
    guard = GUARDS[name]
    with monkeypatch.context() as patch:
        guard.take_away(patch)
        drafter = storm.UnreliableDrafter() if guard.drafts else None
        started = storm.start(model, library, threaded=guard.threaded, preemption=guard.preemption, drafter=drafter)
        with every_draft(), pytest.raises(guard.caught_by) as caught:
            storm.storm(started, library, LONG_TOKENS, integrity_every=0)
        with suppress(KeyError):  # it may have lost its own accounts
            started.engine.close()
    print(f"{name}: {caught.type.__name__}: {str(caught.value)[:200]}")
