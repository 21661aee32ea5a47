"""Input processor: turn a client's request into a request that the engine can run, or refuse it with the numbers.

The single entry for the server, batches and offline use: it tokenizes the prompt, finds the adapter's layout, fills in
defaults and refuses requests that can never fit. Any thread may call `process`: what it reads does not change while
serving, except the tier in which an adapter was found, which may be slightly out of date when it is used.
"""

import secrets
from array import array
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, Protocol

from adapter_store.spec import AdapterKey
from lorasrv.engine.draft_rules import NOTHING_DRAFTS, DraftRules, restrict
from lorasrv.engine.poison_requests import PoisonGuard
from lorasrv.engine.pool_fit import PoolFit
from lorasrv.errors import InvalidRequest
from lorasrv.kv_policy import KvPolicy
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.outputs import RequestId, slowest
from lorasrv.request import NO_OPTIONS, AdapterTerm, EngineCoreRequest, OnCold, RequestOptions, TokenConstraint
from lorasrv.sampling_params import (
    MAX_LOGPROBS,
    BeamOptions,
    SamplingParams,
    Watermark,
    check_constrained,
    check_token_ids,
)
from lorasrv.text.bad_words import bad_word_ids
from lorasrv.text.own_tokenizers import OwnTokenizers
from lorasrv.text.tokenizer import Tokenizer, check_could_fit
from sgmv_kernels.formats.adapter_panels import AdapterLayout

MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86400.0
MAX_BEAM_STOPS = 8
_CHANGED = frozenset({"adapter_id", "speculation"})
_PASSED_ON = tuple(option.name for option in fields(RequestOptions) if option.name not in _CHANGED)


class AdapterFacts(Protocol):
    """Provide facts about stored adapters; implemented by `HostAdapterStore`."""

    @property
    def max_host_bytes(self) -> int: ...

    def hold(self, key: AdapterKey, /) -> object: ...

    def terms(self, key: AdapterKey, /) -> Sequence[tuple[AdapterKey, float]]: ...

    def layout(self, key: AdapterKey, /) -> AdapterLayout: ...

    def num_draft_heads(self, key: AdapterKey, /) -> int: ...

    def vocab_size(self, key: AdapterKey, /) -> int: ...

    def invocation_tokens(self, key: AdapterKey, /) -> tuple[int, ...]: ...


class InputProcessor:
    """Process the requests of one engine.

    Args:
        memory: accounts of the pool, to refuse what can never fit.
        source: the stored adapters; None serves the base only.
        max_model_len: tokens of prompt and answer together.
        vocab_size: token ids must be below it.
        tokenizer: None takes prompts as token ids only.
        own_tokenizers: tokenizers of adapters with tokens of their own; None: there are no such adapters.
        eos_token_ids: tokens that end an answer unless they are ignored.
        watermark: options of requests with `watermark: true`.
        poison: refuses requests that have made the engine fail repeatedly.
        drafts: rules for the server's drafters.
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
        drafts: DraftRules = NOTHING_DRAFTS,
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
        self._drafts = drafts
        self._fit = PoolFit(memory, max_model_len)
        self._step_tokens, self._why_no_policy = step_tokens, why_no_policy

    def process(
        self,
        request_id: RequestId,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
    ) -> EngineCoreRequest:
        """Return the message for `EngineCore.add_request`.

        The adapter's content stays in the store until the request has ended.

        Args:
            prompt: text, or token ids, which are used unchanged.
            sampling: `max_tokens` None takes the rest of the context or of the pool; a random request gets a seed.

        Raises:
            InvalidRequest: the prompt is empty, it or a field names a token that does not exist, the adapter fits
                nowhere, priority, timeout or min_tokens are out of range, sampling contradicts the constraint or the
                beams, or the policy cannot be followed.
            ContextLengthExceeded: the request can never fit.
            AdapterError: the adapter is not in the store any more, or damaged.
            PoisonRequest: requests like it have made the engine fail.
        """
        _check_order(options.priority, options.timeout_s)
        if options.constraint is not None and options.constraint.ends_answer:
            check_constrained(sampling)
        stored = self._stored(options.adapter_key)
        words = self._words(options.adapter_key, stored.vocab_size)
        _check_on_cold(options.on_cold, words)
        token_ids = self._prompt_token_ids(prompt, words)
        check_token_ids(sampling, words.vocab_size)
        if options.beams is not None:
            sampling = beam_sampling(sampling, options.constraint)
            self._check_offers(sampling, options.beams)
        if options.kv_policy is not None:
            options = replace(options, kv_policy=self._placed(options.kv_policy, sampling, options.beams))
        max_tokens = self._max_tokens(len(token_ids), sampling.max_tokens, options, stored.terms)
        _check_resumed(options.resumed_token_ids, max_tokens, words.vocab_size)
        if stored.invocation_tokens:
            # The base computes the persona's beginning, and a snapshot belongs to one adapter.
            options = replace(options, prefix=None)
        request = self._message(request_id, token_ids, sampling, max_tokens, options, stored, words)
        self._poison.check(request)
        return request

    def process_choices(
        self,
        request_ids: Sequence[RequestId],
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[EngineCoreRequest]:
        """Return the messages of several answers to one prompt.

        Raises:
            LorasrvError, AdapterError: as `process`.
        """
        first = self.process(request_ids[0], prompt, sampling, options)
        return [first, *further_choices(first, request_ids[1:])]

    def layout(self, adapter: AdapterKey) -> AdapterLayout:
        """Return how an adapter lies in the pool. May read a file's header.

        Raises:
            InvalidRequest: the engine has no store, or host memory or pool are too small for the adapter.
        """
        source = self._require_source()
        layout = source.layout(adapter)
        if layout.nbytes > source.max_host_bytes:
            raise InvalidRequest(
                f"the adapter takes {layout.nbytes} bytes, but host memory for adapters is "
                f"{source.max_host_bytes}; start the server with a larger --host-cache-bytes",
                param="adapter_id",
            )
        self._fit.check_adapter([layout])
        return layout

    def _require_source(self) -> AdapterFacts:
        if self._source is None:
            raise InvalidRequest("this engine has no store of adapters", param="adapter_id")
        return self._source

    def _stored(self, adapter: AdapterKey | None) -> "_StoredAdapter":
        """Return what a request needs to know about an adapter or a sum of adapters. May read headers of files.

        Raises:
            InvalidRequest, AdapterError: as `layout`.
            NotComposable: the sum cannot be served.
        """
        if adapter is None:
            return _BASE
        source = self._require_source()
        hold = source.hold(adapter)
        terms = tuple(AdapterTerm(key, weight, self.layout(key)) for key, weight in source.terms(adapter))
        self._fit.check_adapter([term.layout for term in terms])
        facts = source.vocab_size(adapter), source.num_draft_heads(adapter), source.invocation_tokens(adapter)
        return _StoredAdapter(hold, terms, *facts)

    def _words(self, adapter: AdapterKey | None, size: int) -> "_Words":
        """Return a request's vocabulary of `size` tokens; 0: as many as the base has. May build a tokenizer."""
        own = self._own_tokenizers.of(adapter) if self._own_tokenizers is not None else None
        return _Words(own or self._tokenizer, size or self._vocab_size, is_own=own is not None or size > 0)

    def _prompt_token_ids(self, prompt: str | Sequence[int], words: "_Words") -> tuple[int, ...]:
        if isinstance(prompt, str):
            assert words.tokenizer is not None, "prompts are token ids here"
            check_could_fit([prompt], words.tokenizer, self._max_model_len)
            prompt = words.tokenizer.encode(prompt, add_special_tokens=True)
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not 0 <= min(prompt) <= max(prompt) < words.vocab_size:
            raise InvalidRequest(f"token ids must lie in [0, {words.vocab_size})", param="prompt")
        return tuple(prompt)

    def _prediction_token_ids(self, text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
        if not text:
            return ()
        assert tokenizer is not None, "predictions are texts"
        check_could_fit([text], tokenizer, self._max_model_len, param="prediction")
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def _max_tokens(
        self, num_prompt: int, asked: int | None, options: RequestOptions, terms: Sequence[AdapterTerm]
    ) -> int:
        """Return how many tokens an answer may have: as many as requested, or as many as there is room for.

        Raises:
            ContextLengthExceeded: there is no room for them beside the prompt.
        """
        layouts = [term.layout for term in terms]
        width = 1 if options.beams is None else options.beams.width
        max_tokens = asked or self._fit.max_new_tokens(num_prompt, layouts, width, options.kv_policy)
        self._fit.check(num_prompt, max_tokens, layouts, width, options.kv_policy)
        return max_tokens

    def _message(
        self,
        request_id: RequestId,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        options: RequestOptions,
        stored: "_StoredAdapter",
        words: "_Words",
    ) -> EngineCoreRequest:
        tier, speculation, has_own_tokens = self._memory.adapter_manager.tier, options.speculation, words.is_own
        num_heads = max(stored.num_draft_heads, self._drafts.num_draft_heads)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=self._completed(sampling, max_tokens, words),
            terms=stored.terms,
            found=slowest(tier(term.key) for term in stored.terms) if stored.terms else None,
            hold=stored.hold,
            adapter_id=options.adapter_id or (options.adapter_key or ""),
            speculation=restrict(speculation, options.kv_policy, has_own_tokens=has_own_tokens),
            prediction_token_ids=self._prediction_token_ids(speculation.prediction, words.tokenizer),
            num_draft_heads=num_heads,
            has_draft_heads=stored.num_draft_heads > 0,
            vocab_size=0 if words.vocab_size == self._vocab_size else words.vocab_size,
            active_from=_active_from(token_ids, stored.invocation_tokens, words.tokenizer),
            accept=self._drafts.accept(sampling, options.constraint),
            not_drafted=self._drafts.why_not_drafted(
                speculation, num_heads, options.beams, options.kv_policy, has_own_tokens=has_own_tokens
            ),
            **{name: getattr(options, name) for name in _PASSED_ON},
        )

    def _completed(self, sampling: SamplingParams, max_tokens: int, words: "_Words") -> SamplingParams:
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
            known["end_token_ids"] = tuple(dict.fromkeys(end for end in ends if end < words.vocab_size))
        if sampling.bad_words:
            if words.tokenizer is None:
                raise InvalidRequest("{param} needs a tokenizer, and this engine has none", param="bad_words")
            known["bad_word_ids"] = bad_word_ids(sampling.bad_words, words.tokenizer, words.vocab_size)
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


def further_choices(first: EngineCoreRequest, request_ids: Sequence[RequestId]) -> list[EngineCoreRequest]:
    """Return further answers to the same prompt, each from the next seed, on the first one's pages.

    Only the first answer has logprobs of the prompt.
    """
    sampling = first.sampling
    if sampling.prompt_logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=None)
    seed = sampling.seed
    return [
        replace(
            first,
            request_id=request_id,
            sampling=sampling if seed is None else replace(sampling, seed=(seed + number) % 2**64),
            fork_of=first.request_id,
        )
        for number, request_id in enumerate(request_ids, 1)
    ]


class _StoredAdapter(NamedTuple):
    """Hold what the store knows of a request's adapter."""

    # Keeps its content in the store.
    hold: object
    # Adapters that must be in the pool for it.
    terms: tuple[AdapterTerm, ...]
    # Number of its tokens; 0 if as many as the base.
    vocab_size: int
    num_draft_heads: int
    # Tokens after which it acts, if it is an aLoRA.
    invocation_tokens: tuple[int, ...]


_BASE = _StoredAdapter(None, (), 0, 0, ())


class _Words(NamedTuple):
    """Describe the vocabulary of a request."""

    tokenizer: Tokenizer | None
    vocab_size: int
    # Whether it is an adapter's vocabulary, not the base's.
    is_own: bool


def _active_from(prompt: tuple[int, ...], invocation: tuple[int, ...], tokenizer: Tokenizer | None) -> int:
    """Return where the last invocation tokens begin in a prompt, as PEFT's `calculate_alora_offsets` finds them; 0 for
    an adapter without such tokens.

    Raises:
        InvalidRequest: the prompt does not have them, so PEFT would answer with the base.
    """
    if not invocation:
        return 0
    places, wanted = array("i", prompt), array("i", invocation)
    text, part, size = places.tobytes(), wanted.tobytes(), places.itemsize
    at = text.rfind(part)
    while at > 0 and at % size:
        at = text.rfind(part, 0, at + len(part) - 1)
    if at >= 0:
        return at // size
    shown = f" ({tokenizer.decode(invocation, skip_special_tokens=False)!r})" if tokenizer is not None else ""
    raise InvalidRequest(
        f"the prompt does not have the adapter's invocation tokens {list(invocation)}{shown}; without them it has no "
        "effect. End the prompt with them",
        param="prompt",
    )


def _check_on_cold(on_cold: OnCold, words: _Words) -> None:
    if on_cold is OnCold.FALLBACK_BASE and words.is_own:
        raise InvalidRequest("{param} is not possible: the adapter has other tokens than the base", param="on_cold")


def _check_resumed(token_ids: tuple[int, ...], max_tokens: int, vocab_size: int) -> None:
    """Check that an answer can continue after these tokens."""
    if not all(0 <= token < vocab_size for token in token_ids):
        raise InvalidRequest(f"{{param}} must lie in [0, {vocab_size})", param="resumed_token_ids")
    if len(token_ids) >= max_tokens:
        raise InvalidRequest(f"{{param}} has all {max_tokens} tokens of the answer", param="resumed_token_ids")


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
        other = "a grammar" if constraint.ends_answer else "thinking_token_budget"
        raise InvalidRequest(
            f"use_beam_search cannot be combined with {other}; leave one of them out", param="use_beam_search"
        )
    if len(sampling.stop_token_ids) > MAX_BEAM_STOPS:
        raise InvalidRequest(f"beam search takes at most {MAX_BEAM_STOPS} stop_token_ids", param="stop_token_ids")
    return replace(sampling, temperature=0.0, logprobs=MAX_LOGPROBS)


def _check_order(priority: int, timeout_s: float | None) -> None:
    if abs(priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}", param="timeout_s")
