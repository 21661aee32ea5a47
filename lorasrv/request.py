"""Request: its options, its state, and the constraint on its tokens, as plain data. No torch, no text, no HTTP.

Ids that never mix: a *reference* is what a client writes (`mia`, `mia@3`), an `AdapterKey` names one immutable content,
and only the adapter cache knows positions in the pool.

A `TokenConstraint` is a grammar as the engine sees it, compiled before admission, or a budget for reasoning, or both.
The choices of a request share it. Each follows it with its own `ConstraintState`, which only the engine thread uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from adapter_store.quota import ANONYMOUS
from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import SnapshotName
from lorasrv.kv_policy import MAX_TOKENS, KvPolicy
from lorasrv.outputs import (
    AdapterTier,
    EngineOutput,
    FinishReason,
    KvUsage,
    Refusal,
    RequestId,
    RequestTiming,
    TokenLogprobs,
)
from lorasrv.sampling_params import PLAIN_TEXT, BeamOptions, SamplingParams, TextOptions
from lorasrv.speculation_params import ANY_SPECULATION, SpeculationParams
from sgmv_kernels.formats.adapter_panels import AdapterLayout


class ConstraintState(Protocol):
    """Follow one answer through a constraint. No method raises."""

    @property
    def error(self) -> str | None:
        """Return why the constraint cannot be followed further; the request fails with it."""

    @property
    def is_over(self) -> bool:
        """Return whether only the end of the answer may follow."""

    @property
    def num_free(self) -> int:
        """Return how many of the next tokens, whatever they are, it surely does not limit."""

    @property
    def rest(self) -> "ConstraintState | None":
        """Return what limits the rest of the answer: this state, or what is left of it; None: nothing."""

    def advance(self, token_id: int) -> None:
        """Advance by a token that was allowed."""

    def forced(self) -> Sequence[int]:
        """Return the usual tokens of the text that must come next, if only one is possible; of a long text, the first
        ones."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first on, may come next in this order."""

    def copy(self) -> "ConstraintState":
        """Return an independent state at the same place, for looking ahead."""

    def allowed(self) -> npt.NDArray[np.int32] | None:
        """Return the bit mask of allowed next tokens; None: any.

        Returns:
            int32 [at most ceil(V / 32)]: bit t % 32 of word t // 32 says whether token t may come next; at least one
            may. The buffer is reused: read it before the next call.
        """


class TokenConstraint(Protocol):
    """Start the states of the answers that follow it."""

    @property
    def ends_answer(self) -> bool:
        """Return whether it says where the answer ends, as a grammar does."""

    def begin(self) -> ConstraintState:
        """Return the state before the first token of an answer."""


class RequestStatus(IntEnum):
    """Enumerate the states of a request, ordered so that "finished" is a comparison."""

    WAITING = 0
    WAITING_FOR_ADAPTER = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REFUSED = 8
    FINISHED_TIMEOUT = 9

    @property
    def is_finished(self) -> bool:
        """Return whether no token will follow."""
        return self >= RequestStatus.FINISHED_STOPPED


class AdapterTerm(NamedTuple):
    """Name a content that a request needs in the pool: its adapter, or one of a sum of adapters."""

    key: AdapterKey
    # Factor of its delta.
    weight: float
    layout: AdapterLayout


Account = tuple[str, AdapterKey | None]
"""(adapter id, content that it named); ("", None) is the base."""


class OnCold(StrEnum):
    """Choose what to do with a request whose adapter is not in the pool when it arrives."""

    WAIT = "wait"
    FALLBACK_BASE = "fallback_base"
    REJECT = "reject"


@dataclass(slots=True, eq=False)
class Request:
    """Hold one sequence: its tokens and how many are computed. Only the scheduler's room writes to it."""

    message: "EngineCoreRequest"
    arrival_s: float = 0.0
    # Id of the message; it stays the same when the message is replaced.
    request_id: RequestId = field(init=False)
    sampling: SamplingParams = field(init=False)
    num_prompt_tokens: int = field(init=False)
    adapter_key: AdapterKey | None = None
    # Adapters that it needs in the pool; () for the base.
    terms: tuple[AdapterTerm, ...] = ()
    # The keys of `terms`.
    term_keys: tuple[AdapterKey, ...] = ()
    # (content, weight) of each term, if it is a sum whose terms are separate in the pool.
    summed: tuple[tuple[AdapterKey, float], ...] = ()
    # Account that the ledger charges for its steps.
    account: Account = ("", None)
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    # Tokens with keys and values; catches up with `num_tokens`, without prefill and decode phases.
    num_computed_tokens: int = 0
    # Tokens after `num_computed_tokens` that submitted steps compute, whose results are not collected yet.
    num_in_flight_tokens: int = 0
    # Tokens that these steps will sample; later steps may compute them although they are not known yet.
    num_pending_tokens: int = 0
    # Prompt tokens found in the prefix cache on first admission.
    num_cached_tokens: int = 0
    # Places of the prompt tokens whose keys and values a peer has sent.
    peer_tokens: range = range(0)
    # Pages of computed tokens that are in host memory.
    num_swapped_pages: int = 0
    # Places in its table that had no page when it was swapped out.
    swapped_holes: frozenset[int] = frozenset()
    # Pages that its policy has dropped.
    num_dropped_pages: int = 0
    # Number of first tokens that see all tokens before them, as far as the selection of pages is concerned.
    num_full_rows: int = MAX_TOKENS
    # Attention paid to the page of each place by the rows that decide which pages are dropped.
    page_masses: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    # Steps that gave it tokens; draft tokens that these steps verified, and those that were right.
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # Number in the order of arrival; 0 before the request is queued.
    number: int = 0
    # Step in which it last had tokens, or arrived.
    last_share_step: int = 0
    # Number of generated tokens up to which it is not preempted for others.
    protected_until_tokens: int = 0
    # Whether it runs without a request slot, which `Fair` has given to another account.
    is_paused: bool = False
    # Tokens that it had generated when its last pause ended.
    resumed_at: int | None = None
    # Tokens served, as `Mlfq` counts them.
    service: float = 0.0
    # Predicted length of the answer at first admission.
    predicted_tokens: int | None = None
    # The same, updated when the answer outgrows it.
    planned_tokens: int = 0
    # Number of first tokens that are charged to its accounts already.
    num_charged_tokens: int = 0
    tier: AdapterTier | None = None
    fell_back: bool = False
    scheduled_s: float | None = None
    load_started_s: float | None = None
    load_s: float = 0.0
    stop_token_id: int | None = None
    error: str | None = None
    refusal: Refusal | None = None
    retry_after_s: float | None = None
    constraint_state: ConstraintState | None = None
    # Snapshot that it waits for while it is being restored; part of its lane's name.
    snapshot: SnapshotName | None = None
    # Those known so far, if requested; not computed again after a preemption.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    # Timing of its last output, reused until its status changes; under a policy every step changes it.
    told: RequestTiming | None = None

    def __post_init__(self) -> None:
        self.request_id, self.sampling = self.message.request_id, self.message.sampling
        self.num_prompt_tokens = len(self.message.prompt_token_ids)
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)
        self.token_ids = [*self.message.prompt_token_ids, *self.message.resumed_token_ids]
        self.adapter_key, self.terms = self.message.adapter_key, self.message.terms
        self.term_keys = tuple(term.key for term in self.terms)
        if self.adapter_key is not None:
            self.account = self.message.account
            if self.term_keys != (self.adapter_key,):
                self.summed = tuple((term.key, term.weight) for term in self.terms)
        assert (self.adapter_key is None) == (not self.terms), "an adapter's layout is known when it is asked for"
        if self.message.constraint is not None:
            self.constraint_state = self.message.constraint.begin()
        for token in self.message.resumed_token_ids:
            self.follow_constraint(token)

    @property
    def needs_text(self) -> bool:
        """Return whether choosing the token after its next one needs more than logits (the next one, as part of the
        text), or choosing a token returns more than the token."""
        is_plain = self.limit_of(2) is None and self.message.beams is None
        return not (is_plain and self.sampling.takes_logits_alone)

    def limit_of(self, num_next: int) -> ConstraintState | None:
        """Return what may limit any of the next `num_next` tokens after the pending ones; None: nothing does."""
        state = self.constraint_state
        return None if state is None or state.num_free >= self.num_pending_tokens + num_next else state

    def follow_constraint(self, token_id: int) -> None:
        """Advance the constraint by a token of the answer, and drop what limits nothing any more."""
        if self.constraint_state is not None:
            self.constraint_state.advance(token_id)
            self.constraint_state = self.constraint_state.rest

    def fall_back(self) -> None:
        """Continue with the base model in place of the adapter."""
        self.adapter_key, self.terms, self.term_keys, self.summed = None, (), (), ()
        self.account, self.fell_back = ("", None), True

    @property
    def home_key(self) -> AdapterKey | None:
        """Return the adapter whose eviction makes the request's cached pages useless; for a sum, its first term."""
        return self.term_keys[0] if self.term_keys else None

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and generated tokens known so far."""
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Return the number of known and of pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_scheduled_tokens(self) -> int:
        """Return how many tokens are computed, or will be when the steps in flight are done."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Return the number of generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    def num_seen(self, position: int) -> int:
        """Return how many tokens the token at `position` sees, including itself."""
        policy = self.message.kv_policy
        if policy is None:
            return position + 1
        return position + 1 - max(self.num_dropped_pages, len(policy.hole(position))) * policy.page_size

    @property
    def most_tokens(self) -> int:
        """Return the most tokens for which it holds pages at a time."""
        total, policy = self.num_prompt_tokens + self.message.max_tokens, self.message.kv_policy
        return total if policy is None else policy.most_tokens(self.num_prompt_tokens, total)

    @property
    def next_check(self) -> int:
        """Return after how many computed tokens its policy selects pages next; no step computes beyond that before."""
        policy = self.message.kv_policy
        return MAX_TOKENS if policy is None else policy.next_check(self.num_prompt_tokens, self.num_computed_tokens)

    @property
    def may_run_ahead(self) -> bool:
        """Return whether the next token may be computed while it is still unknown: choosing tokens needs no text, and
        another token may follow it.
        """
        num_next = self.num_expected_tokens - self.num_prompt_tokens + 1
        return not self.needs_text and num_next < self.message.max_tokens

    @property
    def is_protected(self) -> bool:
        """Return whether it goes first and may not be preempted or paused for others."""
        return self.num_generated_tokens < self.protected_until_tokens

    def prompt_rows(self, start: int, end: int) -> range:
        """Return the positions in `start .. end - 1` whose logits give requested prompt log-probabilities that are not
        known yet."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(end, self.num_prompt_tokens - 1))

    @property
    def num_reusable_tokens(self) -> int:
        """Return how many first tokens need no logits, so that cached keys and values may serve them."""
        asked, policy = self.prompt_rows(0, self.num_tokens), self.message.kv_policy
        if policy is not None:
            return min(self.num_tokens, policy.num_reusable(self.num_prompt_tokens))
        return asked.start if asked else self.num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return why it has finished; None while tokens may still follow."""
        return _FINISH_REASONS[self.status]

    def on_load_started(self, now_s: float) -> None:
        """Note when the request began to wait for its adapter."""
        if self.load_started_s is None:
            self.load_started_s = now_s

    def on_load_finished(self, now_s: float) -> None:
        """Note when its adapter was resident."""
        if self.load_started_s is not None:
            self.load_s += now_s - self.load_started_s
            self.load_started_s = None

    def output(
        self, new_token_ids: tuple[int, ...], now_s: float, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> "EngineOutput":
        """Return the output of a step: the new tokens, and the end if the request has finished."""
        asked = self.sampling.prompt_logprobs is not None
        is_computed = bool(new_token_ids) or self.status is RequestStatus.FINISHED_LENGTH
        says_prompt = asked and is_computed and self.num_generated_tokens == len(new_token_ids)
        return EngineOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            finish_reason=self.finish_reason,
            timing=self.told or self._timing(now_s),
            num_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            stop_token_id=self.stop_token_id,
            error=self.error,
            refusal=self.refusal,
            retry_after_s=self.retry_after_s,
            logprobs=logprobs,
            prompt_logprobs=tuple(self.prompt_logprobs) if says_prompt else None,
        )

    @property
    def _num_peer_tokens(self) -> int:
        found = self.peer_tokens
        return len(found[: max(0, self.num_cached_tokens - found.start)]) if found else 0

    def _timing(self, now_s: float) -> "RequestTiming":
        begun = self.scheduled_s if self.scheduled_s is not None else now_s
        policy = self.message.kv_policy
        timing = RequestTiming(
            queue_ms=max(0.0, begun - self.arrival_s - self.load_s) * 1e3,
            load_ms=self.load_s * 1e3,
            tier=self.tier,
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
            num_peer_tokens=self._num_peer_tokens,
            has_peer=self.message.peer is not None,
            fell_back=self.fell_back,
            accept=self.message.accept,
            not_drafted=self.message.not_drafted,
            kv=None if policy is None else self._kv_usage(policy),
        )
        self.told = timing if policy is None else None
        return timing

    def _kv_usage(self, policy: KvPolicy) -> KvUsage:
        dropped = self.num_dropped_pages * policy.page_size
        # A token is sampled from the row before it, and so depends on all that this row sees.
        full_rows = min(self.num_full_rows, policy.num_full_rows)
        exact = max(0, full_rows - self.num_prompt_tokens + 1)
        return KvUsage(
            policy=policy,
            kept_tokens=max(0, self.num_computed_tokens - dropped),
            dropped_tokens=dropped,
            exact_tokens=min(self.num_generated_tokens, exact),
        )


_ENDS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REFUSED: FinishReason.REFUSED,
    RequestStatus.FINISHED_TIMEOUT: FinishReason.TIMEOUT,
}
_FINISH_REASONS = [_ENDS.get(status) for status in RequestStatus]


_END_OF_PERSONA = "\x1f"


def persona_salt(persona: str, salt: str) -> str:
    """Return the salt of requests that begin with a persona's own prompt.

    Only the rendered persona prompt has this salt, so other prompts cannot be compared with it by cache hits. No salt
    of a client or a key has the same beginning.

    Args:
        persona: contains everything that the beginning of the prompt depends on.
        salt: the request's salt.
    """
    return f"persona:{persona}{_END_OF_PERSONA}{salt}"


def is_salted(cache_salt: str, salt: str | None) -> bool:
    """Return whether a request has this salt, with or without a persona's; None matches no request."""
    own = cache_salt.partition(_END_OF_PERSONA)[2] if cache_salt.startswith("persona:") else cache_salt
    return own == salt


@dataclass(frozen=True, slots=True)
class FixedPrefix:
    """Describe the beginning of a prompt that is a persona's own: the same for all clients.

    All requests with this prefix share its full pages, whatever their own salt. So no request may have it whose client
    has written or chosen any of these tokens.
    """

    # The version with which its snapshots are removed (`adapter_store.storage.snapshots`).
    owner: str
    # Differs from every salt of a client, a key or a persona's request.
    salt: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Name a replica that is asked for the pages of a prompt."""

    url: str
    # Whether it is to compute the pages that it does not have.
    computes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Hold the options of a request other than its prompt and sampling."""

    # Content, or sum of contents, that answers and owns the cached pages; None is the base.
    adapter_key: AdapterKey | None = None
    principal: str = ANONYMOUS
    on_cold: OnCold = OnCold.WAIT
    # Requests share prefix pages only with requests of the same salt.
    cache_salt: str = ""
    # None if all tokens are under that salt.
    prefix: FixedPrefix | None = None
    # Account that the request counts on, whichever version the name means; "" is the base, or `adapter_key`.
    adapter_id: str = ""
    # Content that is charged for a sum of adapters, "" for the base; None: `adapter_key`.
    charged_key: AdapterKey | None = None
    # Lower values go first.
    priority: int = 0
    # Seconds from arrival to the last token.
    timeout_s: float | None = None
    # Which tokens may come next; None: any.
    constraint: TokenConstraint | None = None
    text: TextOptions = PLAIN_TEXT
    # Options of the beam search that the request belongs to.
    beams: BeamOptions | None = None
    speculation: SpeculationParams = ANY_SPECULATION
    # Which keys and values its tokens see; None: all before them.
    kv_policy: KvPolicy | None = None
    # First tokens of the answer, which another engine with the same fingerprint has generated; they are computed like
    # those of a preempted request.
    resumed_token_ids: tuple[int, ...] = ()
    # Replica that is asked for the prompt's pages before they are computed.
    peer: Peer | None = None
    # Whether only its pages are wanted, for a peer, which counts the request itself.
    is_for_peer: bool = False


NO_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class EngineCoreRequest(RequestOptions):
    """Carry a request to the engine: frozen, no tensors; its options as they can be followed."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    # Contents that must be in the pool for its adapter.
    terms: tuple[AdapterTerm, ...] = ()
    # Tier of the adapter on arrival, before any work for this request.
    found: AdapterTier | None = None
    # First choice of the same prompt, whose pages this one shares.
    fork_of: RequestId | None = None
    # Keeps the adapter in the store until the request has finished.
    hold: object = None
    # Text that the client expects as the answer.
    prediction_token_ids: tuple[int, ...] = ()
    # Tokens that Medusa heads can draft, and whether the adapter has heads of its own.
    num_draft_heads: int = 0
    has_draft_heads: bool = False
    # Number of the adapter's tokens; 0: as many as the base.
    vocab_size: int = 0
    # First token that the adapter acts on; tokens before it are computed as the base's.
    active_from: int = 0
    # How draft tokens are accepted, if the server has several ways.
    accept: str | None = None
    # Why the answer is not drafted although the request asks for drafts; None otherwise.
    not_drafted: str | None = None

    @property
    def adapter_bytes(self) -> int | None:
        """Return the bytes of all contents that must be in the pool; None for the base."""
        return sum(term.layout.nbytes for term in self.terms) if self.terms else None

    @property
    def account(self) -> Account:
        """Return the account that the ledger charges for the request."""
        return self.adapter_id, self.adapter_key if self.charged_key is None else self.charged_key or None
