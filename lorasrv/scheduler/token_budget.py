"""Token budget: how many tokens a step may still compute, and for which requests.

Running answers always take one token each; prompts share the rest, at most one chunk per step. A chunk is as long as
the target for the time between tokens allows, given the learned cost of a step (SplitFuse, Holmes et al. 2024, with a
learned size instead of a fixed one). If no running answer can be delayed, the chunk is the whole budget.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lorasrv.memory.cost_model import StepCosts, StepShape
from lorasrv.outputs import RequestId
from lorasrv.request import Request

MIN_CHUNK = 16
"""Prompt tokens that every step may have; otherwise a target that is never met would stop prompts for ever."""
MAX_PROMPT_ROWS = 128
"""Most prompt rows whose logits a step computes, for requests with `prompt_logprobs`. A row takes 4 bytes per token of
the vocabulary."""


@dataclass(slots=True)
class TokenBudget:
    """Count what is left of a step."""

    # Tokens left for all requests.
    tokens: int
    # Request slots left, of `max_num_seqs`.
    request_slots: int
    # Tokens left for prompts.
    chunk: int
    # Decoding requests that have not got their token yet.
    reserved: set[RequestId]
    # Tokens given so far.
    counts: dict[RequestId, int] = field(default_factory=dict)
    # Requests whose prompts got only a part of their tokens.
    cut: set[RequestId] = field(default_factory=set)
    # Prompt rows that may still have logits.
    prompt_rows: int = MAX_PROMPT_ROWS
    # Logit rows of the whole step.
    logit_rows: int = 0
    # Tokens of the chunk beyond the target.
    late_tokens: int = 0

    @classmethod
    def of(
        cls,
        max_tokens: int,
        max_seqs: int,
        running: Sequence[Request],
        target_s: float | None,
        ratio: float | None,
        costs: StepCosts,
        slots_ahead: int = 0,
    ) -> "TokenBudget":
        """Return the budget of a step.

        Args:
            running: running requests, by seniority.
            target_s: target for the time between tokens; None sets no target.
            ratio: the target as a multiple of the time without prompts; the smaller target counts.
            slots_ahead: request slots that requests other than the running ones may take first.
        """
        answering = [request for request in running if is_decoding(request)][: max(0, max_seqs - slots_ahead)]
        chunk, num_late = max_tokens - len(answering), 0
        if target_s is not None and answering:
            calm_s = costs.seconds(_shape(answering, running))
            left_s = (target_s if ratio is None else min(target_s, ratio * calm_s)) - calm_s
            in_time = max(0, int(left_s / max(costs.token_s, 1e-9)))
            chunk = min(chunk, max(MIN_CHUNK, in_time))
            num_late = max(0, chunk - in_time)
        reserved = {request.request_id for request in answering}
        return cls(max_tokens, max_seqs, chunk, reserved, logit_rows=max_seqs, late_tokens=num_late)

    @property
    def num_draft_tokens(self) -> int:
        """Return how many draft tokens may be added when everything else has its tokens."""
        prompt_rows = MAX_PROMPT_ROWS - self.prompt_rows
        rows = self.logit_rows - len(self.counts) - prompt_rows
        return max(0, min(self.tokens, self.chunk - self.late_tokens, rows))

    def may_take(self, request: Request) -> bool:
        """Return whether a request slot and a token are left for the request."""
        if self.request_slots <= 0 or self.tokens <= 0:
            return False
        return self._is_decoding(request) or self._most_of_prompt(request) > 0

    def lacks_rows(self, request: Request) -> bool:
        """Return whether the request lacks nothing but prompt rows; later requests need not wait for these."""
        return not self.prompt_rows and request.num_reusable_tokens < request.num_tokens

    def take(self, request: Request, share: int = 1) -> None:
        """Give a request its tokens. A prompt that is longer than the chunk gets at most one `share`th of what is left
        of the chunk."""
        if self._is_decoding(request):
            self.reserved.discard(request.request_id)
            count = min(1, self.tokens)
        else:
            count, wanted = self._most_of_prompt(request), num_unscheduled_tokens(request)
            if wanted > self.chunk:
                count = min(count, max(MIN_CHUNK, self.chunk // share))
            if wanted > count:
                self.cut.add(request.request_id)
            self.chunk -= count
            self.prompt_rows -= len(_prompt_rows(request, count))
        self.tokens -= count
        self.request_slots -= 1
        self.counts[request.request_id] = count

    def take_more(self, request: Request) -> None:
        """Give the rest of the chunk to a request that has its slot."""
        had = self.counts[request.request_id]
        more = min(num_unscheduled_tokens(request) - had, self.chunk, self.tokens - len(self.reserved))
        if more <= 0:
            return
        more = self._with_rows(request, had + more, self.prompt_rows + len(_prompt_rows(request, had))) - had
        if more > 0:
            self.prompt_rows -= len(_prompt_rows(request, had + more)) - len(_prompt_rows(request, had))
            self.chunk -= more
            self.tokens -= more
            self.counts[request.request_id] = had + more

    def give_back(self, request: Request) -> None:
        """Take back the tokens of a request that was preempted."""
        count = self.counts.pop(request.request_id, 0)
        if count:
            self.tokens += count
            self.request_slots += 1
            # Its prompt rows stay used in this step: their number is no longer known.

    def _is_decoding(self, request: Request) -> bool:
        return request.request_id in self.reserved or is_decoding(request)

    def _most_of_prompt(self, request: Request) -> int:
        count = min(num_unscheduled_tokens(request), self.chunk, self.tokens - len(self.reserved))
        return self._with_rows(request, count, self.prompt_rows)

    def _with_rows(self, request: Request, count: int, left: int) -> int:
        """Return the most tokens, up to `count`, whose prompt rows do not exceed `left`."""
        rows = _prompt_rows(request, count)
        return count if len(rows) <= left else rows.start + left - request.num_scheduled_tokens


def _prompt_rows(request: Request, count: int) -> range:
    """Return the next tokens of the request whose logits it asks for."""
    return request.prompt_rows(request.num_scheduled_tokens, request.num_scheduled_tokens + count)


def num_uncomputed_tokens(request: Request) -> int:
    """Return the number of known tokens that are not computed."""
    return request.num_tokens - request.num_computed_tokens


def num_unscheduled_tokens(request: Request) -> int:
    """Return the number of known and pending tokens that are neither computed nor in a step in flight, up to the next
    token at which the request's policy selects pages."""
    known = len(request.token_ids) + request.num_pending_tokens
    if request.message.kv_policy is not None:
        known = min(known, request.next_check)
    return known - request.num_computed_tokens - request.num_in_flight_tokens


def is_decoding(request: Request) -> bool:
    """Return whether only the newest token is to be computed: the prompt is done."""
    has_begun = len(request.token_ids) + request.num_pending_tokens > request.num_prompt_tokens
    return has_begun and num_unscheduled_tokens(request) == 1


def planned_shape(chosen: Sequence[Request], counts: Mapping[RequestId, int]) -> StepShape:
    """Return the shape of a step that computes `counts` tokens of each request."""
    return StepShape(
        tokens=sum(counts[request.request_id] for request in chosen),
        requests=len(chosen),
        adapter_bytes=_adapter_bytes(chosen),
        pairs=sum(
            counts[r.request_id] * r.num_seen(r.num_scheduled_tokens + counts[r.request_id] // 2) for r in chosen
        ),
    )


def _shape(answering: list[Request], running: Iterable[Request]) -> StepShape:
    return StepShape(
        tokens=len(answering),
        requests=len(answering),
        adapter_bytes=_adapter_bytes(running),
        pairs=sum(request.num_seen(request.num_tokens - 1) for request in answering),
    )


def _adapter_bytes(requests: Iterable[Request]) -> int:
    adapters = {term.key: term.layout.nbytes for request in requests for term in request.terms}
    return sum(adapters.values())
