"""Fields of a request's sampling: their ranges, what contradicts what, and what follows from them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import SamplingParams

NO_NUMBERS = (math.nan, math.inf, -math.inf, -2.5, 1e9)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (-1.0, math.nan, 1e9)),
        ("top_p", (0.0, 1.1)),
        ("top_k", (-1, 2**40)),
        ("min_p", (1.5,)),
        ("max_tokens", (0, 2**31)),
        ("seed", (2**64,)),
        ("stop", (("",), ("x",) * 17, ("x" * 257,))),
        ("presence_penalty", NO_NUMBERS),
        ("frequency_penalty", NO_NUMBERS),
        ("repetition_penalty", (*NO_NUMBERS, 0.0, 1e-40)),
        ("typical_p", (*NO_NUMBERS, 0.0, 1.01)),
        ("fsd_alpha", NO_NUMBERS),
        ("fsd_ngram", (0, 9)),
        ("min_tokens", (-1, 2**31)),
        (
            "logit_bias",
            (
                *(((-1, 0.0),), ((2**40, 0.0),), ((1, math.nan),), ((1, -math.inf),), ((1, 100.5),)),
                *(((1, 1.0), (1, 2.0)), tuple((token, 1.0) for token in range(1025))),
            ),
        ),
    ],
)
def test_out_of_range_names_the_field(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{"temperature": 0.0, field: value})
        assert caught.value.param == field, value
        assert str(caught.value).startswith(field), value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("stop", ("keeper", ["x", 1], None)),
        ("logit_bias", ({5: 1.0}, ((5,),), None)),
        ("temperature", (None, "1", True)),
        *((name, (2.5, True, "2")) for name in ("max_tokens", "top_k", "seed", "logprobs", "min_tokens")),
    ],
)
def test_a_wrong_type_names_the_field(field: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=f"^{field} must be ") as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, value


def test_numbers_of_numpy_are_numbers() -> None:
    assert SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(1)).top_k == 3


def test_fields_that_contradict_each_other() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens must be at most the 4 tokens of the answer"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(InvalidRequest, match="fsd_alpha needs temperature 0"):
        SamplingParams(fsd_alpha=0.5)
    assert SamplingParams(max_tokens=4, min_tokens=4, temperature=1e-40, fsd_alpha=0.5).is_greedy


def test_the_flag_follows_the_fields() -> None:
    assert not SamplingParams(top_k=3, typical_p=0.5).changes_logits
    changed = replace(SamplingParams(), presence_penalty=0.5)
    assert changed.changes_logits
    assert not replace(changed, presence_penalty=0.0).changes_logits


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_a_text_that_is_too_long_is_told_with_what_would_be_right(field: str) -> None:
    SamplingParams(**{field: ("x" * 256,)})
    with pytest.raises(InvalidRequest, match=rf"^{field} must have texts of at most 256 bytes$"):
        SamplingParams(**{field: ("x" * 257,)})
