"""`lorasrv generate`, and the request options that it shares with `chat`."""

import json
from pathlib import Path

import pytest
from answers import failed
from fake_engine import say

from api.schemas.openai import GenerationBody


@pytest.fixture
def generate(run):
    return lambda *options: run("generate", "hi", *options)


def test_an_answer(run, engine) -> None:
    done = run("generate", "hi", "--system", "be kind", "--temperature", "0", "--max-tokens", "5")
    assert (done.code, done.out, done.err) == (0, "Hello\n", "")
    [asked] = engine.added
    assert bytes(asked.prompt) == b"system:be kind\nuser:hi"
    assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0, 5)
    engine.breaks(2)
    refused = run("generate", "hi")
    assert (refused.code, refused.err) == (1, "lorasrv: the engine died: Test\n")


def test_json(cli, server, make_adapter) -> None:
    server.upload(make_adapter(), "mia")
    done = cli("generate", "-", "-a", "mia", "--json", "--server", server.url, stdin="from a pipe")
    answer = json.loads(done.out)
    assert answer["text"].startswith("I am ")
    assert (answer["adapter_id"], answer["adapter_tier"], answer["finish_reason"]) == ("mia", "disk", "stop")
    assert answer["usage"]["prompt_tokens"] == len("user:from a pipe")


def test_priority_and_timeout(cli, server, engine) -> None:
    options = ("--priority", "-3", "--timeout", "2.5")
    for arguments in (("generate", "hi", *options), ("chat", *options), ("generate", "hi")):
        assert cli(*arguments, "--server", server.url, stdin="hi\n").code == 0
    assert [(added.priority, added.timeout_s) for added in engine.added] == [(-3, 2.5)] * 2 + [(0, None)]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ("--presence-penalty 0.5", "presence_penalty"),
        ("--frequency-penalty 0.5", "frequency_penalty"),
        ("--repetition-penalty 1.1", "repetition_penalty"),
        ("--logit-bias 42=-5 --logit-bias 7=1", "logit_bias"),
        ("--min-tokens 3", "min_tokens"),
        ("--logprobs 2", "logprobs"),
        ("--json-object", "response_format"),
        ("--regex a+", "guided_regex"),
        ("--choice yes --choice no", "guided_choice"),
        ("--field typical_p=0.9", "typical_p"),
        ("--field guided_grammar=root", "guided_grammar"),
    ],
)
def test_served_or_refused_by_name(generate, options: str, field: str) -> None:
    done = generate(*options.split())
    assert done.code in (0, 1)
    if done.code:
        failed(done, 1, field)
        assert done.err.count("\n") == 1


def test_the_servers_refusal_is_shown(cli, server, monkeypatch) -> None:
    monkeypatch.setitem(GenerationBody.UNSUPPORTED, "some_day", (None,))
    for command, stdin in ((("generate", "hi"), ""), (("chat",), "hi\n")):
        done = cli(*command, "--field", "some_day=1", "--server", server.url, stdin=stdin)
        assert (done.code, done.out) == (2, "")
        assert done.err == "lorasrv: --field some_day: not supported here; leave it out\n"


def test_every_option_reaches_the_body(cli, server, monkeypatch, tmp_path: Path) -> None:
    sent = []

    def chat(client, body):
        sent.append({name: value for name, value in body.items() if name != "messages"})
        raise KeyboardInterrupt

    monkeypatch.setattr("api.client.Client.chat", chat)
    schema, grammar = tmp_path / "city.json", tmp_path / "g.ebnf"
    schema.write_text('{"type": "object"}')
    grammar.write_text("root ::= x")
    given = {
        "--max-tokens": 5, "--min-tokens": 1, "--temperature": 0.5, "--top-p": 0.9, "--top-k": 4, "--min-p": 0.1,
        "--seed": 3, "--stop": "x", "--presence-penalty": 0.1, "--frequency-penalty": 0.2,
        "--repetition-penalty": 1.1, "--logit-bias": "42=-5", "-n": 2, "--logprobs": 3, "--priority": -1,
        "--timeout": 9, "--on-cold": "reject", "--field": "cache_salt=s", "--json-schema": schema,
    }  # fmt: skip
    only_of_generate = {"--min-tokens", "--logit-bias", "-n", "--logprobs", "--json-schema"}
    shared = {flag: value for flag, value in given.items() if flag not in only_of_generate}
    for arguments in (
        ("generate", "hi", "--ignore-eos", *(part for pair in given.items() for part in pair)),
        ("generate", "hi", "--grammar", grammar),
        ("chat", *(part for pair in shared.items() for part in pair)),
    ):
        assert cli(*arguments, "--server", server.url, stdin="hi\n").code == 130
    of_both = {
        "model": "tiny-base", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3,
        "stop": ["x"], "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "priority": -1,
        "timeout_s": 9.0, "on_cold": "reject", "cache_salt": "s",
    }  # fmt: skip
    of_generate = {
        "min_tokens": 1, "ignore_eos": True, "logit_bias": {"42": -5.0}, "n": 2, "logprobs": True, "top_logprobs": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": {"type": "object"}, "strict": True},
        },
    }  # fmt: skip
    assert (sent[0], sent[2]) == (of_both | of_generate, of_both)
    assert sent[1]["guided_grammar"] == "root ::= x"


def test_line_separators_of_unicode_are_text(generate, engine) -> None:
    text = "a\u2028b\u2029c\u0085d"
    engine.script = say(text)
    assert generate().out == text + "\n"
    [line] = generate("--json").out.splitlines()
    assert json.loads(line)["text"] == text


def test_several_answers(generate, engine) -> None:
    engine.script = say("one", "two")
    assert generate("-n", 2).out == "--- 1 of 2 (stop)\none\n--- 2 of 2 (stop)\ntwo\n"
    answer = json.loads(generate("-n", 2, "--json").out)
    assert (answer["text"], [choice["text"] for choice in answer["choices"]]) == ("one", ["one", "two"])


@pytest.mark.parametrize(
    "options",
    [
        ("--logit-bias", "x"),
        ("--field", "x"),
        ("--field", "=x"),
        ("--json-schema", "none.json"),
        ("--regex", "a", "--choice", "b"),
        ("--json-schema", __file__),
    ],
)
def test_usage(generate, options: tuple[str, ...]) -> None:
    done = generate(*options)
    failed(done, 2)
    assert done.err.count("\n") == 1
