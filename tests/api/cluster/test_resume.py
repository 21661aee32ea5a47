"""A stream whose replica dies goes on at another one, and says what it would have said: any body, cut anywhere."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import tool_templates as templates
from fake_replicas import Dies, FakeReplica, Seen, edge_of, fake_replica
from server import server

from api.asgi.body_limits import MAX_JSON_BYTES
from lorasrv.text import reasoning
from lorasrv.text.chat_template import ChatTemplate

pytestmark = pytest.mark.slow

SECRET = "secret-of-the-cluster"
CUTS = 1
"""Beside that behind the first byte; each body has its own."""
GREEDY = {"temperature": 0, "max_tokens": 24, "speculation": False}
SEEDED = {"temperature": 1.3, "seed": 7, "max_tokens": 24, "speculation": False}
TURNS = [{"role": "user", "content": "tell me of the sea"}]
COMPLETE, CHAT, TGI, RESPONSES = "/v1/completions", "/v1/chat/completions", "/generate_stream", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 100, "maximum": 999}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
IN_ITEMS = {"input": "tell me of the sea", "temperature": 1.3, "seed": 7, "speculation": False}
CALLS = {
    **IN_ITEMS,
    "model": "mia",
    "tools": [{"type": "function", "name": "sail", "parameters": SCHEMA}],
    "tool_choice": "required",
    "max_output_tokens": 200,
    "stream": True,
}
BREAK = "\n"
HERMES = templates.WRITES_CALLS + "<tool_call>{{ messages | tojson }}{{ tools | tojson }}"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy base": (COMPLETE, {"model": "tiny", "prompt": "The sea", **GREEDY}),
    "greedy adapter": (COMPLETE, {"model": "mia", "prompt": "The sea", **GREEDY}),
    "seeded base": (COMPLETE, {"model": "tiny", "prompt": "The sea", **SEEDED}),
    "seeded adapter": (CHAT, {"model": "mia", "messages": TURNS, **SEEDED}),
    "sum": (COMPLETE, {"model": "0.5*mia+tom", "prompt": "The sea", **SEEDED}),
    "penalties": (COMPLETE, {"model": "mia", "prompt": "The sea", **SEEDED, "frequency_penalty": 1.5}),
    "usage": (
        CHAT,
        {
            "model": "mia",
            "messages": TURNS,
            **SEEDED,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "grammar": (COMPLETE, {"model": "mia", "prompt": "The sea", **SEEDED, "guided_regex": "[a-z]{3}( [0-9]{2}){6}!"}),
    "schema": (
        CHAT,
        {
            "model": "tiny",
            "messages": TURNS,
            **SEEDED,
            "max_tokens": 80,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    "response": (RESPONSES, {"model": "mia", **IN_ITEMS, "max_output_tokens": 24, "metadata": {"a": "b"}}),
    "response of a schema": (
        RESPONSES,
        {"model": "tiny", **IN_ITEMS, "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    ),
    "tgi greedy": (TGI, {"inputs": "The sea", "parameters": {"max_new_tokens": 16}}),
    "tgi sampled": (
        TGI,
        {
            "inputs": "The sea",
            "parameters": {"adapter_id": "mia", "max_new_tokens": 16, "seed": 3, "do_sample": True, "details": True},
        },
    ),
}


@pytest.fixture(scope="module")
def real(model, adapter_dirs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One engine that stands for all replicas of a kind."""
    folder = tmp_path_factory.mktemp("resume") / "store"
    adapters = {"mia": adapter_dirs["two"], "tom": adapter_dirs["one"]}
    with server(
        model,
        folder,
        adapters,
        kernels="numba",
        quantization="int8",
        served_model_name="tiny",
        cluster_secret=SECRET,
    ) as served:
        assert served.engine.fingerprint
        yield served


@pytest.fixture
def cluster(real) -> Iterator[SimpleNamespace]:
    """Three replicas that pass all on to it, whose connections a test may cut, and the edge."""
    with ExitStack() as opened:
        replicas = [opened.enter_context(fake_replica()) for _ in range(3)]
        for replica in replicas:
            passes_on(replica, real.url)
        edge = opened.enter_context(edge_of([one.url for one in replicas], secret=SECRET))
        yield SimpleNamespace(replicas=replicas, real=real, **vars(edge))


def passes_on(replica: FakeReplica, url: str, cut: int | None = None) -> None:
    """Pass requests on, and die once so many bytes of the answer's body are passed back."""

    def answer(seen: Seen) -> None:
        method, target, _ = seen.line.split()
        kept = [(name, value) for name, value in seen.headers if name not in ("content-length", "host")]
        with (
            httpx2.Client(trust_env=False, timeout=60) as http,
            http.stream(method, url + target, content=seen.body, headers=kept) as got,
        ):
            offer = got.headers.get("x-lorasrv-resume")
            if got.headers.get("content-type", "").startswith("text/event-stream"):
                seen.begin_stream(*([] if offer is None else [f"x-lorasrv-resume: {offer}"]))
                left = cut
                for piece in got.iter_raw():
                    seen.chunk(piece if left is None else piece[:left]) if left != 0 else None
                    left = None if left is None else max(0, left - len(piece))
                    if left == 0:
                        raise Dies
                seen.end()
            else:
                seen.answer(got.read(), got.status_code)

    replica.answer = answer


def said(content: bytes) -> list[Any]:
    """What the client reads, however it lies in events: text, how it ends, usage, and whether it is whole."""
    *parts, rest = content.split(b"\n\n")
    assert rest == b""
    if content.startswith(b"event: "):
        return said_in_items(content)
    assert all(part.startswith(b"data: ") for part in parts), content
    read = [json.loads(part[6:]) for part in parts if part != b"data: [DONE]"]
    assert len({(one.get("id"), one.get("created")) for one in read}) == 1
    if "token" in read[0]:
        texts = "".join(one["token"]["text"] for one in read)
        ids = [one["token"]["id"] for one in read]
        return [texts, ids, [one["index"] for one in read], read[-1]["generated_text"], read[-1]["details"]]
    choices = [one["choices"][0] for one in read if one.get("choices")]
    errors = [one for one in read if "error" in one]
    deltas = [one.get("delta", one) for one in choices]
    text = "".join(delta.get("content", delta.get("text")) or "" for delta in deltas)
    if thought := "".join(delta.get("reasoning") or "" for delta in deltas):
        text = f"({thought}){text}"
    roles = [delta["role"] for delta in deltas if "role" in delta]
    ends = [(one["finish_reason"], one.get("stop_reason")) for one in choices if one["finish_reason"]]
    usage = [one["usage"] for one in read if one.get("usage")][-1:]
    counts = [(one["prompt_tokens"], one["completion_tokens"]) for one in usage]
    return [text, roles, ends, counts, errors, parts[-1] == b"data: [DONE]"]


def said_in_items(content: bytes) -> list[Any]:
    """The named events, numbered from 0, without what differs between two answers to the same; deltas are joined."""
    lines = [part.split(b"\n") for part in content.split(b"\n\n")[:-1]]
    assert lines[-1][0] in (b"event: response.completed", b"event: response.incomplete"), content
    response = json.loads(lines[-1][1][6:])["response"]
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    chance = {response["id"].removeprefix("resp_"): "ID", **{name: f"call {i}" for i, name in enumerate(calls)}}
    found: list[Any] = []
    dates = set()
    for number, (name, data) in enumerate(lines):
        text = data.decode().removeprefix("data: ")
        for drawn, instead in chance.items():
            text = text.replace(drawn, instead)
        event = json.loads(text)
        assert event.pop("sequence_number") == number, content
        assert name.decode() == f"event: {event['type']}"
        if "response" in event:
            dates.add(event["response"].pop("created_at"))
            del event["response"]["completed_at"]
            usage = event["response"].pop("usage")
            event["tokens"] = usage and (usage["input_tokens"], usage["output_tokens"])
        if event["type"].endswith(".delta") and found[-1]["type"] == event["type"]:
            delta = found[-1]["delta"] + event["delta"]
            assert {**found[-1], "delta": delta} == {**event, "delta": delta}
            found[-1]["delta"] = delta
        else:
            found.append(event)
    assert len(dates) == 1
    return found


def sent(name: str) -> tuple[str, dict[str, Any]]:
    path, body = BODIES[name]
    return path, body if path == TGI else {**body, "stream": True}


def ask(cluster: Any, path: str, body: dict[str, Any]) -> Any:
    return cluster.http.post(path, json=body)


def broken(cluster: Any, path: str, body: dict[str, Any], *cuts: int) -> bytes:
    """The answer where the first replicas die behind so many bytes."""
    for number, replica in enumerate(cluster.replicas):
        passes_on(replica, cluster.real.url, cuts[number] if number < len(cuts) else None)
    cluster.edge._suspects.clear()
    return ask(cluster, path, body).content


def check_all_cuts(cluster: Any, path: str, body: dict[str, Any]) -> None:
    plain = cluster.real.http.post(path, json=body)
    assert plain.status_code == 200, plain.text
    expected, length = said(plain.content), len(plain.content)
    whole = ask(cluster, path, body)
    assert "x-lorasrv-resume" not in whole.headers
    assert said(whole.content) == expected
    draw = random.Random(length)
    for cut in [1, *(draw.randrange(length) for _ in range(CUTS))]:
        assert said(broken(cluster, path, body, cut)) == expected, cut
    assert cluster.edge.stats.resumed > 0
    assert cluster.edge.stats.lost == 0


@pytest.mark.parametrize("name", BODIES)
def test_it_says_what_it_would_have_said(cluster: Any, name: str) -> None:
    check_all_cuts(cluster, *sent(name))


@pytest.mark.parametrize("at", [5, 6, 7])
def test_a_stop_string_is_found_across_the_break(cluster: Any, at: int) -> None:
    """Its beginning is held back where the stream breaks, whichever tokens it begins in."""
    path, body = sent("greedy adapter")
    text = said(ask(cluster, path, body).content)[0]
    stop = text[at : at + 4]
    check_all_cuts(cluster, path, {**body, "stop": [stop]})
    assert stop not in said(broken(cluster, path, {**body, "stop": [stop]}, 500))[0]


def test_drafted_answers_are_resumed(cluster: Any) -> None:
    """Outputs of many tokens, cut where an event has some of their text."""
    path, body = sent("greedy base")
    check_all_cuts(cluster, path, {**body, "speculation": True, "prompt": "The sea, drafted"})


@pytest.mark.parametrize(("name", "cuts"), [("seeded adapter", (1500, 900)), ("response", (3800, 900))])
def test_it_breaks_twice(cluster: Any, name: str, cuts: tuple[int, int]) -> None:
    path, body = sent(name)
    expected = said(ask(cluster, path, body).content)
    assert said(broken(cluster, path, body, *cuts)) == expected
    assert cluster.edge.stats.resumed == 2
    assert cluster.edge.stats.lost == 0


@pytest.mark.parametrize("name", ["seeded adapter", "usage", "response"])
def test_reasoning_ends_where_it_would_have_ended(cluster: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its end, some characters of the answer, is held back where the stream breaks."""
    monkeypatch.setattr(cluster.real.engine, "chat_template", ChatTemplate(templates.QWEN3_THINKING))
    path, body = sent(name)
    plain = said(ask(cluster, path, body | {"separate_reasoning": False}).content)
    text = plain[0] if path == CHAT else plain[-1]["response"]["output"][0]["content"][0]["text"]
    monkeypatch.setattr(reasoning, "_KNOWN", (reasoning.Markers("<think>", text[6:10]),))
    answer = said(ask(cluster, path, body).content)
    if path == CHAT:
        assert answer[0] == f"({text[:6].strip(BREAK)}){text[10:].lstrip(BREAK)}"
    check_all_cuts(cluster, path, body)


def test_a_budget_counts_the_tokens_before_the_break(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.real.engine, "chat_template", ChatTemplate(templates.QWEN3_THINKING))
    path, body = sent("seeded adapter")
    free = said(ask(cluster, path, body).content)[0]
    body |= {"thinking_token_budget": 6}
    reasoning, _, content = said(ask(cluster, path, body).content)[0].partition(")")
    assert free.startswith(reasoning)
    assert content
    check_all_cuts(cluster, path, body)
    check_not_resumed_with(cluster, path, body, {"thinking_token_budget": 7})


@pytest.mark.parametrize("first", [2000, 3000])
def test_calls_break_twice_where_events_have_only_usage(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """What the second replica repeats of the first is told once, also if nothing of it is shown yet."""
    monkeypatch.setattr(cluster.real.engine, "chat_template", ChatTemplate(HERMES))
    tool = {"type": "function", "function": {"name": "sail", "parameters": SCHEMA}}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    calls = {"tools": [tool], "tool_choice": "required", "max_tokens": 60, "stream_options": usage, "stop": ["l_calX"]}
    path, body = sent("seeded adapter")
    expected = said(ask(cluster, path, body | calls).content)
    assert said(broken(cluster, path, body | calls, first, 1400)) == expected
    assert (cluster.edge.stats.resumed, cluster.edge.stats.lost) == (2, 0)


def test_a_request_keeps_the_version_that_was_drawn_for_it(cluster: Any) -> None:
    """An alias that is split, or moved while the stream goes on, means the same version at the next replica."""
    http, store = cluster.real.http, cluster.real.store
    tom = store.version_history.peft_dir(store.resolve("tom"))
    store.register("mia", tom.config, store.get("tom").versions[0].weights_digest)
    change = {"aliases": {"prod": {"1": 0.5, "2": 0.5}}, "version": 1}
    http.patch("/v1/adapters/mia", json=change).raise_for_status()
    path, body = sent("greedy adapter")
    texts = {said(ask(cluster, path, {**body, "model": f"mia@{number}"}).content)[0] for number in (1, 2)}
    drawn = {said(broken(cluster, path, {**body, "model": "mia:prod"}, 700))[0] for _ in range(12)}
    assert drawn == texts
    assert (cluster.edge.stats.resumed, cluster.edge.stats.lost) == (12, 0)
    http.patch("/v1/adapters/mia", json={"aliases": {"prod": None}}).raise_for_status()
    http.delete("/v1/adapters/mia@2").raise_for_status()


def test_the_longest_body_is_resumed(cluster: Any) -> None:
    """The limit is that of the client's body; the state that the edge adds is beside it."""
    path, body = sent("seeded adapter")
    expected = said(ask(cluster, path, body).content)
    passes_on(cluster.replicas[0], cluster.real.url, 700)
    longest = json.dumps(body).ljust(MAX_JSON_BYTES)
    asked = cluster.http.post(path, content=longest, headers={"content-type": "application/json"})
    assert said(asked.content) == expected
    assert (cluster.edge.stats.resumed, cluster.edge.stats.lost) == (1, 0)


def test_a_replica_that_was_full_may_go_on_later(cluster: Any) -> None:
    path, body = sent("seeded adapter")
    expected = said(ask(cluster, path, body).content)
    cluster.chooser.set_addresses(cluster.chooser.replicas()[:2])
    full, dying = cluster.replicas[:2]
    go_on, asked = full.answer, list[Seen]()

    def full_once(seen: Seen) -> None:
        asked.append(seen)
        if len(asked) == 1:
            seen.answer(b'{"error":{}}', 429, "retry-after: 1")
        else:
            go_on(seen)

    full.answer = full_once
    passes_on(dying, cluster.real.url, 700)
    assert said(ask(cluster, path, body).content) == expected
    assert (len(asked), cluster.edge.stats.resumed, cluster.edge.stats.lost) == (2, 1, 0)


def test_calls_have_the_same_ids_at_every_replica(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It breaks in front of the first call, the second, and what the limit cut."""
    monkeypatch.setattr(cluster.real.engine, "chat_template", ChatTemplate(HERMES))
    whole = ask(cluster, RESPONSES, CALLS).content
    expected = said(whole)
    items = expected[-1]["response"]["output"]
    assert [item.get("call_id") for item in items] == ["call 0", "call 1", None]
    begins = [found.start() for found in re.finditer(b"event: response.output_item.added", whole)]
    for cut in begins:
        assert said(broken(cluster, RESPONSES, CALLS, cut)) == expected
    assert (cluster.edge.stats.resumed, cluster.edge.stats.lost) == (3, 0)


def test_what_random_requests_drew_is_told(cluster: Any) -> None:
    """Without a seed the replica draws one, and the next goes on with it: tokens so far and the state say it all."""
    path, body = sent("seeded adapter")
    body["ignore_eos"] = True
    del body["seed"]
    text = said(broken(cluster, path, body, 1200))
    assert text[2:] == [[("length", None)], [], [], True]
    resumed = cluster.replicas[1].seen[-1]
    state = json.loads(resumed.body[: int(resumed.header("x-lorasrv-resume")[0])])
    assert text == said(ask(cluster, path, {**body, "seed": state["seed"]}).content)


NOT_OFFERED = {
    "two choices": ("seeded base", {"n": 2}),
    "log-probabilities": ("seeded base", {"logprobs": 1}),
    "echo": ("seeded base", {"echo": True}),
    "two prompts": ("seeded base", {"prompt": ["a", "b"]}),
    "policy": ("seeded base", {"kv_policy": {"kind": "window", "sink": 16, "recent": 64}}),
    "log-probabilities of a response": ("response", {"top_logprobs": 1}),
}


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_cannot_be_resumed_exactly_ends_with_an_error(cluster: Any, name: str) -> None:
    kind, fields = NOT_OFFERED[name]
    path, body = sent(kind)
    body |= fields
    assert ask(cluster, path, body).status_code == 200
    got = broken(cluster, path, body, 400)
    assert b'"code":"replica_lost"' in got
    assert got.endswith(b"data: [DONE]\n\n") is (path == COMPLETE)
    assert cluster.edge.stats.resumed == 0


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 1}], ids=["resumed twice", "not resumed"])
def test_the_error_that_ends_a_lost_response_has_the_next_number(cluster: Any, fields: dict[str, Any]) -> None:
    path, body = sent("response")
    parts = broken(cluster, path, body | fields, 2500, 900, 900).split(b"\n\n")
    events = [json.loads(part.partition(b"data: ")[2]) for part in parts[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events].count("error") == (events[-1]["type"] == "error") == 1
    assert cluster.edge.stats.resumed == (0 if fields else 2)


def test_a_replica_of_another_kind_is_not_asked(cluster: Any) -> None:
    addresses = cluster.chooser.replicas()
    cluster.chooser.set_addresses([addresses[0], *(replace(one, kernels="other") for one in addresses[1:])])
    got = broken(cluster, *sent("greedy base"), 400)
    assert b"replica_lost" in got
    assert [len(one.seen) for one in cluster.replicas] == [1, 0, 0]


@pytest.mark.parametrize(
    "change",
    [{"model": "tom"}, {"prompt": "The se"}, {"max_tokens": 23}, {"temperature": 1.2}, {"guided_regex": "[a-z ]+"}],
)
def test_a_replica_refuses_what_it_would_not_have_said(cluster: Any, change: dict[str, Any]) -> None:
    """A name that means another version meanwhile, a persona that was edited: no other text is glued on."""
    check_not_resumed_with(cluster, *sent("seeded adapter" if "model" in change else "seeded base"), change)


def check_not_resumed_with(cluster: Any, path: str, body: dict[str, Any], change: dict[str, Any]) -> None:
    broken(cluster, path, body, 700)
    resumed = cluster.replicas[1].seen[-1]
    length = int(resumed.header("x-lorasrv-resume")[0])
    state = resumed.body[:length]
    headers = {"content-type": "application/json", "x-lorasrv-resume": str(length), "x-lorasrv-cluster": SECRET}
    changed = json.dumps({**json.loads(resumed.body[length:]), **change}).encode()
    answer = cluster.real.http.post(path, content=state + changed, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_resumable")
    assert cluster.real.http.post(path, content=resumed.body, headers=headers).status_code == 200


@pytest.mark.parametrize("secret", ["", "guess"])
def test_only_an_edge_may_say_what_an_answer_begins_with(cluster: Any, secret: str) -> None:
    headers = {"x-lorasrv-resume": "0", "x-lorasrv-cluster": secret}
    answer = cluster.real.http.post(COMPLETE, json={"model": "tiny", "prompt": "a"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("length", "body"), [("x", b"{}"), ("9", b"{}"), ("2", b"[]{}"), ("-1", b"{}"), ("3", b"{1}{}")]
)
def test_a_state_that_is_none(cluster: Any, length: str, body: bytes) -> None:
    headers = {"content-type": "application/json", "x-lorasrv-resume": length, "x-lorasrv-cluster": SECRET}
    answer = cluster.real.http.post(COMPLETE, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-lorasrv-resume")


@pytest.mark.parametrize("tokens", [[384], list(range(24)), [1] * 30])
def test_tokens_that_cannot_be(cluster: Any, tokens: list[int]) -> None:
    path, body = sent("seeded base")
    broken(cluster, path, body, 700)
    resumed = cluster.replicas[1].seen[-1]
    length = int(resumed.header("x-lorasrv-resume")[0])
    state = json.dumps({**json.loads(resumed.body[:length]), "token_ids": tokens}).encode()
    headers = {"content-type": "application/json", "x-lorasrv-resume": str(len(state)), "x-lorasrv-cluster": SECRET}
    answer = cluster.real.http.post(path, content=state + resumed.body[length:], headers=headers)
    assert answer.status_code == 400
    cluster.real.calm_down()


def test_adapter_and_base_say_different_things(cluster: Any) -> None:
    texts = [said(ask(cluster, *sent(name)).content)[0] for name in ("greedy base", "greedy adapter", "sum")]
    assert len(set(texts)) == 3
