"""The watermark: green tokens are what key and token before say, and text that was made with it shows it."""

import math
import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from lorasrv.errors import ConfigError
from lorasrv.sampling.logits_processors import SamplingMetadata
from lorasrv.sampling.sampler import sample
from lorasrv.sampling.watermark import WatermarkVerdict, detect, green
from lorasrv.sampling_params import SamplingParams, Watermark

V = 500
ALL, MANY = (np.arange(size, dtype=np.uint32) for size in (V, 50_000))


def _text(length: int, watermark: Watermark | bool, seed: int = 0) -> list[int]:
    """Drawn from the same flat logits at every step."""
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed))
    params, ids = SamplingParams(seed=seed, watermark=watermark), [1]
    for count in range(length):
        ids += sample(logits, [SamplingMetadata(params, count, ids)])
    return ids[1:]


class TestGreen:
    def test_never_changes(self) -> None:
        """Text that was marked years ago must still be found."""
        first = [np.flatnonzero(green(Watermark(), previous, ALL))[:8].tolist() for previous in (0, 1, 49151)]
        assert first == [[3, 4, 5, 7, 10, 13, 14, 15], [0, 2, 4, 6, 7, 9, 10, 11], [2, 6, 7, 9, 12, 13, 21, 22]]

    @pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5, 0.9])
    def test_is_gamma_of_the_vocabulary(self, gamma: float) -> None:
        shares = [green(Watermark(gamma=gamma), previous, MANY).mean() for previous in range(30)]
        sigma = math.sqrt(gamma * (1 - gamma) / len(MANY))
        assert np.abs(np.array(shares) - gamma).max() < 5 * sigma

    def test_depends_on_the_token_before_and_on_the_key(self) -> None:
        ours = [green(Watermark(key=key), previous, MANY) for key in (1, 2) for previous in (0, 1, 2)]
        assert all(abs((one == other).mean() - 0.5) < 0.02 for one, other in combinations(ours, 2))

    def test_of_a_token_whatever_else_is_asked(self) -> None:
        every = green(Watermark(), 7, ALL)
        assert [bool(green(Watermark(), 7, ALL[i : i + 1])[0]) for i in range(50)] == every[:50].tolist()


class TestDetect:
    def test_finds_marked_text_and_no_other(self) -> None:
        marked, plain = _text(120, True), _text(120, False)
        found = detect(marked, Watermark())
        assert found.verdict is WatermarkVerdict.WATERMARKED
        assert found.p_value < 1e-8
        assert detect(plain, Watermark()).verdict is WatermarkVerdict.NOT_WATERMARKED
        assert detect(marked, Watermark(key=99)).verdict is WatermarkVerdict.NOT_WATERMARKED

    def test_finds_it_with_every_gamma(self) -> None:
        for gamma in (0.25, 0.75):
            mark = Watermark(gamma=gamma, delta=5.0, key=3)
            assert detect(_text(200, mark), mark).verdict is WatermarkVerdict.WATERMARKED

    def test_the_numbers_are_those_of_the_definition(self) -> None:
        ids = _text(80, True)
        pairs = set(pairwise(ids))
        num_green = sum(bool(green(Watermark(), a, np.array([b], dtype=np.uint32))[0]) for a, b in pairs)
        found = detect(ids, Watermark())
        assert (found.green, found.scored) == (num_green, len(pairs))
        assert found.z_score == pytest.approx((num_green - len(pairs) / 2) / math.sqrt(len(pairs) / 4))
        assert found.p_value == pytest.approx(0.5 * math.erfc(found.z_score / math.sqrt(2)))

    def test_repeating_is_no_evidence(self) -> None:
        ids = _text(12, True)
        assert detect(ids * 50, Watermark()).scored <= 12 + 1

    @pytest.mark.parametrize("ids", [[], [5], [5, 6], list(range(16))])
    def test_too_short_to_tell(self, ids: Sequence[int]) -> None:
        assert detect(ids, Watermark()).verdict is WatermarkVerdict.TOO_SHORT

    def test_random_text_is_rarely_taken_for_marked(self) -> None:
        chance = random.Random(1)
        scores = [detect([chance.randrange(V) for _ in range(60)], Watermark()).z_score for _ in range(150)]
        assert abs(np.mean(scores)) < 0.3
        assert 0.8 < np.std(scores) < 1.2


NO_RANGE = ("gamma", 0.0), ("gamma", 1.0), ("gamma", math.nan), ("delta", 0.0), ("delta", math.inf), ("key", -1)


@pytest.mark.parametrize(("name", "value"), NO_RANGE)
def test_out_of_range_names_the_option(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--watermark-{name}"):
        Watermark(**{name: value})


def test_the_key_is_not_shown() -> None:
    assert "1234567" not in repr(Watermark(key=1234567))
