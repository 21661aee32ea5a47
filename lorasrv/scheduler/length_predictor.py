"""Length predictor: how long answers will be, learned online from finished ones by adapter and prompt length.

S³ (Jin et al. 2023) predicts lengths with a model to pack batches. Here histograms suffice, because the past answers of
an adapter predict most. The quantile is taken over the answers longer than the request's answer so far. An adapter
without history is predicted from all adapters. Without any history, `UNKNOWN_TOKENS` more tokens are expected, or what
`max_tokens` leaves: most clients set no `max_tokens`, and reserving a whole context for each would admit hardly any
request.

`peak_growth` turns predictions into pages: how many more the batch needs at its peak. A sum over the ends of all
requests would be too high, because finished requests free their pages for the others. The peak is just before one of
them ends (the estimate of LightLLM's scheduler; S-LoRA counts adapters in the same budget).
"""

import bisect
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lorasrv.request import Request

STEPS_PER_DOUBLING = 3
NUM_BINS = 1 + STEPS_PER_DOUBLING * 20
MIN_ANSWERS = 8
"""Fewest answers that a histogram predicts from."""
MAX_ANSWERS = 256
"""At this total all counts are halved, so that old answers weigh less."""
MAX_HISTOGRAMS = 8192
UNKNOWN_TOKENS = 256
MEDIAN = 0.5
PLANNED_QUANTILE = 0.8
"""Quantile that admission reserves pages for. Most answers are shorter; a longer one may cost a preemption."""
_Key = tuple[str | None, int | None]
"""(adapter, length class of the prompt); None stands for all."""


def _bin_ends() -> Iterator[int]:
    last = 0
    for i in range(NUM_BINS):
        last = max(last + 1, round(2 ** (i / STEPS_PER_DOUBLING)))
        yield last


ENDS = tuple(_bin_ends())
"""The longest answer of each bin."""


@dataclass(slots=True)
class _Histogram:
    """Count answers by length. An answer cut at `max_tokens` only shows that the full one would be no shorter (Kaplan
    and Meier 1958). A histogram takes just 750 bytes, as there are thousands."""

    ended: "array[float]" = field(default_factory=lambda: array("f", bytes(4 * NUM_BINS)))
    cut: "array[float]" = field(default_factory=lambda: array("f", bytes(4 * NUM_BINS)))
    total: float = 0.0

    def add(self, at: int, *, was_cut: bool) -> None:
        (self.cut if was_cut else self.ended)[at] += 1
        self.total += 1
        if self.total > MAX_ANSWERS:
            self.ended = array("f", (count / 2 for count in self.ended))
            self.cut = array("f", (count / 2 for count in self.cut))
            self.total /= 2

    def quantile(self, q: float, longer_than: int) -> int | None:
        """Return the length that an answer longer than `longer_than` does not exceed with probability `q`; None if too
        few answers were that long. If too many of those were cut, this answer is predicted to be cut as well."""
        begin = _bin(longer_than + 1)
        at_risk = sum(self.ended[begin:]) + sum(self.cut[begin:])
        if at_risk < MIN_ANSWERS:
            return None
        goes_on = 1.0
        for i in range(begin, NUM_BINS):
            if at_risk < 1.0:
                break
            goes_on *= 1.0 - self.ended[i] / at_risk
            if goes_on <= 1.0 - q:
                return ENDS[i]
            at_risk -= self.ended[i] + self.cut[i]
        return ENDS[-1]


class LengthPredictor:
    """Predict the lengths of answers. Mutated by the engine thread only."""

    def __init__(self) -> None:
        self._histograms: OrderedDict[_Key, _Histogram] = OrderedDict()
        self._num_answers = 0
        self.num_predicted = 0
        self.num_covered = 0
        self.predicted_tokens = 0
        self.actual_tokens = 0

    @property
    def is_learned(self) -> bool:
        """Return whether enough answers were seen to predict from."""
        return self._num_answers >= MIN_ANSWERS

    def length(self, request: Request, q: float) -> int:
        """Return the tokens that the whole answer does not exceed with probability `q`."""
        most, generated = request.message.max_tokens, request.num_generated_tokens
        if request.sampling.ignore_eos and not request.sampling.stop and not request.sampling.stop_token_ids:
            return most
        for key in _keys(request):
            histogram = self._histograms.get(key)
            found = histogram.quantile(q, generated) if histogram is not None else None
            if found is not None:
                return max(min(found, most), min(generated + 1, most))
        return min(most, generated + UNKNOWN_TOKENS)

    def remaining(self, request: Request, q: float) -> int:
        """Return the tokens that `length` predicts beyond those generated so far."""
        return self.length(request, q) - request.num_generated_tokens

    def planned_remaining(self, request: Request) -> int:
        """Return the tokens that admission plans for; they are predicted again only when the answer exceeds them."""
        if request.planned_tokens <= request.num_generated_tokens:
            request.planned_tokens = self.length(request, PLANNED_QUANTILE)
        return request.planned_tokens - request.num_generated_tokens

    def on_admitted(self, request: Request) -> None:
        """Record the prediction for a request, to be compared with its answer."""
        if request.predicted_tokens is None:
            request.predicted_tokens = request.planned_tokens = self.length(request, PLANNED_QUANTILE)

    def on_finished(self, request: Request, *, was_cut: bool) -> None:
        """Learn from a finished answer; `was_cut` if it ended at `max_tokens`."""
        self._num_answers += 1
        at = _bin(max(1, request.num_generated_tokens))
        for key in _keys(request):
            if key not in self._histograms:
                self._histograms[key] = _Histogram()
            self._histograms.move_to_end(key)
            self._histograms[key].add(at, was_cut=was_cut)
        while len(self._histograms) > MAX_HISTOGRAMS:
            self._histograms.popitem(last=False)
        if request.predicted_tokens is not None:
            self.num_predicted += 1
            self.num_covered += request.num_generated_tokens <= request.predicted_tokens
            self.predicted_tokens += request.predicted_tokens
            self.actual_tokens += request.num_generated_tokens


def _keys(request: Request) -> Sequence[_Key]:
    """Return the keys of the histograms to use, from the most specific to the most general."""
    adapter, prompt = request.message.adapter_id, request.num_prompt_tokens.bit_length()
    return (adapter, prompt), (adapter, None), (None, prompt), (None, None)


def _bin(length: int) -> int:
    """Return the first bin whose end is no shorter than `length`."""
    return min(bisect.bisect_left(ENDS, length), NUM_BINS - 1)


def peak_growth(requests: Iterable[tuple[int, int, int]], page_size: int) -> int:
    """Return the pages that the batch needs at its peak beyond those held now.

    Args:
        requests: (tokens now, tokens to come, most tokens held at a time) of each request.
    """
    now, to_come, most = np.array(list(requests), dtype=np.int64).reshape(-1, 3).T
    held = -(-np.minimum(now, most) // page_size)
    times = np.unique(to_come)
    alive = to_come[:, None] >= times
    pages = -(-np.minimum(now[:, None] + times, most[:, None]) // page_size)
    return max(0, int((pages * alive).sum(axis=0).max(initial=0) - held.sum()))
