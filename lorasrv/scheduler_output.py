"""Scheduler output: one step as plain data, from the scheduler to the model runner, and its results. No torch.

Rebuilt for every step and never cached: adapters move and leave between steps (in vllm#47724, a cache by the set of
requests answered with another user's adapter).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import Facts, SnapshotName
from lorasrv.kv_policy import KvPolicy
from lorasrv.outputs import RequestId, TokenLogprobs, record
from lorasrv.request import Account, ConstraintState, EngineCoreRequest, Peer, Request
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation_params import REJECTION
from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.metadata.draft_trees import ROOT

_NO_ROWS = range(0)
PENDING = -1
"""Placeholder of the token that the previous step, still in flight, samples for the same request."""


class PageCopy(NamedTuple):
    """Copy one page, in every layer."""

    source: int
    target: int


class SlotMoves(NamedTuple):
    """Move keys and values of a sequence's tokens, in every layer, to earlier slots; its first token has slot 0."""

    page_table: Sequence[int]
    # Both ascending, no target after its source: a token is read before its slot is written.
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy pages inside the pool; targets are fresh pages, and none of them is a source."""

    copies: tuple[PageCopy, ...]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy a preempted request's pages to host memory."""

    request_id: RequestId
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy a request's swapped pages back, in order, to these pages."""

    request_id: RequestId
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropSwap:
    """Drop a request's swapped pages."""

    request_id: RequestId


class SnapshotFile(NamedTuple):
    """Describe the file of a snapshot of a prefix."""

    name: SnapshotName
    facts: Facts
    num_pages: int


class PeerSnapshot(NamedTuple):
    """Describe pages of a prompt that a peer has, or is to compute."""

    name: SnapshotName
    peer: Peer
    # Facts that must be equal at the peer.
    facts: Facts
    # Digests of the wanted pages, in order.
    digests: tuple[bytes, ...]
    # Place of the first wanted page in the prompt.
    first: int
    # Prompt up to the end of the last wanted page.
    token_ids: tuple[int, ...]
    # The request with this prompt.
    message: EngineCoreRequest
    # Longest time until the pages are in host memory.
    wait_s: float

    @property
    def num_pages(self) -> int:
        """Return the number of wanted pages."""
        return len(self.digests)


@dataclass(frozen=True, slots=True)
class SnapshotOrders:
    """List the orders for snapshots of prefixes, executed while the step runs."""

    # Snapshots to read into host memory.
    loads: tuple[SnapshotFile | PeerSnapshot, ...] = ()
    # Snapshots to copy from host memory: (place in the snapshot, page) of each page. Nothing reads these pages before
    # the copy is done.
    copies: tuple[tuple[SnapshotName, tuple[tuple[int, int], ...]], ...] = ()
    # Loads and host copies that are not needed any more.
    cancels: tuple[SnapshotName, ...] = ()
    # Pages to write to the disk; they are read before the step computes.
    saves: tuple[tuple[SnapshotFile, tuple[int, ...]], ...] = ()


NO_SNAPSHOTS = SnapshotOrders()
PageOp = CopyPages | SwapOut | SwapIn | DropSwap


@dataclass(frozen=True, slots=True)
class AdapterOrders:
    """List the orders for the loader, executed while the step runs."""

    # Adapters to load into host memory.
    loads: tuple[AdapterKey, ...] = ()
    # Adapters to copy from host memory; nothing reads their pages before the copy is done.
    copies: tuple[tuple[AdapterKey, PlacedAdapter], ...] = ()
    # Loads and host copies that are not needed any more.
    cancels: tuple[AdapterKey, ...] = ()


class ModelDraft(NamedTuple):
    """Hold the tokens that a draft model on the worker expects after the new tokens of a step."""

    token_ids: tuple[int, ...]
    # Probability that the model gives to each, if those before it are right.
    confidence: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DrafterOutput:
    """Hold the drafts of a model on the worker at the end of a step."""

    drafts: Mapping[RequestId, ModelDraft] = field(default_factory=dict)
    seconds: float = 0.0
    num_passes: int = 0
    # Whether the model has failed and will not draft again.
    has_failed: bool = False


class ProbeTree(NamedTuple):
    """Hold guessed tokens that a step computes to learn their likeliest continuations; none is accepted."""

    token_ids: tuple[int, ...]
    # Index of each token's parent, which precedes it, or -1 for the last known token.
    parents: tuple[int, ...]


NO_PROBES = ProbeTree((), ())


class PlannedDrafts(NamedTuple):
    """Plan the drafts that a step verifies for an answer, and those requested for the next step."""

    # A chain that continues the known tokens, or a tree with `parents`; and the drafter of each token.
    token_ids: tuple[int, ...] = ()
    drafters: tuple[str, ...] = ()
    # The draft model on the worker that is asked for `num_asked` tokens after the step's new tokens.
    asked: str = ""
    num_asked: int = 0
    # Index of each token's parent, which precedes it, or -1 for the last known token. The tokens lie in consecutive
    # slots; their positions follow from their depths. Empty: a chain.
    parents: tuple[int, ...] = ()
    # Probes, in the slots after those of the draft tokens.
    probes: ProbeTree = NO_PROBES


NO_DRAFTS = PlannedDrafts()


@record
class ScheduledRequest:
    """Describe what a step computes for one request."""

    request_id: RequestId
    # Tokens to compute: known ones, draft tokens, then probes; the last known one may be `PENDING`.
    token_ids: tuple[int, ...]
    # Position of the first of them.
    start: int
    # `HOLE` in place of pages that none of the tokens sees.
    page_table: Sequence[int]
    adapter_key: AdapterKey | None
    # Whether the step samples the request's next token.
    samples: bool
    sampling: SamplingParams
    num_generated: int
    # Prompt and answer so far: the scheduler's own list; read it only within the step.
    history: Sequence[int] = ()
    constraint: ConstraintState | None = None
    # Rows, counted from 0, whose logits give the log-probability of the prompt's next token, if requested.
    prompt_rows: range = _NO_ROWS
    account: Account = ("", None)
    drafts: PlannedDrafts = NO_DRAFTS
    # Whether draft tokens are accepted by rejection sampling.
    by_rejection: bool = False
    # Whether the adapter has Medusa heads.
    has_draft_heads: bool = False
    # Number of tokens in the vocabulary; 0: as many as the base.
    vocab_size: int = 0
    kv_policy: KvPolicy | None = None
    # Number of last tokens whose attention to each page is observed.
    num_observed: int = 0
    # First token of the sequence that the adapter acts on.
    active_from: int = 0
    # (content, weight) of each term, if the adapter is a sum whose terms are separate in the pool.
    summed: tuple[tuple[AdapterKey, float], ...] = ()
    # Number of draft tokens and probes.
    num_guessed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        drafts = self.drafts
        count = 0 if drafts is NO_DRAFTS else len(drafts.token_ids) + len(drafts.probes.token_ids)
        self.num_guessed_tokens = count  # type: ignore[misc]

    @classmethod
    def of(
        cls, request: Request, count: int, page_table: Sequence[int], drafts: PlannedDrafts = NO_DRAFTS
    ) -> "ScheduledRequest":
        """Return what a step computes for the next `count` tokens of a request, followed by draft tokens."""
        start, history, sampling = request.num_scheduled_tokens, request.token_ids, request.sampling
        message, expected = request.message, request.num_expected_tokens
        tokens = tuple(history[start : start + count])
        if len(tokens) < count:
            tokens += (PENDING,) * (count - len(tokens))
        if drafts is not NO_DRAFTS:
            tokens += drafts.token_ids + drafts.probes.token_ids
        asked = _NO_ROWS if sampling.prompt_logprobs is None else request.prompt_rows(start, start + count)
        policy, dropped = message.kv_policy, request.num_dropped_pages
        observed = policy and policy.num_observed(request.num_prompt_tokens, start, start + count, dropped)
        return cls(
            request_id=request.request_id,
            token_ids=tokens,
            start=start,
            page_table=page_table,
            adapter_key=request.adapter_key,
            samples=start + count == expected,
            sampling=sampling,
            num_generated=expected - request.num_prompt_tokens,
            history=history,
            constraint=request.limit_of(1 + len(drafts.token_ids)),
            prompt_rows=range(asked.start - start, asked.stop - start) if asked else _NO_ROWS,
            account=request.account,
            drafts=drafts,
            by_rejection=message.accept == REJECTION,
            has_draft_heads=message.has_draft_heads,
            vocab_size=message.vocab_size,
            kv_policy=policy,
            num_observed=observed or 0,
            active_from=message.active_from,
            summed=request.summed,
        )

    @property
    def terms(self) -> tuple[tuple[AdapterKey, float], ...]:
        """Return the content and weight of each adapter that is added to the base for the tokens."""
        return self.summed or (() if self.adapter_key is None else ((self.adapter_key, 1.0),))

    @property
    def num_plain_rows(self) -> int:
        """Return the number of first tokens that the adapter does not act on."""
        return min(max(0, self.active_from - self.start), len(self.token_ids))

    @property
    def is_pending(self) -> bool:
        """Return whether the previous step samples its token."""
        return self.token_ids[-1] == PENDING

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        """Return the draft tokens to verify."""
        return self.drafts.token_ids

    @property
    def draft_parents(self) -> tuple[int, ...]:
        """Return the parents of the draft tokens, if they are a tree."""
        return self.drafts.parents

    @property
    def slot_parents(self) -> tuple[int, ...]:
        """Return the parents of draft tokens and probes, if they are a tree."""
        if self.drafts is NO_DRAFTS:
            return ()
        probes, count = self.drafts.probes, len(self.draft_token_ids)
        if not probes.token_ids:
            return self.draft_parents
        drafts = self.draft_parents or tuple(range(ROOT, count - 1))
        return drafts + tuple(parent if parent == ROOT else count + parent for parent in probes.parents)

    @property
    def num_known_tokens(self) -> int:
        """Return the number of tokens that are not guessed."""
        return len(self.token_ids) - self.num_guessed_tokens

    @property
    def num_logit_rows(self) -> int:
        """Return the number of last rows that predict a next token: one for the last known token, and one per draft
        token and probe."""
        return 1 + self.num_guessed_tokens if self.samples else 0

    def without_drafts(self) -> "ScheduledRequest":
        """Return the request with only its known tokens."""
        return replace(self, token_ids=self.token_ids[: self.num_known_tokens], drafts=NO_DRAFTS)

    def moves_along(self, path: Sequence[int]) -> SlotMoves:
        """Return the moves that bring the draft tokens of a path to the slots directly after the known tokens.

        Args:
            path: indices of these draft tokens, from a child of the last known token down.
        """
        first = self.start + self.num_known_tokens
        moves = [(first + index, first + depth) for depth, index in enumerate(path) if index != depth]
        sources, targets = zip(*moves, strict=True) if moves else ((), ())
        return SlotMoves(self.page_table, sources, targets)

    @property
    def prompt_targets(self) -> tuple[int, ...]:
        """Return the prompt tokens that follow `prompt_rows`."""
        first = self.start + self.prompt_rows.start + 1
        return tuple(self.history[first : first + len(self.prompt_rows)])

    def cut(self, count: int) -> "tuple[ScheduledRequest, ScheduledRequest]":
        """Split a request without drafts into its first `count` tokens, which sample nothing, and the rest, to be
        computed in this order."""
        assert not self.num_guessed_tokens, f"the drafts of {self.request_id} would be cut off from its last token"
        asked, behind = self.prompt_rows, len(self.token_ids) - count
        first = range(asked.start, min(asked.stop, count)) or _NO_ROWS
        then = range(max(asked.start - count, 0), asked.stop - count) or _NO_ROWS
        return (
            replace(
                self,
                token_ids=self.token_ids[:count],
                samples=False,
                prompt_rows=first,
                num_observed=max(0, self.num_observed - behind),
            ),
            replace(
                self,
                token_ids=self.token_ids[count:],
                start=self.start + count,
                prompt_rows=then,
                num_observed=min(self.num_observed, behind),
            ),
        )


def path_along(token_ids: Sequence[int], parents: Sequence[int], said: Sequence[int]) -> list[int]:
    """Return the indices of the draft tokens that `said` contains, from a child of the root down.

    Args:
        parents: parents of the draft tokens; empty for a chain.
    """
    nodes = children(token_ids, parents)
    path, node = list[int](), ROOT
    for token in said:
        if (child := nodes.get((node, token))) is None:
            break
        path.append(child)
        node = child
    return path


def children(token_ids: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the index of each draft token by (parent, token)."""
    return {key: at for at, key in enumerate(zip(parents or range(ROOT, len(token_ids)), token_ids, strict=False))}


@record
class SchedulerOutput:
    """Describe a whole step."""

    requests: tuple[ScheduledRequest, ...]
    placements: Mapping[AdapterKey, PlacedAdapter]
    # Executed in order, before the loader gets its orders and before anything is computed: an order may fill pages that
    # these operations free.
    page_ops: tuple[PageOp, ...]
    orders: AdapterOrders
    num_preempted: int
    # When, on the scheduler's clock, the next step is needed even without an event; None: only after an event.
    wake_s: float | None = None
    # Identifies the step.
    number: int = 0
    # Whether planning another step before this one is collected delays requests.
    is_awaited: bool = False
    snapshots: SnapshotOrders = NO_SNAPSHOTS
    # Number of rows to compute, and how many of them are draft tokens and probes.
    num_tokens: int = field(init=False)
    num_guessed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        num_tokens = num_guessed = 0
        for scheduled in self.requests:
            num_tokens += len(scheduled.token_ids)
            num_guessed += scheduled.num_guessed_tokens
        self.num_tokens, self.num_guessed_tokens = num_tokens, num_guessed  # type: ignore[misc]

    def with_tokens(self, tokens: Mapping[RequestId, int]) -> "SchedulerOutput":
        """Return the step with these tokens in place of pending ones. Requests without a token here have finished and
        get any token.
        """
        if not any(s.is_pending for s in self.requests):
            return self
        return self.only(
            [
                replace(scheduled, token_ids=(tokens.get(scheduled.request_id, 0),))
                if scheduled.is_pending
                else scheduled
                for scheduled in self.requests
            ]
        )

    @property
    def has_drafts(self) -> bool:
        """Return whether drafts are verified or requested."""
        return any(s.drafts is not NO_DRAFTS for s in self.requests)

    def without_drafts(self) -> "SchedulerOutput":
        """Return the step without its drafts."""
        return self.only([s.without_drafts() for s in self.requests])

    def only(self, requests: Sequence[ScheduledRequest]) -> "SchedulerOutput":
        """Return the step with only these requests, without page operations and orders, which belong to the whole
        step."""
        return replace(self, requests=tuple(requests), page_ops=(), orders=AdapterOrders(), snapshots=NO_SNAPSHOTS)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Hold the results of a step."""

    # New tokens of each request whose known tokens are all computed: one, and one more per accepted draft token. A
    # request whose logits are NaN or infinite has none.
    sampled: Mapping[RequestId, tuple[int, ...]]
    # Log-probabilities of these tokens, for requests that ask for them.
    logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    # Log-probabilities of the requested prompt tokens.
    prompt_logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    # The likeliest token after each probe.
    probed: Mapping[RequestId, tuple[int, ...]] = field(default_factory=dict)
    # By the name of each draft model that was asked.
    drafted: Mapping[str, DrafterOutput] = field(default_factory=dict)
    # For each request, by observed token: the attention paid to each page.
    masses: Mapping[RequestId, Sequence[Sequence[float]]] = field(default_factory=dict)
