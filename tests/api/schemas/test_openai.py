"""Fields that change how tokens are chosen, from a body to the engine: names, types, ranges, and what is refused."""

import itertools
from typing import Any

import pytest

from lorasrv.sampling_params import SamplingParams

FIELDS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1.25,
    "repetition_penalty": 1.5,
    "typical_p": 0.25,
    "min_tokens": 3,
    "watermark": True,
    "fsd_alpha": 0.5,
    "fsd_ngram": 2,
}


def _sampling(engine: Any) -> SamplingParams:
    return engine.added[-1].sampling


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_every_field_reaches_the_engine(server, engine, route: str) -> None:
    response = getattr(server, route)(**FIELDS, temperature=0, logit_bias={"7": -100, "42": 3.5}, max_tokens=9)
    assert response.status_code == 200
    sampling = _sampling(engine)
    assert {name: getattr(sampling, name) for name in FIELDS} == FIELDS
    assert sampling.logit_bias == ((7, -100.0), (42, 3.5))


def test_null_and_nothing_are_the_defaults(server, engine) -> None:
    nothing = dict.fromkeys((*FIELDS, "logit_bias"))
    assert server.chat(**nothing).status_code == server.chat().status_code == 200
    assert engine.added[0].sampling == engine.added[1].sampling == SamplingParams()
    assert server.chat(logit_bias={}).status_code == 200
    assert not _sampling(engine).changes_logits


def test_fsd_is_greedy_unless_told_otherwise(server, engine) -> None:
    assert server.chat(fsd_alpha=0.4).status_code == 200
    assert _sampling(engine).is_greedy
    assert server.chat(fsd_alpha=0).status_code == 200
    assert not _sampling(engine).is_greedy
    refused = server.chat(fsd_alpha=0.4, temperature=0.7)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "fsd_alpha")


WRONG = [
    *itertools.product(("presence_penalty", "frequency_penalty"), (-2.01, 2.5, 1e300, "1", True, [1])),
    *itertools.product(("repetition_penalty",), (0, -1, 1e-40, 101, "1.1", False)),
    *itertools.product(("typical_p",), (0, -0.5, 1.0001, "0.5")),
    *itertools.product(("min_tokens",), (-1, 17, 2**31, 2**70, 1.5, "3", True)),
    *itertools.product(("fsd_alpha",), (-0.1, 1.1, "1")),
    *itertools.product(("fsd_ngram",), (0, 9, 2.5)),
    *itertools.product(("watermark",), (1, "true", {})),
    *itertools.product(
        ("logit_bias",),
        (
            {"-1": 1},
            {"5.0": 1},
            {"five": 1},
            {"": 1},
            {" 5": 1},
            {"٥": 1},
            {"9" * 11: 1},
            {"9" * 5000: 1},
            {"5": 1, "05": 2},
            {"5": 100.1},
            {"5": -101},
            {"5": "1"},
            {"5": None},
            {"5": True},
            [5],
            [[5, 1.0]],
            {str(token): 0 for token in range(1025)},
        ),
    ),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_out_of_range_is_400_and_names_the_field(server, engine, field: str, value: Any) -> None:
    fields = {"temperature": 0} if field.startswith("fsd") else {}
    response = server.chat(max_tokens=16, **fields, **{field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0] == field
    assert field in error["message"]
    assert not engine.added


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty", "typical_p"])
def test_what_is_no_number_is_400(server, field: str, text: str) -> None:
    body = f'{{"model": "tiny-base", "prompt": "a", "{field}": {text}}}'
    response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
