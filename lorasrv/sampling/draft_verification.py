"""Logits of known and draft tokens -> the tokens that plain decoding would have chosen, one or several per request.

Each row yields exactly the token that a step without drafts would draw: the same logits, adjusted for the same history,
and the same draw from the same seed. If that token equals the draft token in the next row, the next row's logits belong
to the text so far, and the next token is drawn from them. The step ends at the first wrong draft. So the answer does
not depend on the drafts, only the number of steps does (speculative decoding's acceptance for a drafter that proposes
single tokens, Leviathan et al. 2023, with a shared draw).

With `--accept rejection`, rejection sampling accepts the drafts of requests without a seed: the distribution of their
answers does not depend on the drafts, but each single answer does.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from lorasrv.outputs import RequestId
from lorasrv.request import ConstraintState
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling.rejection import DrawnToken, Probabilities, accept_or_draw
from lorasrv.sampling.sampler import distribution, or_none, sample_finite
from lorasrv.scheduler_output import ScheduledRequest, children
from sgmv_kernels.backend import NO_TOKEN
from sgmv_kernels.metadata.draft_trees import ROOT
from sgmv_kernels.metadata.h2d import take
from sgmv_kernels.torch_ops.pointwise import likeliest_torch

DrawnFrom = Callable[[ScheduledRequest, int], Probabilities | None]


def choose_tokens(
    logits: Tensor,
    requests: Sequence[ScheduledRequest],
    drawn_from: DrawnFrom = lambda scheduled, at: None,
    likeliest: Tensor | None = None,
) -> dict[RequestId, tuple[int, ...]]:
    """Choose the next tokens of each request; a request whose first row is not finite has none.

    Args:
        logits: [at least S, V] fp32, the `num_logit_rows` of each request first, in their order.
        drawn_from: returns the distribution that a draft token was drawn from, for requests with rejection sampling.
        likeliest: [at least S] int64, the likeliest token of each row as `Ops.likeliest` finds it; None: computed here.
    """
    best = likeliest_torch(logits) if likeliest is None else likeliest
    if not any(s.num_guessed_tokens for s in requests):
        rows = [SamplingMetadata.of(s) for s in requests]
        tokens = sample_finite(logits[: len(requests)], rows, best[: len(requests)])
        return {s.request_id: (token,) for s, token in zip(requests, tokens, strict=True) if token is not None}
    paths, first = [], 0
    for scheduled in requests:
        paths.append(_Path(scheduled, first))
        first += scheduled.num_logit_rows
    left = [path for path in paths if not path.takes_likeliest]
    if len(left) < len(paths):
        numbers = or_none(best[:first])
        for path in paths:
            if path.takes_likeliest:
                path.follow(numbers)
    while left:
        tokens = _sampled(logits, best, left, drawn_from)
        left = [path for path, token in zip(left, tokens, strict=True) if path.goes_on_with(token)]
    return {path.scheduled.request_id: tuple(path.tokens) for path in paths if path.tokens}


def probed_tokens(likeliest: Tensor, requests: Sequence[ScheduledRequest]) -> dict[RequestId, tuple[int, ...]]:
    """Return the likeliest token after each probe, for the requests whose probes' logits are all finite.

    Args:
        likeliest: [at least S] int64, as for `choose_tokens`.
    """
    found, first = dict[RequestId, tuple[int, ...]](), 0
    if not any(scheduled.drafts.probes.token_ids for scheduled in requests):
        return found
    numbers = or_none(likeliest)
    for scheduled in requests:
        first += scheduled.num_logit_rows
        if count := len(scheduled.drafts.probes.token_ids):
            tokens = [token for token in numbers[first - count : first] if token is not None]
            if len(tokens) == count:
                found[scheduled.request_id] = tuple(tokens)
    return found


def _sampled(logits: Tensor, likeliest: Tensor, paths: Sequence["_Path"], drawn_from: DrawnFrom) -> list[int | None]:
    """Return the token of each path's current row: for all rows at once on a GPU, without copying rows on a CPU.
    Rejection sampling computes on the host."""
    if logits.device.type == "cpu":
        return [_token(logits[path.row], likeliest[path.row], path, drawn_from) for path in paths]
    tokens: dict[int, int | None] = {}
    if drawing := [path for path in paths if not path.is_rejecting]:
        rows = [path.row for path in drawing]
        found = sample_finite(take(logits, rows), [path.sampling_row() for path in drawing], take(likeliest, rows))
        tokens |= zip(rows, found, strict=True)
    if rejecting := [path for path in paths if path.is_rejecting]:
        rows = [path.row for path in rejecting]
        copied, best = take(logits, rows).cpu(), take(likeliest, rows).cpu()
        for path, own, token in zip(rejecting, copied, best, strict=True):
            tokens[path.row] = _token(own, token, path, drawn_from)
    return [tokens[path.row] for path in paths]


def _token(logits: Tensor, likeliest: Tensor, path: "_Path", drawn_from: DrawnFrom) -> int | None:
    """Return the token of a path's current row [V], which is on the host."""
    row = path.sampling_row()
    if not path.is_rejecting or likeliest == NO_TOKEN:
        return sample_finite(logits[None], [row], likeliest[None])[0]
    assert row.params.seed is not None, "a random request gets a seed at admission"
    drawn = [DrawnToken(path.scheduled.draft_token_ids[at], drawn_from(path.scheduled, at)) for at in path.drafts]
    return accept_or_draw(distribution(logits, row), drawn, row.params.seed, row.num_generated)


class _Path:
    """Hold the tokens of one request so far, and the row from which the next one is drawn."""

    def __init__(self, scheduled: ScheduledRequest, first_row: int) -> None:
        self.scheduled = scheduled
        self.tokens: list[int] = []
        self._first_row = first_row
        self._children = children(scheduled.draft_token_ids, scheduled.draft_parents)
        # The draft token that was accepted last.
        self._node = ROOT
        # A copy: the scheduler's state may follow only the final tokens, as a step may be computed twice.
        self._ahead: ConstraintState | None = None
        # Whether each token is the one with the highest unprocessed logit.
        self.takes_likeliest = SamplingMetadata.of(scheduled).takes_likeliest

    def follow(self, likeliest: Sequence[int | None]) -> None:
        """Take the tokens with the highest logits as far as the drafts are right."""
        while self.goes_on_with(likeliest[self.row]):
            pass

    @property
    def is_rejecting(self) -> bool:
        """Return whether rejection sampling decides on the current row's draft token."""
        return self.scheduled.by_rejection and bool(self.drafts)

    @property
    def drafts(self) -> list[int]:
        """Return the places of the draft tokens for the current row's token."""
        return [at for (parent, _), at in self._children.items() if parent == self._node]

    @property
    def row(self) -> int:
        return self._first_row + 1 + self._node

    def sampling_row(self) -> SamplingMetadata:
        return (
            SamplingMetadata.after(self.scheduled, self.tokens, self._ahead)
            if self.tokens
            else SamplingMetadata.of(self.scheduled)
        )

    def goes_on_with(self, token: int | None) -> bool:
        """Take the token of the current row; return whether the next row's logits belong to the text with it."""
        if token is None or (self._ahead is not None and self._ahead.error is not None):
            # The next step finds and reports the error.
            return False
        self.tokens.append(token)
        child = self._children.get((self._node, token))
        if child is None:
            return False
        self._node = child
        return self._follows_constraint(token)

    def _follows_constraint(self, token: int) -> bool:
        if self.scheduled.constraint is None:
            return True
        if self._ahead is None:
            self._ahead = self.scheduled.constraint.copy()
        self._ahead.advance(token)
        return self._ahead.error is None and not self._ahead.is_over
