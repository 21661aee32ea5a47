"""Answers held to grammars by the real engine on a tiny model: they parse, validate, and end as they should."""

import asyncio
import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from mispredict import expect_short_answers
from random_schemas import random_schema

from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.outputs import FinishReason, RequestOutput
from lorasrv.request import ConstraintState, Request, RequestOptions, TokenConstraint
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.structured_output import grammar as source
from lorasrv.text.structured_output.compiler import KEPT_GRAMMARS
from lorasrv.text.structured_output.matcher import GrammarState

PROMPT = list(range(10, 30))
RANDOM = SamplingParams(max_tokens=480, temperature=1.0, seed=0)
SCHEMAS = 200
roomy = pytest.mark.engine(pages=2730, target_itl_ms=None)


async def answer(
    engine: AsyncEngine, grammar: source.Grammar | None, sampling: SamplingParams = RANDOM, **options: Any
) -> tuple[str, RequestOutput]:
    constraint = await engine.grammars.compile(grammar) if grammar is not None else None
    outputs = [o async for o in engine.generate(PROMPT, sampling, RequestOptions(constraint=constraint, **options))]
    return "".join(o.text for o in outputs), outputs[-1]


@roomy
async def test_answers_to_random_schemas_validate_in_mixed_batches(engine: AsyncEngine, keys) -> None:
    adapters = list(keys.values())

    async def check(number: int) -> None:
        schema = random_schema(number)
        sampling = replace(RANDOM, seed=number, temperature=(0.0, 0.7, 1.5)[number % 3])
        grammar = source.json_of(schema, "guided_json")
        text, last = await answer(engine, grammar, sampling, adapter_key=adapters[number % len(adapters)])
        said.append(text)
        if last.finish_reason is not FinishReason.STOP or not jsonschema_rs.is_valid(schema, json.loads(text)):
            wrong.append((schema, text, last.finish_reason))

    said: list[str] = []
    wrong: list[object] = []
    free = [asyncio.create_task(answer(engine, None, replace(RANDOM, max_tokens=100))) for _ in range(4)]
    await asyncio.gather(*map(check, range(SCHEMAS)))
    assert wrong == []
    assert len(set(said)) > SCHEMAS / 3, "a model that always says the same proves little"
    assert {last.finish_reason for _, last in await asyncio.gather(*free)} <= {"stop", "length"}


@roomy
async def test_without_its_grammar_an_answer_does_not_validate(engine: AsyncEngine) -> None:
    text, _ = await answer(engine, None)
    with pytest.raises(ValueError):  # noqa: PT011 - whatever json says
        json.loads(text)


@roomy
async def test_ends(engine: AsyncEngine) -> None:
    letters = source.regex_of("[ab]{6}", "p")
    text, last = await answer(engine, letters)
    assert re.fullmatch("[ab]{6}", text)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)
    assert not set(last.token_ids) & set(engine.spec.eos_token_ids), "the end needs no token of its own"
    exactly, last = await answer(engine, letters, replace(RANDOM, max_tokens=last.num_generated_tokens))
    assert (exactly, last.finish_reason) == (text, FinishReason.STOP)
    cut, last = await answer(engine, letters, replace(RANDOM, max_tokens=2))
    assert text.startswith(cut)
    assert (len(cut) < 6, last.finish_reason) == (True, FinishReason.LENGTH)
    some, last = await answer(engine, source.regex_of("xxx(-|~)yyy", "p"), replace(RANDOM, stop=("-", "~")))
    assert (some, last.finish_reason) == ("xxx", FinishReason.STOP)
    assert last.stop_reason in ("-", "~")


@roomy
async def test_choices_have_states_of_their_own_and_text_is_whole(engine: AsyncEngine) -> None:
    constraint = await engine.grammars.compile(source.regex_of("[가-힣]{4}😀|größe{2}", "p"))
    streams = await engine.add_choices(
        PROMPT, replace(RANDOM, temperature=3.0), 8, RequestOptions(constraint=constraint)
    )
    texts = []
    for stream in streams:
        pieces = [output.text async for output in stream]
        assert not any("\ufffd" in piece for piece in pieces)
        texts.append("".join(pieces))
    assert all(re.fullmatch("[가-힣]{4}😀|größe{2}", text) for text in texts)
    assert len(set(texts)) > 2


@pytest.mark.parametrize("preemption_mode", [pytest.param("recompute", marks=pytest.mark.long), "swap"])
@pytest.mark.engine("preemption_mode", pages=20, target_itl_ms=None)
async def test_preempted_answers_go_on_where_they_were(engine: AsyncEngine, preemption_mode: str) -> None:
    """The pool holds a fraction of what they need: rows are computed again, or come back from host memory."""
    grammar = source.regex_of("([a-z]{3},){12}end", "p")
    samplings = [replace(RANDOM, seed=seed, max_tokens=100) for seed in range(8)]

    expect_short_answers(engine._engine._scheduler.predictor)
    alone = [await answer(engine, grammar, sampling) for sampling in samplings]
    assert engine.metrics.stats().preemptions_total == 0
    crowded = await asyncio.gather(*(answer(engine, grammar, sampling) for sampling in samplings))
    assert engine.metrics.stats().preemptions_total > 0
    assert [text for text, _ in crowded] == [text for text, _ in alone]
    assert all(re.fullmatch("([a-z]{3},){12}end", text) for text, _ in crowded)


class Broken:
    """A constraint that fails after a while: in its mask, or when a token comes."""

    ends_answer = True

    def __init__(self, inner: TokenConstraint, where: str) -> None:
        self._inner, self._where = inner, where

    def begin(self) -> ConstraintState:
        state = self._inner.begin()
        whole = getattr(state, self._where)
        calls = iter(range(1000))

        def failing(*args: int) -> object:
            if next(calls) == 3:
                # What a state meets that is out of step with its request.
                GrammarState.advance(state, 0)  # type: ignore[arg-type]
            return whole(*args)

        setattr(state, self._where, failing)
        return state


@pytest.mark.parametrize("where", ["allowed", "advance"])
@roomy
async def test_a_state_that_fails_ends_its_own_request(engine: AsyncEngine, where: str) -> None:
    constraint = await engine.grammars.compile(source.regex_of("[ab]{50}", "p"))
    broken = Broken(constraint, where)
    other = asyncio.create_task(answer(engine, source.regex_of("[ab]{60}", "p")))
    outputs = [o async for o in engine.generate(PROMPT, RANDOM, RequestOptions(constraint=broken))]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert "grammar cannot be followed" in (outputs[-1].error or "")
    text, last = await other
    assert (len(text), last.finish_reason) == (60, FinishReason.STOP)


@roomy
async def test_an_answer_goes_on_where_its_lexer_was_used_up(engine: AsyncEngine) -> None:
    grammar = source.regex_of(r"[a-z]{40}|\w*a\w{60}c", "p")
    alone, last = await answer(engine, grammar, timeout_s=600.0)
    for number in range(KEPT_GRAMMARS):
        await engine.grammars.compile(source.regex_of(f"[ab]{{{number}}}c", "p"))
    assert grammar.text not in {text for _, text, _ in engine.grammars._in_use}, "its last answer does not keep it"
    constraint = await engine.grammars.compile(grammar)
    other, chance = constraint._matcher.deep_copy(), random.Random(0)
    while not other.is_error():
        bits = np.unpackbits(np.frombuffer(other.compute_bitmask(), np.uint8), bitorder="little")
        other.consume_token(int(chance.choice(np.flatnonzero(bits))))
    assert "too many states" in other.get_error()
    beside, last_beside = await answer(engine, grammar)
    assert (beside, last_beside.finish_reason) == (alone, last.finish_reason)


@roomy
async def test_masks_are_bits_of_the_vocabulary(engine: AsyncEngine) -> None:
    state = (await engine.grammars.compile(source.regex_of("a", "p"))).begin()
    first = state.allowed()
    assert (first.dtype, first.shape) == (np.int32, (-(-engine.spec.vocab_size // 32),))
    assert state.allowed() is first, "one buffer for all steps"


@roomy
async def test_an_answer_that_has_ended_keeps_no_matcher(engine: AsyncEngine) -> None:
    """Its deadline remembers the request, for up to a day; a matcher may take megabytes."""

    deadlines = engine._engine._parts.scheduler._deadlines
    watch, remembered = deadlines.watch, []

    def noted(request: Request) -> None:
        assert request.constraint_state is not None
        remembered.append(request)
        watch(request)

    deadlines.watch = noted
    _, done = await answer(engine, source.choice_of(["yes", "no"], "p"), timeout_s=86400.0)
    assert done.finish_reason is FinishReason.STOP
    assert [request.constraint_state for request in remembered] == [None]
