"""A real engine on the tiny model in int4, drafters that know the right tokens, and the full output of each request."""

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from all_drafts import every_draft, scripted
from late_executor import LateExecutor, LaunchedAtOnce, ThreadedAtOnce

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from lorasrv.engine import factory
from lorasrv.engine.core import EngineCore
from lorasrv.engine.input_processor import further_choices
from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.engine.poison_requests import PoisonGuard
from lorasrv.memory import memory_manager
from lorasrv.memory.memory_manager import ADAPTER_FLOOR
from lorasrv.models.loader import open_checkpoint
from lorasrv.outputs import RequestId, RequestOutput, TokenLogprobs
from lorasrv.request import EngineCoreRequest, Request, RequestOptions, TokenConstraint
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation.drafter import Draft, Drafter, DraftQuery
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.worker.adapter_loader import InlineLoader
from lorasrv.worker.executor import InProcessExecutor

VOCAB = 384
MAX_STEPS = 4000
PAGE_SIZE = 16
BLOCK = 3 * 2 * 2 * 16 * PAGE_SIZE * 4
"""Bytes of a page in all layers: 3 layers, keys and values of 2 heads of 16 in float32."""
Script = Callable[[list[int], DraftQuery, random.Random], Sequence[int]]
"""Function that returns draft tokens, given the tokens of plain decoding from here on."""


class ScriptedDrafter(Drafter):
    """A drafter that proposes the tokens that its script makes from the right answers; without a script none."""

    def __init__(self, name: str = "scripted") -> None:
        self.name = name
        self.script: Script | None = None
        self.answers: dict[RequestId, list[int]] = {}
        self.rng = random.Random(0)
        self.num_proposed = 0
        self.heard: dict[RequestId, list[int]] = {}
        self.forgotten: list[RequestId] = []

    def draft(self, ask: DraftQuery) -> Draft:
        right = self.answers.get(ask.request.request_id, [])[ask.request.num_generated_tokens :]
        draft = scripted(self.script(right, ask, self.rng) if self.script is not None else ())
        self.num_proposed += len(draft.token_ids)
        return draft

    def observe(self, request: Request, new_token_ids: Sequence[int]) -> None:
        assert request.token_ids[-len(new_token_ids) :] == list(new_token_ids)
        self.heard.setdefault(request.request_id, []).extend(new_token_ids)

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)


def oracle(right: list[int], ask: DraftQuery, rng: random.Random) -> Sequence[int]:
    return right[: ask.max_tokens]


def liar(right: list[int], ask: DraftQuery, rng: random.Random) -> Sequence[int]:
    wrong = [(token + 1 + rng.randrange(VOCAB - 1)) % VOCAB for token in right]
    return wrong[: ask.max_tokens]


def guesser(right: list[int], ask: DraftQuery, rng: random.Random) -> Sequence[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(ask.max_tokens + 1))]


def mixed(right: list[int], ask: DraftQuery, rng: random.Random) -> Sequence[int]:
    """Draft right tokens, then wrong ones, then right ones again; beyond the end of the answer arbitrary ones."""
    tokens = [*right, *(rng.randrange(VOCAB) for _ in range(ask.max_tokens))][: rng.randrange(ask.max_tokens + 1)]
    for _ in range(rng.randrange(3)):
        if tokens:
            tokens[rng.randrange(len(tokens))] = rng.randrange(VOCAB)
    return tokens


def rude(right: list[int], ask: DraftQuery, rng: random.Random) -> Sequence[int]:
    """Draft more tokens than requested, and ids that are not tokens."""
    tokens = [*right, *range(VOCAB - 4, VOCAB + 40)]
    if rng.random() < 0.5:
        tokens.insert(rng.randrange(len(tokens)), rng.choice([-1, VOCAB, 1 << 40]))
    return tokens


SCRIPTS: dict[str, Script] = {"oracle": oracle, "liar": liar, "guesser": guesser, "mixed": mixed, "rude": rude}


@dataclass(frozen=True)
class Ask:
    """One prompt with `count` choices, which is aborted when it has `abort_after` tokens."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    adapter: str | None = None
    count: int = 1
    constraint: TokenConstraint | None = None
    abort_after: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Said:
    """The full output of one choice, for comparison."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: object = None
    text_offsets: list[int] = field(default_factory=list)
    finish: object = None
    stop_reason: object = None
    error: str | None = None
    usage: tuple[int, int] = (0, 0)

    def take(self, output: RequestOutput) -> bool:
        """Add an output, and return whether it is the last."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.text_offsets += output.text_offsets
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error
        self.usage = output.num_prompt_tokens, output.num_generated_tokens
        return output.finished


class Drafted:
    """An engine for many runs, with drafts and without. `checks`: accounts are checked at the end of a run and in every
    third step, since a check takes as long as a step.
    `late`: an executor with two steps in flight, of which the second computes the tokens that the first samples, unless
    there are drafters. `drafters`: replace the scripted one. `pages`: the pool's size, in pages of float32. Triton's
    `kernels` need its interpreter."""

    def __init__(
        self,
        model: Path,
        store: AdapterStore,
        *,
        pages: int = 600,
        quantization: str = "int4",
        kv_cache_dtype: str = "auto",
        kernels: str = "numba",
        adapter_floor: float = ADAPTER_FLOOR,
        late: type[LateExecutor | LaunchedAtOnce | ThreadedAtOnce] | None = None,
        drafters: Sequence[Drafter] | None = None,
        speculation: SpeculationOptions | None = None,
        **scheduler: Any,
    ) -> None:
        given = {"max_num_seqs": 64, "target_itl_ms": None, "scheduling_policy": "fcfs", **scheduler}
        config = EngineConfig(
            model=ModelOptions(model=str(model), quantization=quantization, dtype="float32", kernels=kernels),
            memory=MemoryOptions(pool_bytes=pages * BLOCK, kv_cache_dtype=kv_cache_dtype),
            scheduler=SchedulerOptions(**given),
            speculation=speculation or SpeculationOptions(draft_head_bytes=0),
        )
        self.drafter = ScriptedDrafter()
        self.store = store
        with (
            closing(open_checkpoint(str(model))) as checkpoint,
            patch.object(factory, "PAGE_SIZE_TOKENS", PAGE_SIZE),
            patch.object(memory_manager, "ADAPTER_FLOOR", adapter_floor),
        ):
            built = factory.build(checkpoint, config, store, drafters=[self.drafter] if drafters is None else drafters)
        assert built.parts.source is not None
        assert isinstance(built.parts.executor, InProcessExecutor)
        self.runner = built.parts.executor.runner
        self.late = late(built.parts.executor) if late else None
        # A separate guard, so that the processor does not refuse requests because of faults that tests cause.
        parts = replace(built.parts, executor=self.late or InProcessExecutor(self.runner), poison=PoisonGuard())
        self.built, self.tokenizer = built, built.tokenizer
        self.engine = EngineCore(parts, InlineLoader(built.parts.source, self.runner.write_adapter))
        self.processor = built.input_processor
        self.scheduler = built.parts.scheduler
        self.checks = True
        self.num_runs = self.num_calls = 0

    def close(self) -> None:
        self.engine.close()

    @property
    def steps(self) -> int:
        return self.engine.metrics.stats().steps_total

    def key(self, name: str | None) -> AdapterKey | None:
        return None if name is None else self.store.resolve(name).key

    def messages(self, asks: Sequence[Ask], salt: str) -> list[list[EngineCoreRequest]]:
        groups = []
        for number, ask in enumerate(asks):
            given = {"cache_salt": salt, "adapter_id": ask.adapter or "", **ask.options}
            options = RequestOptions(adapter_key=self.key(ask.adapter), constraint=ask.constraint, **given)
            first = self.processor.process(RequestId(f"{number}.0"), ask.prompt, ask.sampling, options)
            others = [RequestId(f"{number}.{choice}") for choice in range(1, ask.count)]
            groups.append([first, *further_choices(first, others)])
        return groups

    def run(self, asks: Sequence[Ask], script: Script | None = None, salt: str | None = None) -> dict[RequestId, Said]:
        """Answer all asks together. Prefixes are shared only within a run, unless a salt is given."""
        with every_draft():
            return self._run(asks, script, salt)

    def _run(self, asks: Sequence[Ask], script: Script | None, salt: str | None) -> dict[RequestId, Said]:
        self.num_runs += 1
        self.drafter.script = script
        aborts, said, processors = dict[RequestId, int](), dict[RequestId, Said](), dict[RequestId, OutputProcessor]()
        for ask, group in zip(asks, self.messages(asks, f"run {self.num_runs}" if salt is None else salt), strict=True):
            for message in group:
                rid = message.request_id
                detokenizer = Detokenizer(self.tokenizer, message.text)
                processors[rid] = OutputProcessor(len(ask.prompt), message.sampling, detokenizer)
                said[rid] = Said()
                if ask.abort_after is not None:
                    aborts[rid] = ask.abort_after
                self.engine.add_request(message)
        for _ in range(MAX_STEPS):
            if not self.engine.has_requests:
                break
            self._step(said, processors, aborts)
        else:
            raise AssertionError("requests wait for ever")
        self._step(said, processors, aborts)
        if self.checks:
            self.engine.check_integrity()
        return said

    def _step(
        self, said: dict[RequestId, Said], processors: dict[RequestId, OutputProcessor], aborts: dict[RequestId, int]
    ) -> None:
        told_now = set[RequestId]()  # one call may return the outputs of two steps
        for output in self.engine.step():
            heard = said[output.request_id]
            if heard.finish is not None:
                is_late = output.request_id not in told_now and output.new_token_ids
                assert not is_late, "a token came after the engine was told of the end"
                continue
            is_last = heard.take(processors[output.request_id].process(output))
            if is_last and output.finish_reason is None:
                told_now.add(output.request_id)
                self.engine.stop(output.request_id)
            elif not is_last and len(heard.token_ids) >= aborts.get(output.request_id, MAX_STEPS):
                self.engine.abort(output.request_id)
        self.num_calls += 1
        if self.checks and self.num_calls % 3 == 0:
            self.engine.check_integrity()

    def compare(self, asks: Sequence[Ask], script: Script, salt: str | None = None) -> tuple[int, int]:
        """Answer with drafts and without, and compare; return the steps of both. Aborted answers must begin equally."""
        before = self.steps
        plain = self.run(asks, salt=salt)
        between = self.steps
        self.drafter.answers = {rid: said.token_ids for rid, said in plain.items()}
        drafted = self.run(asks, script, salt=salt)
        after = self.steps
        for rid, want in plain.items():
            got, ask = drafted[rid], asks[int(rid.partition(".")[0])]
            if ask.abort_after is None:
                assert got == want, f"{rid} of {ask}"
            else:
                most = min(len(got.token_ids), len(want.token_ids))
                assert most >= min(ask.abort_after, len(want.token_ids))
                assert got.token_ids[:most] == want.token_ids[:most], f"{rid} of {ask}"
                assert got.logprobs[:most] == want.logprobs[:most], f"{rid} of {ask}"
        return between - before, after - between
