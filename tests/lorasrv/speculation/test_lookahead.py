"""Lookahead decoding: the window is what the paper says, it pays for itself, and no answer depends on it."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from any_asks import any_asks, make_grammars
from drafted import Ask, Drafted
from mispredict import expect_short_answers

from adapter_store.store import AdapterStore
from lorasrv.config import SpeculationOptions
from lorasrv.errors import ConfigError
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest, Request
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import NO_PROBES, ModelRunnerOutput, SchedulerOutput
from lorasrv.speculation.drafter import DraftQuery
from lorasrv.speculation.drafters import make_drafters
from lorasrv.speculation.lookahead import MAX_TRIAL_EVERY, TRIAL_EVERY, TRIAL_STEPS, Lookahead
from lorasrv.worker.model_runner import ModelRunner

PROMPT = tuple(range(10, 30))
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
PLACES, LENGTH = 5, 4
LOOKAHEAD = SpeculationOptions(drafters=("lookahead",), lookahead=f"{PLACES}x{LENGTH}")


def started(model: Path, library: AdapterStore, quantization: str = "int8", **given: Any) -> Drafted:
    options: dict[str, Any] = {"speculation": LOOKAHEAD, **given}
    drafters = make_drafters(options["speculation"])
    return Drafted(model, library, quantization=quantization, drafters=drafters, **options)


@pytest.fixture(scope="module")
def plain(model: Path, library: AdapterStore) -> Iterator[Drafted]:
    with closing(started(model, library, speculation=SpeculationOptions(speculation="off"))) as drafted:
        yield drafted


@pytest.fixture(scope="module")
def looking(model: Path, library: AdapterStore) -> Iterator[Drafted]:
    with closing(started(model, library)) as drafted:
        yield drafted


def same_answers(plain: Drafted, looking: Drafted, asks: list[Ask]) -> None:
    want, got = plain.run(asks), looking.run(asks)
    for rid, said in want.items():
        if asks[int(rid.partition(".")[0])].abort_after is None:
            assert got[rid] == said


def test_answers_are_those_of_no_drafts(plain: Drafted, looking: Drafted) -> None:
    """To the bit: drafts are chains, and what a row of theirs sees is what it sees without a window behind it."""
    rng, grammars = random.Random(5), make_grammars(plain)
    for number in range(8):
        loops = [Ask(tuple(range(number, number + 20)), GREEDY, adapter) for adapter in (None, "one")]
        same_answers(plain, looking, any_asks(plain, rng, grammars) + loops)
    counts = looking.scheduler.speculator.accounts.by_drafter["lookahead"]
    assert counts.drafted > counts.accepted > 50


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_answers_too(plain: Drafted, model: Path, library: AdapterStore, preemption: str) -> None:
    tight: dict[str, Any] = {"pages": 40, "adapter_floor": 0.0, "max_num_batched_tokens": 64}
    with closing(started(model, library, preemption_mode=preemption, **tight)) as looking:
        expect_short_answers(looking.scheduler.predictor)
        asks = [
            Ask(PROMPT, replace(GREEDY, max_tokens=90), adapter, count=2) for adapter in (None, "one", "two", "three")
        ]
        same_answers(plain, looking, asks)
        assert looking.engine.metrics.stats().preemptions_total > 0


def test_probes_see_their_own_path(model: Path, library: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes behind each probe is what transformers says behind the answer and the probe's ancestors."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    seen, run = [], ModelRunner.run

    def recorded(self: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
        output = run(self, step)
        seen.extend(
            (scheduled, output.probed[scheduled.request_id])
            for scheduled in step.requests
            if scheduled.drafts.probes.token_ids
        )
        return output

    monkeypatch.setattr(ModelRunner, "run", recorded)
    with closing(started(model, library, "none")) as looking:
        looking.run([Ask(PROMPT, replace(GREEDY, max_tokens=20))])
    assert len(seen) > 5
    assert max(len(tokens) for _, tokens in seen) == PLACES * (LENGTH - 1)
    for scheduled, behind in seen:
        probes = scheduled.drafts.probes
        known = scheduled.history[: scheduled.start + scheduled.num_known_tokens]
        paths: list[list[int]] = []
        for token, parent in zip(probes.token_ids, probes.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
        with torch.no_grad():
            want = [int(hf(torch.tensor([[*known, *path]])).logits[0, -1].argmax()) for path in paths]
        assert list(behind) == want


def test_windows_end_with_the_answer(looking: Drafted) -> None:
    """No probe lies behind the last place that an answer may have: the context may end there."""
    lookahead = Lookahead(PLACES, LENGTH)
    depth = PLACES + LENGTH - 2
    for left, has_window in ((depth, True), (depth - 1, False)):
        ask = ask_of(0.0, [5, 6])
        message = replace(ask.request.message, prompt_token_ids=(5, 6), max_tokens=left)
        probes = lookahead.probes(replace(ask, request=Request(message, token_ids=[5, 6])))
        assert (probes is not NO_PROBES) == has_window
    context = looking.built.parts.max_model_len
    prompt = tuple(10 + at % 50 for at in range(context - 40))
    [said] = looking.run([Ask(prompt, replace(GREEDY, max_tokens=40))]).values()
    assert (said.error, len(said.token_ids)) == (None, 40)
    assert looking.engine.retrier.most_tokens is None


def ask_of(cost: float, tokens: list[int]) -> DraftQuery:
    """An ask of an answer at which a token more brings `cost` tokens less."""
    message = EngineCoreRequest(RequestId("r"), tuple(tokens), 100, GREEDY)
    return DraftQuery(Request(message, token_ids=tokens), 16, cost)


def test_ngrams_are_columns_of_the_window() -> None:
    """Two places, n-grams of three tokens: level 0 is given, levels 1 and 2 are said."""
    lookahead, ask = Lookahead(2, 3), ask_of(0.0, [7, 7, 7])
    first = lookahead.probes(ask)
    assert (first.token_ids, first.parents) == ((7, 7), (-1, 0))
    lookahead.observe_probes(ask.request, (10, 11))
    second = lookahead.probes(ask)
    assert (second.token_ids, second.parents) == ((7, 7, 10, 11), (-1, 0, 0, 1))
    lookahead.observe_probes(ask.request, (8, 9, 20, 21))
    assert lookahead.draft(ask).token_ids == (11, 21)  # of the last place that begins with 7
    third = lookahead.probes(ask)
    assert third.token_ids == (10, 11, 20, 21)
    lookahead.observe_probes(ask.request, (0, 0, 30, 31))
    ask.request.token_ids.append(10)
    assert lookahead.draft(ask).token_ids == (20, 30)
    ask.request.token_ids.append(99)
    assert not lookahead.draft(ask).token_ids
    lookahead.forget(ask.request)
    ask.request.token_ids.append(10)
    assert not lookahead.draft(ask).token_ids


class TestWorth:
    """A window is computed where it is expected to bring more than it costs."""

    def windows(self, lookahead: Lookahead, cost: float, steps: int, *, is_right: bool) -> list[bool]:
        """Whether each step has a window; the model says 1 behind everything, the answer goes on so or not."""
        found, tokens = [], [1, 1]
        ask = ask_of(cost / (PLACES * (LENGTH - 1)), tokens)
        for _ in range(steps):
            probes = lookahead.probes(ask)
            found.append(probes is not NO_PROBES)
            if probes is not NO_PROBES:
                lookahead.observe_probes(ask.request, (1,) * len(probes.token_ids))
            tokens.append(1 if is_right else 2 + len(tokens))
            lookahead.observe(ask.request, tokens[-1:])
        return found

    def test_cheap_ones_always(self) -> None:
        assert all(self.windows(Lookahead(PLACES, LENGTH), 0.01, 300, is_right=True))

    def test_dear_ones_never(self) -> None:
        assert not any(self.windows(Lookahead(PLACES, LENGTH), 1.1, 10_000, is_right=True))

    def test_those_between_are_tried_and_kept_if_they_are_right(self) -> None:
        found = self.windows(Lookahead(PLACES, LENGTH), 0.9, 1000, is_right=True)
        assert all(found[-500:])

    def test_and_seldom_if_they_are_wrong(self) -> None:
        found = self.windows(Lookahead(PLACES, LENGTH), 0.4, 20_000, is_right=False)
        assert TRIAL_STEPS * 20_000 / MAX_TRIAL_EVERY / 2 < sum(found[1000:]) < TRIAL_STEPS * 20_000 / TRIAL_EVERY / 4


def test_other_windows_are_refused() -> None:
    for given, why in (
        ("5", r"--lookahead must be written as 5x4, .* not '5'"),
        ("axb", "must be written"),
        ("5x1", "n-grams of 2 or more"),
        ("0x3", "has 0 places"),
        ("17x4", "at most 48 places times tokens"),
    ):
        with pytest.raises(ConfigError, match=why):
            SpeculationOptions(lookahead=given)
    with pytest.raises(ConfigError, match=r"--lookahead drafts nothing: .* leaves lookahead out"):
        SpeculationOptions(lookahead="5x4", drafters=("lookup",))
