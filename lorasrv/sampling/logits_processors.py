"""Change a row's logits before a token is chosen from them; docs/sampling.md has each formula and its source.

All changes depend only on the tokens so far (`SamplingMetadata.history`); nothing is kept between steps, and rows are
independent. The affected tokens are found on the host, from ids that it has anyway. The logits stay on their device,
and nothing waits for it.

FSD: Yang et al. 2023, "A Frustratingly Simple Decoding Method for Neural Text Generation" (arXiv:2305.12675), in the
discrete form of Inferflow: among the likeliest tokens, take the one that repeats the text so far least, measured by an
n-gram model of that text.

Locally typical sampling: Meister et al. 2022, "Locally Typical Sampling" (arXiv:2202.00666): keep the tokens whose
surprise is nearest to the entropy of the distribution. Tested against transformers' `TypicalLogitsWarper`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorasrv.request import ConstraintState
from lorasrv.sampling.watermark import green
from lorasrv.sampling_params import SamplingParams, Watermark
from lorasrv.scheduler_output import ScheduledRequest
from sgmv_kernels.metadata.h2d import upload

DEFAULT_CANDIDATES = 6
SMOOTHING = 0.9


def repetition(history: npt.NDArray[np.int64], ngram: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Score from 0 to 1 how much each token would repeat the text so far.

    For each token, the longest context (at most n - 1 tokens) that it has followed before gets 0.9 of the weight; of
    the rest, the next shorter context gets 0.9, and so on. A context's vote is count / (total + 1), that of the empty
    context count / total. A text of fewer than n - 1 tokens repeats nothing.

    Args:
        history: [T] prompt and answer so far.
        ngram: n, at least 1.

    Returns: [V] fp32.
    """
    score = np.zeros(vocab_size)
    left = np.ones(vocab_size)
    if len(history) < max(1, ngram - 1):
        return score.astype(np.float32)
    for length in range(ngram - 1, -1, -1):
        followed = _followers(history, length)
        counts = np.bincount(followed, minlength=vocab_size)
        tokens = np.flatnonzero(counts > 0)
        vote = counts[tokens] / (len(followed) + 1) * SMOOTHING if length else counts[tokens] / len(followed)
        score[tokens] += left[tokens] * vote
        left[tokens] *= 1 - SMOOTHING
    return score.astype(np.float32)


def _followers(history: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Return the tokens that followed earlier occurrences of the last `length` tokens."""
    if length == 0:
        return history
    last = np.flatnonzero(history[length - 1 : -1] == history[-1]) + length - 1
    for back in range(2, length + 1):
        if not len(last):
            break
        last = last[history[last - back + 1] == history[-back]]
    return history[last + 1]


class SamplingMetadata(NamedTuple):
    """Describe how to choose the token of one row of logits."""

    params: SamplingParams
    # Number of the answer's tokens so far: the row's position in the seed's random stream.
    num_generated: int = 0
    # Token ids of the prompt, followed by those of the answer.
    history: Sequence[int] = ()
    constraint: ConstraintState | None = None

    @classmethod
    def of(cls, scheduled: ScheduledRequest) -> "SamplingMetadata":
        """Return the row of a request's last known token."""
        return cls(scheduled.sampling, scheduled.num_generated, scheduled.history, scheduled.constraint)

    @classmethod
    def after(
        cls, scheduled: ScheduledRequest, path: Sequence[int], constraint: ConstraintState | None
    ) -> "SamplingMetadata":
        """Return the row of a draft token; `path` are the tokens that this step has chosen so far, that token last.

        Args:
            constraint: a state that has advanced along `path`.
        """
        return cls(scheduled.sampling, scheduled.num_generated + len(path), [*scheduled.history, *path], constraint)

    @property
    def is_early(self) -> bool:
        """Return whether the answer may not end yet."""
        return self.num_generated < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Return whether this module has to change the row's logits."""
        return self.params.changes_logits or self.constraint is not None or self.is_early

    @property
    def takes_likeliest(self) -> bool:
        """Return whether the token is the one with the highest unprocessed logit."""
        return self.params.is_greedy and not self.changes_logits

    @property
    def generated(self) -> Sequence[int]:
        """Return the token ids of the answer so far."""
        return self.history[len(self.history) - self.num_generated :]


MAX_LOGIT = 1e30
"""Bound of logits after penalties, because the difference of two infinities is undefined. Divided by the lowest
temperature it is still finite in fp32.
"""
BANNED = float("-inf")
Mask = npt.NDArray[np.bool_]


def adjusted_rows(logits: Tensor, rows: Sequence[SamplingMetadata]) -> Tensor:
    """Adjust logits in place and return them.

    Args:
        logits: [B, V] fp32.
        rows: B rows; the logits of rows without options are only bounded.

    Returns: [B, V] fp32; -inf excludes a token.
    """
    _add_bias(logits, rows)
    _penalise(logits, rows)
    _mark(logits, rows)
    logits.clamp_(-MAX_LOGIT, MAX_LOGIT)
    _ban(logits, rows)
    _repeat_least(logits, rows)
    return logits


def _add_bias(logits: Tensor, rows: Sequence[SamplingMetadata]) -> None:
    """Add `logit_bias`."""
    biased = [(number, *entry) for number, row in enumerate(rows) for entry in row.params.logit_bias]
    if biased:
        numbers, tokens, bias = (np.array(column) for column in zip(*biased, strict=True))
        at = upload([numbers, tokens], logits.device)
        logits[at[0], at[1]] += _on(logits, bias.astype(np.float32))


def _penalise(logits: Tensor, rows: Sequence[SamplingMetadata]) -> None:
    """Apply `repetition_penalty` to tokens of prompt and answer, then the other two penalties to tokens of the
    answer.
    """
    parts = [_penalties(n, row, logits.shape[1]) for n, row in enumerate(rows) if row.params.has_penalties]
    if not parts:
        return
    numbers, tokens, factor, minus = (np.concatenate(column) for column in zip(*parts, strict=True))
    at = upload([numbers, tokens], logits.device)
    found = logits[at[0], at[1]]
    divisor = _on(logits, factor.astype(np.float32))
    found = torch.where(found < 0, found * divisor, found / divisor)
    logits[at[0], at[1]] = found - _on(logits, minus.astype(np.float32))


def _penalties(number: int, row: SamplingMetadata, vocab_size: int) -> tuple[npt.NDArray[np.generic], ...]:
    """Return, for each token of the history: row number, token id, divisor of its logit, and the amount subtracted
    afterwards.
    """
    p = row.params
    history = np.array(row.history, dtype=np.int64)
    counts = np.bincount(history[len(history) - row.num_generated :], minlength=vocab_size)
    seen = counts if p.repetition_penalty == 1.0 else np.bincount(history, minlength=vocab_size)
    tokens = np.flatnonzero(seen > 0)  # booleans are five times as fast
    counts = counts[tokens]
    minus = p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
    return np.full(len(tokens), number), tokens, np.full(len(tokens), p.repetition_penalty), minus


def _mark(logits: Tensor, rows: Sequence[SamplingMetadata]) -> None:
    """Add the watermark's `delta` to green tokens."""
    is_green = {
        number: green(_watermark(row), row.history[-1], np.arange(logits.shape[1], dtype=np.uint32))
        for number, row in enumerate(rows)
        if row.params.watermark and row.history
    }
    for number, own in _of_rows(logits, is_green):
        logits[number].add_(own.to(logits.dtype), alpha=_watermark(rows[number]).delta)


def _watermark(row: SamplingMetadata) -> Watermark:
    return row.params.watermark if isinstance(row.params.watermark, Watermark) else Watermark()


def _ban(logits: Tensor, rows: Sequence[SamplingMetadata]) -> None:
    """Exclude tokens that are not allowed."""
    masks = {number: _allowed(row, logits.shape[1]) for number, row in enumerate(rows)}
    for number, own in _of_rows(logits, {number: ~mask for number, mask in masks.items() if mask is not None}):
        logits[number].masked_fill_(own, BANNED)


def _allowed(row: SamplingMetadata, vocab_size: int) -> Mask | None:
    """Return the [V] mask of allowed tokens; None: all. What a constraint allows replaces `allowed_token_ids`. If
    nothing else is allowed, end tokens before `min_tokens`, bad words and repeated n-grams are.
    """
    may = None
    if row.params.allowed_token_ids is not None:
        may = np.zeros(vocab_size, dtype=np.bool_)
        may[list(row.params.allowed_token_ids)] = True
    if row.constraint is not None and (words := row.constraint.allowed()) is not None:
        may = _permitted(words, vocab_size)
    if row.is_early:
        may = _without(row.params.end_token_ids, may, vocab_size)
    may = _without(_ends_of_bad_words(row), may, vocab_size)
    return _without(_ends_of_ngrams(row), may, vocab_size)


def _without(tokens: Sequence[int], may: Mask | None, vocab_size: int) -> Mask | None:
    if not tokens:
        return may
    left = np.ones(vocab_size, dtype=np.bool_) if may is None else may.copy()
    left[list(tokens)] = False
    return left if left.any() else may


def _ends_of_bad_words(row: SamplingMetadata) -> list[int]:
    """Return the tokens that would complete a bad word at the end of the answer so far."""
    said = row.generated if row.params.bad_word_ids else ()
    return [
        last
        for *before, last in row.params.bad_word_ids
        if len(before) <= len(said) and list(said[len(said) - len(before) :]) == before
    ]


def _ends_of_ngrams(row: SamplingMetadata) -> list[int]:
    """Return the tokens that would complete an n-gram for a second time, as in transformers."""
    size = row.params.no_repeat_ngram_size
    if not 0 < size <= len(row.history):
        return []
    followers: list[int] = _followers(np.array(row.history, dtype=np.int64), size - 1).tolist()
    return followers


def _permitted(words: npt.NDArray[np.int32], vocab_size: int) -> Mask:
    """Expand a constraint's bits to a [V] mask; tokens it does not know, such as vocabulary padding, are excluded."""
    bits = np.unpackbits(np.ascontiguousarray(words, dtype="<i4").view(np.uint8), bitorder="little")
    may = np.zeros(vocab_size, dtype=np.bool_)
    may[: len(bits)] = bits[:vocab_size]
    return may


def _repeat_least(logits: Tensor, rows: Sequence[SamplingMetadata]) -> None:
    """Replace logits by the scores of FSD."""
    repeats = {
        number: repetition(np.array(row.history, dtype=np.int64), row.params.fsd_ngram, logits.shape[1])
        for number, row in enumerate(rows)
        if row.params.fsd_alpha > 0.0
    }
    for number, own in _of_rows(logits, repeats):
        logits[number].copy_(_least_repetitive(logits[number], own, rows[number].params))


def _least_repetitive(logits: Tensor, repeats: Tensor, p: SamplingParams) -> Tensor:
    """Return FSD's [V] scores: (1 - alpha) p - alpha r for the likeliest tokens and -inf for others. The token with the
    highest score is chosen.
    """
    probs = torch.softmax(logits, dim=-1)
    candidates = probs.topk(min(p.top_k or DEFAULT_CANDIDATES, len(logits))).indices
    score = torch.where(probs > 0, (1 - p.fsd_alpha) * probs - p.fsd_alpha * repeats, BANNED)
    return torch.full_like(logits, BANNED).scatter(0, candidates, score[candidates])


def _on(logits: Tensor, array: npt.NDArray[np.generic]) -> Tensor:
    """Copy an array to the logits' device, without waiting for it."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(logits.device, non_blocking=True) if logits.device.type == "cuda" else host


def _of_rows(logits: Tensor, arrays: Mapping[int, npt.NDArray[np.generic]]) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each row and its array [V] on the logits' device, to which all go in one copy."""
    if arrays:
        yield from zip(arrays, _on(logits, np.stack(list(arrays.values()))), strict=True)


def typical(probs: Tensor, mass: float | Tensor) -> Tensor:
    """Select the tokens whose surprise -log p is nearest to the entropy, until they reach the given mass together.

    Args:
        probs: [..., V], not negative; need not sum to 1. Zeros are never kept, and at least one token is.
        mass: above 0; a number, or [..., 1].

    Returns: [..., V] bool.
    """
    probs = probs / probs.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
    distance = (-probs.log() - entropy).abs()
    nearest, order = distance.sort(dim=-1)
    before = probs.gather(-1, order).cumsum(dim=-1) < mass
    last = before.sum(dim=-1, keepdim=True).clamp_max(probs.shape[-1] - 1)
    stays: Tensor = (distance <= nearest.gather(-1, last)) & (probs > 0)
    return stays
