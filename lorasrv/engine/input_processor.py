"""Input processor: turn a client's request into a request that the engine can run, or refuse it with the numbers.

The single entry for the server, batches and offline use: a prompt becomes tokens, an adapter its layout, fields get
their defaults, and requests that can never fit are refused. Any thread may call `process`: what it reads does not
change while serving, except the tier in which an adapter was found, which is a moment old when it is used.

A layout that is not known yet is read from a file's header, which may be slow or never end. This has its own threads,
so that requests for other adapters do not wait with it.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

from adapter_store.spec import AdapterKey
from lorasrv.engine.poison_requests import PoisonGuard
from lorasrv.errors import ContextLengthExceeded, InvalidRequest, RequestTimeout
from lorasrv.kv_policy import KvPolicy
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.outputs import AdapterTier, RequestId, slowest
from lorasrv.request import AdapterTerm, EngineCoreRequest, FixedPrefix, OnCold, Peer, TokenConstraint
from lorasrv.sampling_params import (
    MAX_LOGPROBS,
    PLAIN_TEXT,
    BeamOptions,
    SamplingParams,
    TextOptions,
    Watermark,
    check_token_ids,
)
from lorasrv.speculation_params import (
    ANY_SPECULATION,
    LONG_SIGHTED_DRAFTERS,
    MODEL_DRAFTERS,
    REJECTION,
    SAME_DRAW,
    SpeculationParams,
)
from lorasrv.text.own_tokenizers import OwnTokenizers
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.disk_threads import DiskReadStats, DiskThreads
from sgmv_kernels.formats.adapter_panels import AdapterLayout

MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86400.0
MAX_BEAM_STOPS = 8
SOME_TOKEN_CHARS = 8
NUM_READERS = 8
LEAST_S = 1e-3
"""Least time that is left to a request after processing; the engine then reports the timeout."""


class RequestOptions(TypedDict, total=False):
    """Options of a request beside its prompt and sampling; `adapter` None is the base."""

    adapter: AdapterKey | None
    principal: str
    on_cold: OnCold
    cache_salt: str
    adapter_id: str
    charged_key: AdapterKey | None
    priority: int
    timeout_s: float | None
    constraint: TokenConstraint | None
    text: TextOptions
    beams: BeamOptions | None
    speculation: SpeculationParams
    kv_policy: KvPolicy | None
    prefix: FixedPrefix | None
    resumed_token_ids: tuple[int, ...]
    peer: Peer | None
    is_for_peer: bool


class AdapterFacts(Protocol):
    """Provide facts about stored adapters; implemented by `HostAdapterStore`."""

    @property
    def max_host_bytes(self) -> int: ...

    def hold(self, key: AdapterKey, /) -> object: ...

    def terms(self, key: AdapterKey, /) -> Sequence[tuple[AdapterKey, float]]: ...

    def layout(self, key: AdapterKey, /) -> AdapterLayout: ...

    def knows_layout(self, key: AdapterKey) -> bool: ...

    def num_draft_heads(self, key: AdapterKey, /) -> int: ...

    def vocab_size(self, key: AdapterKey, /) -> int: ...

    def is_on_host(self, key: AdapterKey) -> bool: ...


class InputProcessor:
    """Process the requests of one engine.

    Args:
        memory: accounts of the pool, to refuse what can never fit.
        source: the stored adapters; None serves the base only.
        max_model_len: tokens of prompt and answer together.
        vocab_size: token ids must be below it.
        tokenizer: None takes prompts as token ids only.
        own_tokenizers: those of adapters with tokens of their own; None: there are no such adapters.
        eos_token_ids: tokens that end an answer unless they are ignored.
        watermark: options of requests with `watermark: true`.
        poison: refuses requests that have made the engine fail repeatedly.
        queue_timeout_s: the server's bound on the time until the first step; None sets none.
        load_timeout_s: longest time for reading a header; None sets none.
        step_tokens: tokens of the largest step.
        why_no_policy: why the model takes no `kv_policy`; None if it does.
    """

    def __init__(
        self,
        memory: MemoryManager,
        source: AdapterFacts | None,
        max_model_len: int,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        *,
        own_tokenizers: OwnTokenizers | None = None,
        eos_token_ids: Collection[int] = (),
        watermark: Watermark | None = None,
        poison: PoisonGuard | None = None,
        queue_timeout_s: float | None = None,
        load_timeout_s: float | None = None,
        may_reject: bool = False,
        num_draft_heads: int = 0,
        drafters: Collection[str] = (),
        step_tokens: int = 1,
        why_no_policy: str | None = None,
    ) -> None:
        self._memory = memory
        self._source = source
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._tokenizer, self._own_tokenizers = tokenizer, own_tokenizers
        self._eos = tuple(sorted(token for token in eos_token_ids if token < vocab_size))
        self._watermark = watermark or Watermark()
        self._poison = poison or PoisonGuard()
        self._queue_timeout_s = queue_timeout_s
        self._may_reject = may_reject
        self._num_draft_heads = num_draft_heads
        self._drafters = frozenset(drafters)
        self._step_tokens, self._why_no_policy = step_tokens, why_no_policy
        # Starts threads on first use: never offline.
        self._readers = DiskThreads(NUM_READERS, "lorasrv-header", load_timeout_s)

    def process(
        self,
        request_id: RequestId,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        adapter: AdapterKey | None = None,
        *,
        principal: str = "anonymous",
        on_cold: OnCold = OnCold.WAIT,
        cache_salt: str = "",
        adapter_id: str = "",
        charged_key: AdapterKey | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        constraint: TokenConstraint | None = None,
        text: TextOptions = PLAIN_TEXT,
        beams: BeamOptions | None = None,
        speculation: SpeculationParams = ANY_SPECULATION,
        kv_policy: KvPolicy | None = None,
        prefix: FixedPrefix | None = None,
        resumed_token_ids: tuple[int, ...] = (),
        peer: Peer | None = None,
        is_for_peer: bool = False,
    ) -> EngineCoreRequest:
        """Return the message for `EngineCore.add_request`.

        The adapter's content stays in the store until the request has ended.

        Args:
            prompt: text, or token ids as they are.
            sampling: `max_tokens` None takes the rest of the context or of the pool; a random request gets a seed.
            resumed_token_ids: first tokens of the answer, from an engine of the same fingerprint.

        Raises:
            InvalidRequest: the prompt is empty, it or a field names a token that does not exist, the adapter fits
                nowhere, priority, timeout or min_tokens are out of range, sampling contradicts the constraint or the
                beams, or the policy cannot be followed.
            ContextLengthExceeded: the request can never fit.
            AdapterError: the adapter is not in the store any more, or damaged.
            PoisonRequest: requests like it have made the engine fail.
        """
        _check_order(priority, timeout_s)
        if constraint is not None:
            _check_constrained(sampling)
        hold = self._source.hold(adapter) if self._source is not None and adapter is not None else None
        terms = self._terms(adapter)
        words = self._words(adapter)
        _check_on_cold(on_cold, words)
        token_ids = self._prompt_token_ids(prompt, words)
        check_token_ids(sampling, words.vocab_size)
        if beams is not None:
            sampling = beam_sampling(sampling, constraint)
            self._check_offers(sampling, beams)
        own_heads = self._source.num_draft_heads(adapter) if self._source is not None and adapter is not None else 0
        if kv_policy is not None:
            kv_policy = self._placed(kv_policy, sampling, beams)
        width = 1 if beams is None else beams.width
        max_tokens = sampling.max_tokens or self._max_new_tokens(len(token_ids), terms, width, kv_policy)
        self._check_fits(len(token_ids), max_tokens, terms, width, kv_policy)
        _check_resumed(resumed_token_ids, max_tokens, words.vocab_size)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=self._completed(sampling, max_tokens),
            adapter_key=adapter,
            terms=terms,
            found=slowest(self.tier(term.key) for term in terms) if terms else None,
            principal=principal,
            on_cold=on_cold,
            cache_salt=cache_salt,
            prefix=prefix,
            adapter_id=adapter_id or (adapter or ""),
            charged_key=charged_key,
            priority=priority,
            timeout_s=timeout_s,
            hold=hold,
            constraint=constraint,
            # With a grammar the text must be exactly that of the tokens.
            text=text if constraint is None else replace(text, strip_start=False),
            beams=beams,
            speculation=_drafting(speculation, kv_policy, words),
            prediction_token_ids=self._prediction_token_ids(speculation.prediction, words.tokenizer),
            num_draft_heads=max(own_heads, self._num_draft_heads),
            has_draft_heads=own_heads > 0,
            vocab_size=0 if words.vocab_size == self._vocab_size else words.vocab_size,
            accept=self._accept(sampling, constraint),
            not_drafted=self._why_not_drafted(
                speculation, max(own_heads, self._num_draft_heads), beams, kv_policy, words
            ),
            kv_policy=kv_policy,
            resumed_token_ids=resumed_token_ids,
            peer=peer,
            is_for_peer=is_for_peer,
        )
        self._poison.check(request)
        return request

    def process_choices(
        self,
        request_ids: Sequence[RequestId],
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> list[EngineCoreRequest]:
        """Return the messages of several answers to one prompt.

        Raises:
            LorasrvError, AdapterError: as `process`.
        """
        first = self.process(request_ids[0], prompt, sampling, **options)
        return [first, *further_choices(first, request_ids[1:])]

    async def process_in_thread(
        self,
        request_ids: Sequence[RequestId],
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> list[EngineCoreRequest]:
        """Run `process_choices` outside the event loop.

        Raises:
            RequestTimeout: the adapter's header was not read within the request's time.
            AdapterLoadTimeout: the disk did not return the header in time.
            LorasrvError, AdapterError: as `process`.
        """
        adapter = options.get("adapter")
        work = partial(self.process_choices, request_ids, prompt, sampling, **options)
        if adapter is None or self._source is None or self._source.knows_layout(adapter):
            return await asyncio.to_thread(work)
        reading = asyncio.wrap_future(self._readers.submit(adapter, work))
        return await self._in_time(reading, options.get("timeout_s"))

    async def read_layout(self, adapter: AdapterKey) -> AdapterLayout:
        """Run `layout` outside the event loop.

        Raises:
            AdapterLoadTimeout: the disk did not return the header in time.
            InvalidRequest, AdapterError: as `layout`.
        """
        return await asyncio.wrap_future(self._readers.submit(adapter, partial(self.layout, adapter)))

    def read_stats(self) -> DiskReadStats:
        """Return the counts of header reads that were given up."""
        return self._readers.stats()

    def close(self) -> None:
        """Accept no more requests; do not wait for those that read a header."""
        self._readers.close(wait_s=0.0)

    def layout(self, adapter: AdapterKey) -> AdapterLayout:
        """Return how an adapter lies in the pool. May read a file's header.

        Raises:
            InvalidRequest: the engine has no store, or host memory or pool are too small for the adapter.
        """
        if self._source is None:
            raise InvalidRequest("this engine has no store of adapters", param="adapter_id")
        layout = self._source.layout(adapter)
        if layout.nbytes > self._source.max_host_bytes:
            raise InvalidRequest(
                f"the adapter takes {layout.nbytes} bytes, but host memory for adapters is "
                f"{self._source.max_host_bytes}; start the server with a larger --host-cache-bytes",
                param="adapter_id",
            )
        self._check_room([layout])
        return layout

    def _terms(self, adapter: AdapterKey | None) -> tuple[AdapterTerm, ...]:
        """Return what has to be in the pool for an adapter, or a sum of several. May read headers of files.

        Raises:
            InvalidRequest, AdapterError: as `layout`.
            NotComposable: the sum cannot be served.
        """
        if adapter is None:
            return ()
        parts = ((adapter, 1.0),) if self._source is None else self._source.terms(adapter)
        terms = tuple(AdapterTerm(key, weight, self.layout(key)) for key, weight in parts)
        self._check_room([term.layout for term in terms])
        return terms

    def _check_room(self, layouts: Sequence[AdapterLayout]) -> None:
        pages, room = sum(map(self._memory.adapters.pages_for, layouts)), self._memory.adapter_pool.num_pages
        if pages > room:
            raise InvalidRequest(
                f"the adapter takes {pages} pages, but the pool has {room} for adapters; "
                "start the server with a larger --pool-bytes",
                param="adapter_id",
            )

    async def _in_time(
        self, reading: Awaitable[list[EngineCoreRequest]], timeout_s: float | None
    ) -> list[EngineCoreRequest]:
        """Return the messages with the rest of their time as timeout. `process` refuses a `timeout_s` out of range."""
        own_s = timeout_s if timeout_s is not None and 0 < timeout_s <= MAX_TIMEOUT_S else None
        limits = (("timeout_s,", own_s), ("the server's queue timeout of", self._queue_timeout_s))
        bounds = [(seconds, name) for name, seconds in limits if seconds is not None]
        most_s, name = min(bounds, default=(None, ""))
        began_s = time.monotonic()
        try:
            requests = await asyncio.wait_for(reading, most_s)
        except TimeoutError:
            raise RequestTimeout(f"reading the adapter's header took longer than {name} {most_s:g} s") from None
        if own_s is None:
            return requests
        left_s = max(LEAST_S, own_s - (time.monotonic() - began_s))
        return [replace(request, timeout_s=left_s) for request in requests]

    def _words(self, adapter: AdapterKey | None) -> "_Words":
        """Return what a request's tokens are. May read a file's header, and build a tokenizer."""
        own = self._own_tokenizers.of(adapter) if self._own_tokenizers is not None else None
        size = self._source.vocab_size(adapter) if self._source is not None and adapter is not None else 0
        return _Words(own or self._tokenizer, size or self._vocab_size, is_own=own is not None or size > 0)

    def _prompt_token_ids(self, prompt: str | Sequence[int], words: "_Words") -> tuple[int, ...]:
        if isinstance(prompt, str):
            assert words.tokenizer is not None, "prompts are token ids here"
            check_could_fit([prompt], words.tokenizer, self._max_model_len)
            prompt = words.tokenizer.encode(prompt, add_special_tokens=True)
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not all(0 <= token < words.vocab_size for token in prompt):
            raise InvalidRequest(f"token ids must lie in [0, {words.vocab_size})", param="prompt")
        return tuple(prompt)

    def _prediction_token_ids(self, text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        if not text:
            return ()
        assert tokenizer is not None, "predictions are texts"
        check_could_fit([text], tokenizer, self._max_model_len, param="prediction")
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def _accept(self, sampling: SamplingParams, constraint: TokenConstraint | None) -> str | None:
        """Return how drafts of a request are accepted: with a seed its text depends on nothing else, and a grammar
        would cut its drafts where they are wrong."""
        if not self._may_reject:
            return None
        return SAME_DRAW if sampling.is_greedy or sampling.seed is not None or constraint is not None else REJECTION

    def _why_not_drafted(
        self,
        speculation: SpeculationParams,
        num_heads: int,
        beams: BeamOptions | None,
        policy: KvPolicy | None,
        words: "_Words",
    ) -> str | None:
        if not speculation.max_draft:
            return None
        if beams is not None:
            return "beam search"
        if policy is not None and not policy.may_draft:
            return f"kv_policy {policy.kind}"
        there = self._drafters if num_heads else self._drafters - {"medusa"}
        there = there if policy is None else there - LONG_SIGHTED_DRAFTERS
        there = there.difference(MODEL_DRAFTERS) if words.is_own else there
        asked = speculation.drafters or ({"prediction"} if speculation.prediction else set())
        return "no such drafter" if asked and not asked & there else None

    def _completed(self, sampling: SamplingParams, max_tokens: int) -> SamplingParams:
        """Return sampling with the values that only the server knows."""
        if sampling.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, but there is room for {max_tokens} tokens; lower it",
                param="min_tokens",
            )
        known: dict[str, Any] = {}
        if sampling.seed is None and not sampling.is_greedy:
            known["seed"] = secrets.randbits(63)
        if sampling.min_tokens:
            ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos))
            known["end_token_ids"] = tuple(dict.fromkeys(ends))
        if sampling.watermark is True:
            known["watermark"] = self._watermark
        return replace(sampling, **known) if known else sampling

    def _check_offers(self, sampling: SamplingParams, beams: BeamOptions) -> None:
        """Check that every beam can offer tokens that continue the answer beside those that end it."""
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos)}
        most = min(MAX_LOGPROBS, self._vocab_size)
        if beams.width + len(ends) > most:
            raise InvalidRequest(
                f"best_of is {beams.width}, but with {len(ends)} tokens that end an answer at most "
                f"{max(0, most - len(ends))} beams are possible; lower best_of, or send fewer stop_token_ids",
                param="best_of",
            )

    def _placed(self, policy: KvPolicy, sampling: SamplingParams, beams: BeamOptions | None) -> KvPolicy:
        """Return a policy in whole pages."""
        if self._why_no_policy is not None:
            raise InvalidRequest(f"{{param}} is not possible: {self._why_no_policy}; leave it out", param="kv_policy")
        if beams is not None:
            raise InvalidRequest("{param} does not go with beam search; leave one of them out", param="kv_policy")
        if sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                "{param} does not go with log-probabilities of the prompt; leave one of them out", param="kv_policy"
            )
        return policy.placed(self._memory.kv.page_size, self._step_tokens)

    def tier(self, adapter: AdapterKey) -> AdapterTier:
        """Return where an adapter is; the answer may be outdated at once."""
        if self._memory.adapter_manager.is_resident(adapter):
            return AdapterTier.RESIDENT
        on_host = self._source is not None and self._source.is_on_host(adapter)
        return AdapterTier.HOST if on_host else AdapterTier.DISK

    def _max_new_tokens(
        self, num_prompt_tokens: int, terms: Sequence[AdapterTerm], width: int, policy: KvPolicy | None
    ) -> int:
        """Return the rest of the context, or of the pool if that is smaller; at least one."""
        room = self._max_kv_pages(terms) // width * self._memory.kv.page_size
        if policy is not None and policy.most_tokens(num_prompt_tokens, self._max_model_len) <= room:
            room = self._max_model_len
        return max(1, min(self._max_model_len, room) - num_prompt_tokens)

    def _max_kv_pages(self, terms: Sequence[AdapterTerm]) -> int:
        return self._memory.max_kv_pages(term.layout for term in terms)

    def _check_fits(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        terms: Sequence[AdapterTerm],
        width: int,
        policy: KvPolicy | None,
    ) -> None:
        total = num_prompt_tokens + max_tokens
        if total > self._max_model_len:
            is_prompt = num_prompt_tokens >= self._max_model_len
            param, hint = ("prompt", "; shorten {param}") if is_prompt else ("max_tokens", " ({param})")
            raise ContextLengthExceeded(
                f"the context holds {self._max_model_len} tokens, but the request asks for {total}: "
                f"{num_prompt_tokens} of the prompt and {max_tokens} to generate{hint}",
                param=param,
            )
        total = total if policy is None else policy.most_tokens(num_prompt_tokens, total)
        kv_pages, most = width * self._memory.kv.pages_for(total), self._max_kv_pages(terms)
        if kv_pages > most:
            of_adapter = self._memory.kv_pool.num_pages - most
            raise ContextLengthExceeded(
                f"the pool has {self._memory.kv_pool.num_pages} pages, but the request needs {kv_pages + of_adapter}: "
                f"{kv_pages} for {width * total} tokens and {of_adapter} for the adapter; lower {{param}} "
                "or start the server with a larger --pool-bytes",
                param="max_tokens",
            )


def further_choices(first: EngineCoreRequest, request_ids: Sequence[RequestId]) -> list[EngineCoreRequest]:
    """Return further answers to the same prompt, each from the next seed, on the first one's pages.

    Probabilities of the prompt come with the first one alone.
    """
    seed, sampling = first.sampling.seed, replace(first.sampling, prompt_logprobs=None)
    return [
        replace(
            first,
            request_id=request_id,
            sampling=sampling if seed is None else replace(sampling, seed=(seed + number) % 2**64),
            fork_of=first.request_id,
        )
        for number, request_id in enumerate(request_ids, 1)
    ]


class _Words(NamedTuple):
    """Say what a request's tokens are."""

    tokenizer: Tokenizer | None
    vocab_size: int
    # Whether they are an adapter's, and not just the base's.
    is_own: bool


def _check_on_cold(on_cold: OnCold, words: _Words) -> None:
    if on_cold is OnCold.FALLBACK_BASE and words.is_own:
        raise InvalidRequest("{param} is not possible: the adapter has tokens that the base lacks", param="on_cold")


def _check_resumed(token_ids: tuple[int, ...], max_tokens: int, vocab_size: int) -> None:
    """Check that an answer can go on behind these tokens."""
    if not all(0 <= token < vocab_size for token in token_ids):
        raise InvalidRequest(f"{{param}} must lie in [0, {vocab_size})", param="resumed_token_ids")
    if len(token_ids) >= max_tokens:
        raise InvalidRequest(f"{{param}} has all {max_tokens} tokens of the answer", param="resumed_token_ids")


def _drafting(speculation: SpeculationParams, policy: KvPolicy | None, words: _Words) -> SpeculationParams:
    """Return what a policy leaves of the options, and tokens that models do not know."""
    speculation = speculation.without(frozenset(MODEL_DRAFTERS)) if words.is_own else speculation
    if policy is None:
        return speculation
    return speculation.without(LONG_SIGHTED_DRAFTERS) if policy.may_draft else replace(speculation, max_draft=0)


def check_could_fit(texts: Sequence[str], tokenizer: Tokenizer, max_model_len: int, param: str = "prompt") -> None:
    """Check texts by their length alone, before they are tokenized.

    Raises:
        ContextLengthExceeded: no tokenization of them fits the context.
    """
    # Every vocabulary has a token of this length: most texts pass without a closer look.
    if sum(map(len, texts)) <= SOME_TOKEN_CHARS * max_model_len:
        return
    least = sum(map(tokenizer.least_tokens, texts))
    if least > max_model_len:
        raise ContextLengthExceeded(
            f"the context holds {max_model_len} tokens, but the text has at least {least}", param=param
        )


def beam_sampling(sampling: SamplingParams, constraint: TokenConstraint | None) -> SamplingParams:
    """Return the sampling with which beams offer tokens: greedy, with log-probabilities.

    Raises:
        InvalidRequest: a field asks for random sampling or changes the scores; `param` names it.
    """
    free = ("max_tokens", "stop_token_ids", "ignore_eos", "temperature")
    for field in fields(sampling):
        if field.init and field.name not in free and getattr(sampling, field.name) != field.default:
            raise InvalidRequest(f"{field.name} does not go with beam search; leave it out", param=field.name)
    if sampling.temperature not in (0.0, 1.0):
        raise InvalidRequest("temperature does not go with beam search; leave it out", param="temperature")
    if constraint is not None:
        raise InvalidRequest(
            "use_beam_search cannot be combined with a grammar; leave one of them out", param="use_beam_search"
        )
    if len(sampling.stop_token_ids) > MAX_BEAM_STOPS:
        raise InvalidRequest(f"beam search takes at most {MAX_BEAM_STOPS} stop_token_ids", param="stop_token_ids")
    return replace(sampling, temperature=0.0, logprobs=MAX_LOGPROBS)


def _check_order(priority: int, timeout_s: float | None) -> None:
    if abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}", param="timeout_s")


def _check_constrained(sampling: SamplingParams) -> None:
    """Check that only the grammar decides where the answer ends."""
    if sampling.ignore_eos:
        raise InvalidRequest("{param} contradicts a grammar, which says where the answer ends", param="ignore_eos")
    if sampling.min_tokens:
        raise InvalidRequest("{param} contradicts a grammar, which says where the answer ends", param="min_tokens")
