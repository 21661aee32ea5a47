"""Speculation as clients see it: a real engine on the tiny int4 llama behind HTTP."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from all_drafts import every_draft
from prometheus_client.parser import text_string_to_metric_families
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
        assert figures["drafted"] <= 3 * figures["steps"] or options != {"max_draft": 3}
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


def test_metrics_compare_what_was_expected_with_what_was_found(served: SimpleNamespace) -> None:
    def totals() -> Counter[str]:
        counted = Counter[str]()
        for family in text_string_to_metric_families(served.http.get("/metrics").text):
            for sample in family.samples:
                if "draft" in family.name:
                    counted[family.name.removeprefix("lorasrv_")] += sample.value
                    depths.add(sample.labels.get("depth"))
                    assert 0.0 <= float(sample.labels.get("chance", 0)) <= 0.9
        return counted

    depths = set[str | None]()
    served.ask(PROMPT, model="two")
    before = totals()
    _, figures = served.ask(PROMPT, model="two")
    eventually(lambda: totals()["draft_tokens"] - before["draft_tokens"] == figures["drafted"])
    found = totals() - before
    assert {"1", "16"} <= depths
    for name in ("draft_tokens", "draft_tokens_by_chance"):
        assert (found[name], found[f"accepted_{name}"]) == (figures["drafted"], figures["accepted"])
    assert 0 < found["expected_draft_tokens_by_chance"] < figures["drafted"]


def test_what_cannot_be_drafted_runs_plain_and_says_so(served: SimpleNamespace) -> None:
    body = {"temperature": 0, "max_tokens": 8, "n": 2, "use_beam_search": True, "ignore_eos": True}
    assert served.ask(PROMPT, **body)[1]["drafted"] == 0


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"speculation": {"drafters": ["magic"]}}, "speculation.drafters", "grammar, prediction, lookup, corpus"),
        ({"speculation": {"max_draft": 17}}, "speculation.max_draft", "16"),
        ({"speculation": {"max_draft": -1}}, "speculation.max_draft", "0"),
        ({"speculation": {"max_drafts": 1}}, "speculation.max_drafts", "is no field here"),
        ({"speculation": {"drafters": "lookup"}}, "speculation.drafters", "list"),
        ({"speculation": {"remember": "perhaps"}}, "speculation.remember", "true or false"),
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
    def figures(remember: bool) -> dict[str, int]:
        told: dict[str, int]
        _, told = served.ask(
            PROMPT, model="two", cache_salt="s", speculation={"drafters": ["corpus"], "remember": remember}
        )
        return told

    forgotten, kept = [figures(False) for _ in range(2)], [figures(True) for _ in range(4)]
    assert [told["accepted"] for told in forgotten] == [0, 0]
    assert kept[0]["accepted"] == 0 < 20 < kept[-1]["accepted"]
    size = served.engine.metrics.stats().corpus_bytes
    served.http.delete("/v1/adapters/two").raise_for_status()
    eventually(lambda: served.ask("x", speculation=False) and served.engine.metrics.stats().corpus_bytes < size)


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
        size = served.engine.metrics.stats().corpus_bytes
        keys.revoke("bob")
        # The figures are those of the last step.
        metrics = served.engine.metrics
        eventually(lambda: not accepted(ann, speculation=False) and metrics.stats().corpus_bytes < size)
        assert accepted(ann) > 20
