"""Frustratingly simple decoding: of the likeliest tokens, the one that repeats the text so far least. No torch.

Yang et al. 2023, "A Frustratingly Simple Decoding Method for Neural Text Generation" (arXiv:2305.12675), the discrete
form, as Inferflow has it: an n-gram model of the text so far, which likes what has been said, votes against the model.
"""

import numpy as np
import numpy.typing as npt

DEFAULT_CANDIDATES = 6
SMOOTHING = 0.9


def repetition(history: npt.NDArray[np.int64], ngram: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """[V]: how much each token would repeat the text so far, from 0 to 1.

    The longest context that the token has followed before, of n - 1 tokens, weighs most (0.9 of the whole); what is
    left over goes to the next shorter one, where it has followed that. A context's vote is count / (total + 1), that of
    no context count / total. A text of fewer than n - 1 tokens repeats nothing.

    Args:
        history: [T] prompt and answer so far.
        ngram: n, at least 1.
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
    """The tokens that came after the last `length` tokens wherever they stood before."""
    if length == 0:
        return history
    found = np.ones(len(history) - length, dtype=np.bool_)
    for back in range(1, length + 1):
        found &= history[length - back : len(history) - back] == history[-back]
    return history[length:][found]
