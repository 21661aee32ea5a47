"""Medusa heads: they guess what transformers and the rule of the paper say, and no answer depends on them."""

import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from any_asks import NAMES, any_asks, make_grammars
from drafted import Ask, Drafted
from hand_decoder import float_weights
from medusa import Heads, guesses, save_heads, states, trained
from mispredict import expect_short_answers

from adapter_store.errors import AdapterCorrupt
from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.store import AdapterStore
from lorasrv.config import SpeculationOptions
from lorasrv.errors import ConfigError
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.models.lora_sites import base_shapes
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import DrafterOutput, SchedulerOutput
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.draft_heads import DraftHeads, MedusaHeads
from lorasrv.worker.medusa_runner import MedusaRunner

PROMPTS = [tuple(range(first, first + 20)) for first in range(10, 90, 10)]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
MEDUSA = SpeculationOptions(drafters=("medusa",))
NUM_HEADS = 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def hf(model: Path, adapter_dirs: dict[str, Path]) -> dict[str | None, Any]:
    """The tiny llama of transformers, alone and with an adapter of PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()

    return {None: base(), "one": PeftModel.from_pretrained(base(), adapter_dirs["one"]).eval()}


@pytest.fixture(scope="module")
def heads(hf: dict[str | None, Any], model: Path, library: AdapterStore) -> dict[str | None, Heads]:
    """Heads trained on greedy answers, of the base and of an adapter, in both formats that are served here."""
    texts = dict[str | None, list[list[int]]]()
    for quantization in ("none", "int8"):
        off = SpeculationOptions(speculation="off")
        with closing(started(model, library, off, quantization)) as plain:
            for adapter in hf:
                said = plain.run([Ask(prompt, GREEDY, adapter) for prompt in PROMPTS])
                answers = [list(one.token_ids) for one in said.values()]
                texts.setdefault(adapter, []).extend([*p, *a] for p, a in zip(PROMPTS, answers, strict=True))
    return {adapter: trained(reference, texts[adapter], NUM_HEADS) for adapter, reference in hf.items()}


@pytest.fixture(scope="module")
def filled(
    model: Path,
    adapter_dirs: dict[str, Path],
    heads: dict[str | None, Heads],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[AdapterStore]:
    """A store in which `one` and `three` have heads, `three` wrong ones."""
    folder = tmp_path_factory.mktemp("medusa")
    wrong = [(torch.randn(64, 64), torch.randn(64)) for _ in range(2)]
    with AdapterStore(folder / "store", base_shapes(read_model_shape(str(model)).spec)) as store:
        for name, own in {"one": heads["one"], "two": None, "three": wrong}.items():
            shutil.copytree(adapter_dirs[name], folder / name)
            if own is not None:
                save_heads(own, folder / name / "medusa_lm_head.safetensors")
            with open_adapter_dir(folder / name) as peft:
                store.register(name, peft.config, store.add_blob(peft.weights_path))
        yield store


@pytest.fixture(scope="module")
def base_heads(heads: dict[str | None, Heads], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base heads")
    save_heads(heads[None], folder / "medusa_lm_head.safetensors")
    return folder


def started(
    model: Path, store: AdapterStore, speculation: SpeculationOptions, quantization: str = "int8", **given: Any
) -> Drafted:
    return Drafted(model, store, quantization=quantization, drafters=[], speculation=speculation, **given)


@pytest.fixture(scope="module")
def plain(model: Path, filled: AdapterStore) -> Iterator[Drafted]:
    with closing(started(model, filled, SpeculationOptions(speculation="off"))) as drafted:
        yield drafted


@pytest.fixture(scope="module")
def drafting(model: Path, filled: AdapterStore, base_heads: Path) -> Iterator[Drafted]:
    with closing(started(model, filled, replace(MEDUSA, draft_heads=str(base_heads)))) as drafted:
        have_heads(drafted)
        yield drafted


def have_heads(drafted: Drafted) -> None:
    """Wait until the heads of the adapters are read."""
    runner = drafted.runner._models["medusa"]
    assert isinstance(runner, MedusaRunner)
    heads = runner._heads
    for name in ("one", "three"):
        heads.find(drafted.key(name), has_own=True)
    for arriving in list(heads._arriving.values()):
        arriving.result(10)
    heads._take_arrived()


def same_answers(plain: Drafted, drafting: Drafted, asks: Sequence[Ask]) -> None:
    want, got = plain.run(asks), drafting.run(asks)
    for rid, said in want.items():
        if asks[int(rid.partition(".")[0])].abort_after is None:
            assert got[rid] == said


@pytest.mark.parametrize("adapter", [None, "one"])
def test_heads_guess_what_transformers_says(
    model: Path,
    filled: AdapterStore,
    base_heads: Path,
    hf: dict[str | None, Any],
    heads: dict[str | None, Heads],
    monkeypatch: pytest.MonkeyPatch,
    adapter: str | None,
) -> None:
    """After plain steps and after steps that accept drafts: the state is that of the last token's row."""
    monkeypatch.setattr("lorasrv.worker.draft_rows.MIN_CONFIDENCE", 0.0)
    drafts, draft = list[tuple[list[int], tuple[int, ...]]](), MedusaRunner.draft

    def recorded(self: MedusaRunner, step: Any, asking: Any, said: Any, last: Any) -> DrafterOutput:
        output = draft(self, step, asking, said, last)
        for scheduled in asking:
            tokens = [*scheduled.history, *said[scheduled.request_id]]
            drafts.append((tokens, output.drafts[scheduled.request_id].token_ids))
        return output

    monkeypatch.setattr(MedusaRunner, "draft", recorded)
    with closing(started(model, filled, replace(MEDUSA, draft_heads=str(base_heads)), "none")) as drafting:
        have_heads(drafting)
        drafting.run([Ask(prompt, GREEDY, adapter) for prompt in PROMPTS[:3]])
        assert drafting.scheduler.speculator.accounts.by_drafter["medusa"].accepted > 20
    assert len(drafts) > 40
    for tokens, drafted in drafts:
        state = states(hf[adapter], tokens)[len(tokens) - 2]
        assert list(drafted) == guesses(hf[adapter], heads[adapter], state)[: len(drafted)]


def test_answers_are_those_of_no_drafts(plain: Drafted, drafting: Drafted) -> None:
    rng, grammars = random.Random(5), make_grammars(plain)
    before = drafting.scheduler.speculator.accounts.by_drafter["medusa"].accepted
    for number in range(8):
        known = [Ask(PROMPTS[number], GREEDY, adapter) for adapter in (None, "one")]
        same_answers(plain, drafting, any_asks(plain, rng, grammars) + known)
    assert drafting.scheduler.speculator.accounts.by_drafter["medusa"].accepted > before + 60


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_answers_too(
    plain: Drafted, model: Path, filled: AdapterStore, base_heads: Path, preemption: str
) -> None:
    rng, grammars = random.Random(6), make_grammars(plain)
    options = replace(MEDUSA, draft_heads=str(base_heads))
    tight: dict[str, Any] = {"pages": 40, "adapter_floor": 0.0, "max_num_batched_tokens": 64}
    with closing(started(model, filled, options, preemption_mode=preemption, **tight)) as drafting:
        have_heads(drafting)
        expect_short_answers(drafting.scheduler.predictor)
        for _ in range(2):
            asks = any_asks(plain, rng, grammars, most=4)
            asks += [
                Ask(PROMPTS[0], replace(some, max_tokens=90), adapter=adapter, count=2)
                for some, adapter in ((GREEDY, None), (RANDOM, None), (GREEDY, "one"), (RANDOM, "two"))
            ]
            same_answers(plain, drafting, asks)
        assert drafting.engine.metrics.stats().preemptions_total > 0
        assert drafting.scheduler.speculator.accounts.by_drafter["medusa"].accepted > 50


def test_no_thread_outlives_the_engine(model: Path, filled: AdapterStore) -> None:
    before = set(threading.enumerate())
    with closing(started(model, filled, MEDUSA)) as drafting:
        drafting.run([Ask(PROMPTS[0], GREEDY, "one")])
        readers = [one for one in threading.enumerate() if one not in before and one.name.startswith("draft-heads")]
    assert readers
    assert all(map(_ends, readers))


def _ends(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def test_rejection_goes_on_with_any_distribution(model: Path, filled: AdapterStore, base_heads: Path) -> None:
    options = replace(MEDUSA, draft_heads=str(base_heads), accept="rejection")
    with closing(started(model, filled, options)) as drafting:
        have_heads(drafting)
        asks = [Ask(PROMPTS[0], replace(RANDOM, seed=None), adapter) for adapter in (None, "one", "two")]
        said = drafting.run(asks)
        assert all(len(one.token_ids) == 60 and one.error is None for one in said.values())
        assert drafting.scheduler.speculator.accounts.by_drafter["medusa"].accepted > 5


@pytest.mark.parametrize("of_base", [False, True], ids=["of adapters", "of the base, too"])
def test_rows_with_heads_and_without_share_steps(
    plain: Drafted, model: Path, filled: AdapterStore, base_heads: Path, monkeypatch: pytest.MonkeyPatch, of_base: bool
) -> None:
    """The base and `two` have no heads but those of the base; the heads of `three` are wrong."""
    options = replace(MEDUSA, draft_heads=str(base_heads)) if of_base else MEDUSA
    asks = [
        Ask(PROMPTS[number], replace(some, logprobs=2), adapter)
        for number, adapter in enumerate(NAMES)
        for some in (GREEDY, RANDOM)
    ]
    with closing(started(model, filled, options)) as drafting:
        have_heads(drafting)
        steps, run = list[SchedulerOutput](), drafting.runner.run
        monkeypatch.setattr(drafting.runner, "run", lambda step: steps.append(step) or run(step))
        same_answers(plain, drafting, asks)
        assert drafting.scheduler.speculator.accounts.by_drafter["medusa"].accepted > 10
    drafted = {scheduled.adapter_key for step in steps for scheduled in step.requests if scheduled.draft_token_ids}
    assert drafted == {plain.key(name) for name in (NAMES if of_base else ("one", "three"))}
    together = [
        step.requests for step in steps if len({scheduled.adapter_key for scheduled in step.requests}) == len(NAMES)
    ]
    assert any(
        0 < sum(bool(scheduled.draft_token_ids) for scheduled in requests) < len(requests) for requests in together
    )


class TestDraftHeads:
    """Heads of adapters come beside the steps, within their bytes."""

    def found(self, filled: AdapterStore, max_bytes: int, read: Any = None) -> DraftHeads:
        return DraftHeads(
            None, read or (lambda key: filled.load(key).heads), max_bytes, torch.float32, torch.device("cpu")
        )

    def wait(self, heads: DraftHeads) -> None:
        for arriving in list(heads._arriving.values()):
            arriving.exception(10)
        heads._take_arrived()

    def test_the_least_recently_used_go_first(self, filled: AdapterStore) -> None:
        one, three = (filled.resolve(name).key for name in ("one", "three"))
        heads = self.found(filled, 70_000)
        assert heads.find(one, has_own=True) is None  # it is being read
        self.wait(heads)
        own = heads.find(one, has_own=True)
        assert own is not None
        assert heads.nbytes == own.nbytes == 3 * 4 * (64 * 64 + 64)
        assert heads.find(three, has_own=True) is None
        self.wait(heads)
        assert heads.find(three, has_own=True) is not None
        assert heads.nbytes == 2 * 4 * (64 * 64 + 64)
        assert heads.find(one, has_own=True) is None
        assert not heads._arriving, "what was read a moment ago is not read again: two would take turns for ever"
        assert heads.find(one, has_own=False) is None

    @pytest.mark.parametrize("fault", ["too large", "damaged"])
    def test_unusable_ones_are_not_read_again(
        self, filled: AdapterStore, caplog: pytest.LogCaptureFixture, fault: str
    ) -> None:
        reads = []

        def read(key: Any) -> Any:
            reads.append(key)
            if fault == "damaged":
                raise AdapterCorrupt("as asked")
            return filled.load(key).heads

        one = filled.resolve("one").key
        heads = self.found(filled, 100 if fault == "too large" else 1 << 20, read)
        for _ in range(3):
            assert heads.find(one, has_own=True) is None
            self.wait(heads)
        assert reads == [one]
        assert f"the draft heads of adapter {one[:12]} " in caplog.text
        heads._next_read_s.clear()
        heads.find(one, has_own=True)
        self.wait(heads)
        assert reads == [one, one], "a fault may be mended by a new upload"


def test_heads_that_do_not_fit_are_refused(model: Path, library: AdapterStore, tmp_path: Path) -> None:
    save_heads([(torch.zeros(32, 32), torch.zeros(32))], tmp_path / "small.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x01\x02")
    for path, why in (
        ("small.safetensors", r"this base has 64 hidden numbers"),
        ("torn.safetensors", r"--draft-heads .*torn"),
        ("none", rf"--draft-heads: {tmp_path}/none cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=why):
            started(model, library, replace(MEDUSA, draft_heads=str(tmp_path / path)))
    with pytest.raises(ConfigError, match=r"--draft-heads drafts nothing: .* leaves medusa out"):
        SpeculationOptions(draft_heads="x", drafters=("lookup",))
    with pytest.raises(ConfigError, match="--draft-head-bytes must not be negative"):
        SpeculationOptions(draft_head_bytes=-1)


def test_the_host_store_counts_heads(filled: AdapterStore, model: Path) -> None:
    from adapter_store.host_cache import HostCache

    source = HostAdapterStore(filled, HostCache(1 << 20), float_weights(model), torch.float32)
    assert [source.num_draft_heads(filled.resolve(name).key) for name in ("one", "two", "three")] == [3, 0, 2]
    own = MedusaHeads.of(source.draft_heads(filled.resolve("three").key), torch.float32, CPU)
    assert len(own.heads) == 2
