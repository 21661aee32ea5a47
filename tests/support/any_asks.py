"""Random requests for a `Drafted` engine: any fields together, grammars, budgets, several choices, aborts."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from drafted import VOCAB, Ask, Drafted

from lorasrv.errors import InvalidRequest
from lorasrv.request import TokenConstraint
from lorasrv.sampling_params import PLAIN_TEXT, SamplingParams
from lorasrv.text.reasoning import Markers
from lorasrv.text.reasoning_budget import ReasoningBudget
from lorasrv.text.structured_output import grammar as source
from lorasrv.text.structured_output.matcher import CompiledGrammar, Vocabulary, compile_matcher

NAMES = (None, "one", "two", "three")
MARKERS = Markers("<think>", "</think>"), Markers("t", "in")
"""Markers that the tiny model never writes, and some that it does."""


def make_grammars(drafted: Drafted) -> list[TokenConstraint]:
    texts = [
        source.regex_of(r"(ab|cd|ef){3,20}", "regex"),
        source.regex_of(r"[0-9]{1,3}-[a-z]{2,9}", "regex"),
        source.json_of({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}}, "schema"),
    ]
    return compiled(drafted, texts)


def compiled(drafted: Drafted, texts: Sequence[source.Grammar]) -> list[TokenConstraint]:
    vocabulary = Vocabulary.of(drafted.tokenizer, VOCAB, sorted(drafted.built.spec.eos_token_ids))
    built = vocabulary.build(lambda text: drafted.tokenizer.encode(text, add_special_tokens=False))
    return [CompiledGrammar(partial(compile_matcher, built, text.full_text), VOCAB, vocabulary.ends) for text in texts]


def _sampling(rng: random.Random) -> SamplingParams:
    """Return random sampling fields in any combination, each unset most of the time."""

    def maybe(share: float, *values: object) -> Any:
        return rng.choice(values) if rng.random() < share else None

    fields = {
        "temperature": maybe(0.6, 0.3, 0.7, 1.0, 1.5) or 0.0,
        "top_k": maybe(0.2, 1, 5, 50) or 0,
        "top_p": maybe(0.2, 0.3, 0.8, 0.95) or 1.0,
        "min_p": maybe(0.15, 0.02, 0.2) or 0.0,
        "typical_p": maybe(0.15, 0.3, 0.9) or 1.0,
        "repetition_penalty": maybe(0.2, 0.7, 1.3, 5.0) or 1.0,
        "presence_penalty": maybe(0.2, -1.0, 0.5, 2.0) or 0.0,
        "frequency_penalty": maybe(0.2, -0.5, 0.5, 2.0) or 0.0,
        "logit_bias": tuple((t, rng.uniform(-20, 20)) for t in rng.sample(range(VOCAB), 5)) if maybe(0.2, 1) else (),
        "min_tokens": maybe(0.2, 1, 5, 9) or 0,
        "ignore_eos": rng.random() < 0.4,
        "stop": tuple(rng.sample([" ", "e", "th", "a", "1", "\n", "in"], rng.choice([1, 2]))) if maybe(0.25, 1) else (),
        "stop_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([2, 40]))) if maybe(0.25, 1) else (),
        "seed": rng.randrange(1 << 32),
        "logprobs": maybe(0.4, 0, 1, 7),
        "prompt_logprobs": maybe(0.15, 0, 3),
        "watermark": rng.random() < 0.15,
        "max_tokens": rng.choice([1, 2, 3, 9, 17, 18, 33, 40]),
    }
    if fields["temperature"] == 0.0 and rng.random() < 0.2:
        fields |= {"fsd_alpha": rng.choice([0.2, 0.6]), "fsd_ngram": rng.choice([2, 3, 5])}
    # From a separate generator, so that the other fields of all asks do not change.
    own = random.Random(fields["seed"])
    fields["allowed_token_ids"] = tuple(range(5, 90)) if own.random() < 0.1 else None
    fields["bad_words"] = own.choice([("a",), ("e", "the")]) if own.random() < 0.2 else ()
    fields["no_repeat_ngram_size"] = own.choice([1, 2, 4]) if own.random() < 0.15 else 0
    fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
    return SamplingParams(**fields)


def _ask(rng: random.Random, grammars: Sequence[TokenConstraint], longest: int = 60) -> Ask:
    begin = rng.randrange(3)
    prompt = tuple(10 + (7 * i + begin) % 300 for i in range(rng.choice([1, 5, 15, 16, 17, rng.randrange(1, longest)])))
    sampling, constraint = _sampling(rng), None
    if rng.random() < 0.2:
        constraint = rng.choice(grammars)
        sampling = replace(sampling, ignore_eos=False, stop=(), stop_token_ids=(), min_tokens=0, allowed_token_ids=None)
    if rng.random() < 0.05:
        # Until the end of the context.
        sampling = replace(sampling, max_tokens=None, ignore_eos=True, stop=(), stop_token_ids=())
        prompt = prompt * (470 // len(prompt)) if constraint is None else prompt
    return Ask(
        prompt,
        sampling,
        adapter=rng.choice(NAMES),
        count=rng.choice([1, 1, 1, 1, 3]),
        constraint=constraint,
        abort_after=rng.randrange(1, 12) if rng.random() < 0.08 else None,
    )


def any_asks(drafted: Drafted, rng: random.Random, grammars: Sequence[TokenConstraint], most: int = 5) -> list[Ask]:
    asks: list[Ask] = []
    while not asks:
        for _ in range(rng.randrange(1, most + 1)):
            ask = _ask(rng, grammars)
            # From a separate generator, so that the other fields of all asks do not change.
            own = random.Random(ask.sampling.seed)
            if ask.constraint is None and own.random() < 0.3:
                is_open, limit = own.random() < 0.7, own.choice([0, 1, 2, 5, 16])
                budget = ReasoningBudget(own.choice(MARKERS), is_open, limit, drafted.tokenizer, PLAIN_TEXT)
                ask = replace(ask, constraint=budget)
            try:
                drafted.messages([ask], "")
            except InvalidRequest:
                continue  # fields that contradict each other
            asks.append(ask)
    return asks
