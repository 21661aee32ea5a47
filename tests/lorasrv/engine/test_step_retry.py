"""A step that is computed again says what it would have said, for every way of choosing tokens: nothing of a part that
failed is counted twice, neither in a grammar's state, nor in penalties, nor among beams, nor in what is swapped."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from mispredict import expect_short_answers

from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine.input_processor import further_choices
from lorasrv.llm import LLM
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import BeamOptions, SamplingParams
from lorasrv.scheduler_output import SchedulerOutput

BLOCK = 3 * 2 * 2 * 16 * 16 * 4
PROMPT = [10 + (7 * i) % 300 for i in range(50)]
PLAIN: dict[str, Any] = {"max_tokens": 34, "ignore_eos": True}
WAYS = (
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.1, "seed": 3, "watermark": True},
    {"temperature": 0.0, "fsd_alpha": 0.6},
    {"temperature": 1.4, "seed": 8, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "min_tokens": 4},
    {"temperature": 0.9, "seed": 1, "logit_bias": ((20, 3.0), (21, -5.0))},
)


class EveryThird:
    """A constraint that allows, after n tokens, those of which n is the rest by three: one step too many shows."""

    def __init__(self, vocab_size: int) -> None:
        self._bits = [np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8) for _ in range(3)]
        for rest, bits in enumerate(self._bits):
            bits[rest:vocab_size:3] = 1

    def begin(self) -> "EveryThird.State":
        return self.State(self._bits)

    class State:
        error: str | None = None
        is_over = False

        def __init__(self, bits: list[npt.NDArray[np.uint8]]) -> None:
            self._bits = bits
            self.count = 0

        def advance(self, token_id: int) -> None:
            assert token_id % 3 == self.count % 3
            self.count += 1

        def allowed(self) -> npt.NDArray[np.int32]:
            return np.packbits(self._bits[self.count % 3], bitorder="little").view(np.int32)


@pytest.fixture
def make(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[Callable[[int], LLM]]:
    made: list[LLM] = []

    def build(pages: int) -> LLM:
        config = EngineConfig(
            model=ModelOptions(model=str(model), quantization="int8", dtype="float32"),
            memory=MemoryOptions(pool_bytes=pages * BLOCK),
            scheduler=SchedulerOptions(
                max_num_batched_tokens=40, max_num_seqs=8, preemption_mode="swap", target_itl_ms=None
            ),
        )
        made.append(LLM(str(model), config))
        for name, folder in adapter_dirs.items():
            made[-1].add_adapter(name, folder)
        expect_short_answers(made[-1].engine._parts.scheduler.predictor)
        return made[-1]

    yield build
    for one in made:
        one.close()


def work(llm: LLM) -> list[EngineCoreRequest]:
    """Every way, a grammar, three choices of one prompt and a group of beams."""
    names = (None, "one", "two", "three", None)
    messages = [
        llm._message(PROMPT[i:], SamplingParams(**{**PLAIN, **way}), name)
        for i, (way, name) in enumerate(zip(WAYS, names, strict=True))
    ]
    drawn = SamplingParams(**PLAIN, temperature=1.2, seed=5)
    ref = llm.store.resolve("two")
    admit = llm.input_processor.process
    ruled = replace(drawn, ignore_eos=False)
    messages.append(
        admit(
            RequestId("g"),
            PROMPT[4:],
            ruled,
            ref.key,
            adapter_id="two",
            constraint=EveryThird(llm.engine._parts.vocab_size),
        )
    )
    first = llm._message(PROMPT[7:], drawn, "one")
    messages += [first, *further_choices(first, [RequestId("c.1"), RequestId("c.2")])]
    beams = llm._message(PROMPT[:30], SamplingParams(max_tokens=8, temperature=0.0), "three", BeamOptions(3))
    messages += [beams, *further_choices(beams, [RequestId("b.1"), RequestId("b.2")])]
    return messages


def answers(llm: LLM, messages: list[EngineCoreRequest]) -> list[tuple[list[int], str | None]]:
    told: dict[str, list[Any]] = {message.request_id: [] for message in messages}
    for message in messages:
        llm.engine.add_request(replace(message, cache_salt=""))
    for _ in range(3000):
        if not llm.engine.has_requests:
            break
        for output in llm.engine.step():
            told[output.request_id].append(output)
        llm.engine.check_integrity()
    for output in llm.engine.step():
        told[output.request_id].append(output)
    assert all([o.finish_reason is not None for o in outputs].count(True) == 1 for outputs in told.values())
    return [([t for o in outputs for t in o.new_token_ids], outputs[-1].error) for outputs in told.values()]


@pytest.mark.parametrize(
    ("pages", "error"),
    [
        (22, RuntimeError),
        *(
            pytest.param(pages, error, marks=pytest.mark.long)
            for pages, error in ((22, torch.OutOfMemoryError), (400, RuntimeError), (400, torch.OutOfMemoryError))
        ),
    ],
)
def test_every_way_of_choosing(make, monkeypatch: pytest.MonkeyPatch, pages: int, error: type[Exception]) -> None:
    """With room, and with so little that requests are swapped out and back meanwhile."""
    calm = make(pages)
    expected = answers(calm, work(calm))
    assert all(why is None for _, why in expected)
    assert len({str(said) for said, _ in expected}) > len(WAYS) + 3
    llm, chance = make(pages), random.Random(4)
    runner = llm.engine._parts.executor.runner
    run = runner.run
    number, fails = 0, frozenset[int]()

    class Steps:
        """Each step fails in some of its runs, of a request alone in the first at most, so that nobody ends."""

        def on_step(self) -> None:
            nonlocal number, fails
            number, fails = 0, chance.choice([frozenset(), frozenset({1}), frozenset({1, 2}), frozenset({1, 3})])

        def on_part(self, part: SchedulerOutput) -> None:
            nonlocal number
            number += 1

    def failing(step: SchedulerOutput) -> Any:
        may = number == 1 or len(step.scheduled) > 1
        when = chance.choice(["before", "after"]) if number in fails and may and step.scheduled else None
        if when == "before":
            raise error("forced")
        found = run(step)
        if when == "after":
            raise error("forced")
        return found

    llm.engine.retrier.fault_hook = Steps()
    monkeypatch.setattr(runner, "run", failing)
    assert answers(llm, work(llm)) == expected
    if pages < 100:
        assert llm.engine.metrics.snapshot().swaps_total > 0
