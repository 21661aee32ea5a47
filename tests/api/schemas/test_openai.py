"""Fields that change how tokens are chosen, from a body to the engine: names, types, ranges, and what is refused."""

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


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty", "typical_p"])
def test_what_is_no_number_is_400(server, field: str, text: str) -> None:
    body = f'{{"model": "tiny-base", "prompt": "a", "{field}": {text}}}'
    response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
