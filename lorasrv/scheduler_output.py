"""One step as plain data: what the scheduler asks of the model runner. No torch.

Rebuilt for every step, never memoised: adapters move and leave between steps (a memo on the set of requests once
answered with another user's adapter, vllm#47724).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from adapter_store.spec import AdapterKey
from lorasrv.outputs import RequestId
from lorasrv.request import ConstraintState, Request
from lorasrv.sampling_params import SamplingParams
from sgmv_kernels.formats.adapter_panels import PlacedAdapter

_NO_ROWS = range(0)


class PageCopy(NamedTuple):
    """One page, in every layer."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy pages inside the pool; targets are fresh pages, none of them is a source."""

    copies: tuple[PageCopy, ...]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Keep a preempted request's pages in host memory."""

    request_id: RequestId
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring them back, in order, to these pages."""

    request_id: RequestId
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropSwap:
    """They are not needed any more."""

    request_id: RequestId


PageOp = CopyPages | SwapOut | SwapIn | DropSwap


@dataclass(frozen=True, slots=True)
class AdapterOrders:
    """What the loader is to do beside the step.

    `loads` bring adapters to host memory; `copies` fill pages of the pool from there, which nothing reads before the
    copy is done; `cancels` are loads and host copies that nobody wants any more.
    """

    loads: tuple[AdapterKey, ...] = ()
    copies: tuple[tuple[AdapterKey, PlacedAdapter], ...] = ()
    cancels: tuple[AdapterKey, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: compute `token_ids`, which stand at positions from `start` on.

    `history`: prompt and answer so far, the scheduler's own list, to be read within the step only. `prompt_rows`: those
    of its tokens, counted from 0, whose logits say how likely the prompt's next token is, which the request asks for.
    `adapter_id`: the name by which the adapter was asked for; "" for the base. `draft_token_ids`: the last of its
    tokens that are a guess of what follows the known ones, to be verified by this step; a chain, each after the other.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    page_table: tuple[int, ...]
    adapter_key: AdapterKey | None
    samples: bool
    sampling: SamplingParams
    num_generated: int
    history: Sequence[int] = ()
    constraint: ConstraintState | None = None
    prompt_rows: range = _NO_ROWS
    adapter_id: str = ""
    draft_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, request: Request, count: int, page_table: tuple[int, ...], draft_token_ids: tuple[int, ...] = ()
    ) -> "ScheduledRequest":
        """Return the next `count` tokens of a request, and draft tokens behind them."""
        start = request.num_scheduled_tokens
        asked = _NO_ROWS if request.sampling.prompt_logprobs is None else request.prompt_rows(start, start + count)
        return cls(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[start : start + count]) + draft_token_ids,
            start=start,
            page_table=page_table,
            adapter_key=request.adapter_key,
            samples=start + count == request.num_tokens,
            sampling=request.sampling,
            num_generated=request.num_generated_tokens,
            history=request.token_ids,
            constraint=request.constraint_state,
            prompt_rows=range(asked.start - start, asked.stop - start) if asked else _NO_ROWS,
            adapter_id=request.message.adapter_id if request.adapter_key is not None else "",
            draft_token_ids=draft_token_ids,
        )

    @property
    def num_known_tokens(self) -> int:
        """Return how many of its tokens are no drafts."""
        return len(self.token_ids) - len(self.draft_token_ids)

    @property
    def num_logit_rows(self) -> int:
        """Return how many of its last rows say what comes next: that of the last known token, and one a draft token."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    def without_drafts(self) -> "ScheduledRequest":
        """Return the share with its known tokens only."""
        return replace(self, token_ids=self.token_ids[: self.num_known_tokens], draft_token_ids=())

    @property
    def prompt_targets(self) -> tuple[int, ...]:
        """The prompt's tokens that follow its `prompt_rows`."""
        first = self.start + self.prompt_rows.start + 1
        return tuple(self.history[first : first + len(self.prompt_rows)])

    def cut(self, count: int) -> "tuple[ScheduledRequest, ScheduledRequest]":
        """Its first `count` tokens, after which nothing is sampled, and the others: to be computed in this order.

        A share with drafts is not cut.
        """
        assert not self.draft_token_ids, f"the drafts of {self.request_id} would be cut off from its last token"
        asked = self.prompt_rows
        first = range(asked.start, min(asked.stop, count)) or _NO_ROWS
        then = range(max(asked.start - count, 0), asked.stop - count) or _NO_ROWS
        return (
            replace(self, token_ids=self.token_ids[:count], samples=False, prompt_rows=first),
            replace(self, token_ids=self.token_ids[count:], start=self.start + count, prompt_rows=then),
        )


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A whole step. `page_ops` are done in their order, before the loader gets its orders and before anything is
    computed: pages that they free may be what an order fills. `wake_s`: when, on the scheduler's clock, there is
    something to do even if nothing happens until then. `number`: steps are told apart by it.
    """

    scheduled: tuple[ScheduledRequest, ...]
    placements: Mapping[AdapterKey, PlacedAdapter]
    page_ops: tuple[PageOp, ...]
    orders: AdapterOrders
    num_preempted: int
    wake_s: float | None = None
    number: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows to compute."""
        return sum(len(share.token_ids) for share in self.scheduled)

    @property
    def num_draft_tokens(self) -> int:
        """Return how many of these rows are guesses."""
        return sum(len(share.draft_token_ids) for share in self.scheduled)

    def without_drafts(self) -> "SchedulerOutput":
        """Return the step without its guesses."""
        return self.only([share.without_drafts() for share in self.scheduled])

    def only(self, shares: Sequence[ScheduledRequest]) -> "SchedulerOutput":
        """The step with these shares. What is to be done to pages stands in the whole one."""
        return replace(self, scheduled=tuple(shares), page_ops=(), orders=AdapterOrders())
