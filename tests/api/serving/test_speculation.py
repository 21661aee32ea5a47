"""Speculation as clients see it: a real engine on the tiny int4 llama behind HTTP."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from all_drafts import every_draft
from server import eventually, server

from api import app
from api.auth.key_store import KeyStore
from api.auth.principal import Scope

KIND = {"quantization": "int4", "dtype": "float32", "kernels": "numba"}
PROMPT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def served(model: Path, adapter_dirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """`ask(prompt, **body)` returns a text and what its usage says of speculation."""
    folder = tmp_path_factory.mktemp("speculation") / "store"
    adapters = {"one": adapter_dirs["one"], "two": adapter_dirs["two"]}
    with every_draft(), server(model, folder, adapters, **KIND) as served:

        def ask(prompt: str, path: str = "completions", **body: Any) -> tuple[str, dict[str, int]]:
            given = {"model": "one", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            answer = served.post(f"/v1/{path}", **given | body).raise_for_status().json()
            return answer["choices"][0]["text"], answer["usage"]["lorasrv"]["speculation"]

        served.ask = ask
        yield served


def test_an_answer_is_the_same_with_and_without(served: SimpleNamespace) -> None:
    plain, figures = served.ask(PROMPT, speculation=False)
    assert figures == {"steps": 40, "drafted": 0, "accepted": 0}
    for options in (True, {}, {"max_draft": 3}, {"remember": True}, {"drafters": ["corpus"]}):
        text, figures = served.ask(PROMPT, speculation=options)
        assert text == plain
        assert figures["steps"] == 40 - figures["accepted"]
    assert 0 < figures["accepted"] <= figures["drafted"], "it has said so before"


def test_a_prediction_saves_steps(served: SimpleNamespace) -> None:
    plain, _ = served.ask(PROMPT, model="two", speculation=False)
    parts = [{"type": "text", "text": plain[:9]}, {"type": "text", "text": plain[9:]}]
    only = {"drafters": ["prediction"], "remember": False}
    for content in (plain, parts):
        prediction = {"type": "content", "content": content}
        text, figures = served.ask(PROMPT, model="two", prediction=prediction, speculation=only)
        assert text == plain
        assert figures["accepted"] > 3
    text, figures = served.ask(PROMPT, model="two", prediction=prediction, speculation=False)
    assert (text, figures["drafted"]) == (plain, 0)


def test_choices_and_streams_say_so_too(served: SimpleNamespace) -> None:
    _, figures = served.ask("again and again and again", n=3, temperature=1.0, seed=5)
    assert figures["steps"] + figures["accepted"] == 120
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
    lines = served.post("/v1/completions", **body, stream_options={"include_usage": True}).text.split("\n\n")
    assert '"speculation":{"steps":' in lines[-3]


def test_what_cannot_be_drafted_runs_plain_and_says_so(served: SimpleNamespace) -> None:
    body = {"temperature": 0, "max_tokens": 8, "n": 2, "use_beam_search": True, "ignore_eos": True}
    assert served.ask(PROMPT, **body)[1]["drafted"] == 0


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"speculation": {"drafters": ["magic"]}}, "speculation.drafters", "grammar, prediction, lookup, corpus"),
        ({"speculation": {"max_draft": 17}}, "speculation.max_draft", "16"),
        ({"speculation": {"max_drafts": 1}}, "speculation.max_drafts", "not permitted"),
        ({"speculation": "yes"}, "speculation", ""),
        ({"prediction": {"type": "tokens", "content": "x"}}, "prediction.type", "content"),
        ({"prediction": {"type": "content"}}, "prediction.content", ""),
        ({"prediction": {"type": "content", "content": "x" * 100_000}}, "prediction", "context"),
    ],
)
def test_bad_values_are_named(served: SimpleNamespace, body: dict[str, Any], param: str, words: str) -> None:
    answer = served.post("/v1/completions", model="one", prompt="x", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"].startswith(param)
    assert words in error["message"]


def test_answers_go_with_their_adapter(served: SimpleNamespace) -> None:
    only = {"speculation": {"drafters": ["corpus"], "remember": True}}
    served.ask(PROMPT, model="two", **only)
    for _ in range(3):
        *_, figures = served.ask(PROMPT, model="two", **only)
    assert figures["accepted"] > 20
    size = served.engine.metrics.snapshot().corpus_bytes
    served.http.delete("/v1/adapters/two").raise_for_status()
    eventually(lambda: served.ask("x", speculation=False) and served.engine.metrics.snapshot().corpus_bytes < size)


def test_answers_to_one_key_never_draft_for_another(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "COLLECT_EVERY_S", 0.05)
    keys = KeyStore(tmp_path / "store")
    ann, bob = (keys.create(name, frozenset({Scope.INFER}))[1] for name in ("ann", "bob"))
    with every_draft(), server(model, tmp_path / "store", **KIND) as served:
        body = {
            "model": served.engine.model_name,
            "prompt": PROMPT,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
        }

        def accepted(secret: str, **more: Any) -> int:
            only = {"speculation": {"drafters": ["corpus"]}}
            answer = served.http.post(
                "/v1/completions", json=body | only | more, headers={"authorization": f"Bearer {secret}"}
            )
            return int(answer.raise_for_status().json()["usage"]["lorasrv"]["speculation"]["accepted"])

        assert (accepted(ann), accepted(bob)) == (0, 0)
        assert accepted(ann) > 20
        assert accepted(bob) > 20
        # Under a salt of its own nothing is kept unless that is asked for.
        assert [accepted(ann, cache_salt="s") for _ in range(2)] == [0, 0]
        kept = {"speculation": {"drafters": ["corpus"], "remember": True}}
        assert accepted(ann, cache_salt="s", **kept) == 0 < accepted(ann, cache_salt="s")
        size = served.engine.metrics.snapshot().corpus_bytes
        keys.revoke("bob")
        # The figures are those of the last step.
        metrics = served.engine.metrics
        eventually(lambda: not accepted(ann, speculation=False) and metrics.snapshot().corpus_bytes < size)
        assert accepted(ann) > 20
