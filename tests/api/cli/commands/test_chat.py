"""chat and generate: through a real pseudo-terminal, and as plain lines when piped."""

import json
from pathlib import Path

import pytest
from fake_engine import HANG, say
from terminal import terminal

from api.schemas.unsupported import INERT_VALUES


def prompts(engine) -> list[str]:
    return [bytes(added.prompt).decode() for added in engine.added]


@pytest.fixture
def mia(server, make_adapter) -> str:
    server.upload(make_adapter(), "mia")
    return "mia"


class TestAtATerminal:
    def test_a_conversation(self, server, engine, mia: str) -> None:
        with terminal("chat", "--server", server.url, "--system", "be kind", "--seed", 7) as seen:
            seen.until("tiny-base>", "/help lists commands")
            seen.enter("one")
            seen.until("Hello wörld", "[base, 11 tokens")
            seen.enter("/adapter nobody")
            seen.until("lorasrv: the model 'nobody' does not exist")
            seen.enter("/adapter mia")
            seen.until("mia>")
            seen.enter("two")
            seen.until("I am ", "[mia ")
            seen.enter("/base")
            seen.enter("//three")
            seen.until("/three", "tokens/s, stop]\ntiny-base>")
            seen.enter("/clear")
            seen.until("history cleared")
            seen.enter('"""/four')
            seen.until("\n...")
            seen.enter('five"""')
            seen.until('five"""\nHello wörld')
            seen.enter("/what")
            seen.until("unknown command /what; /help lists the commands")
            seen.enter("/adapter")
            seen.until("give an adapter id: mia")
            seen.enter("/help")
            seen.until("/quit         quit, as /bye and Ctrl-D do")
            seen.enter("/bye")
            assert seen.end() == 0
        asked = prompts(engine)
        said = asked[1].splitlines()
        assert asked[0] == "system:be kind\nuser:one"
        assert said[:3] == ["system:be kind", "user:one", "assistant:Hello wörld"]
        assert said[3] == "user:two", "an adapter that is not there changes nothing"
        assert asked[2].splitlines()[4].startswith("assistant:I am ")
        assert asked[2].splitlines()[5] == "user:/three"
        assert asked[3] == "system:be kind\nuser:/four\nfive"
        assert [bool(added.adapter) for added in engine.added] == [False, True, False, False]
        assert {added.sampling.seed for added in engine.added} == {7}

    def test_ctrl_c_ends_the_answer(self, server, engine, eventually) -> None:
        engine.breaks(5, HANG)
        with terminal("chat", "--server", server.url) as seen:
            seen.until("tiny-base>")
            seen.send("never sent")
            seen.until("never sent")
            seen.interrupt()
            seen.until("never sent\ntiny-base>")
            seen.enter("hi")
            assert "never sent" in seen.until("> hi\nHello")
            seen.interrupt()
            seen.until("[stopped]\ntiny-base>")
            eventually(lambda: len(engine.aborted) == 1)
            engine.script = say()
            seen.enter("again")
            seen.until("again\nHello wörld")
            assert seen.leave() == 0
            assert "Traceback" not in seen.text
        assert prompts(engine)[1] == "user:hi\nassistant:Hello\nuser:again"

    def test_errors_do_not_end_it(self, server, engine, dispatcher) -> None:
        with terminal("chat", "--server", server.url) as seen:
            seen.until("tiny-base>")
            engine.breaks(2)
            seen.enter("one")
            seen.until("He\nlorasrv: the engine died: Test")
            engine.script = say()
            app, dispatcher[0].app = dispatcher[0].app, gone
            seen.enter("two")
            seen.until("lorasrv: the server answered 500")
            dispatcher[0].app = app
            seen.enter("three")
            seen.until("three\nHello wörld")
            assert seen.leave() == 0
        assert prompts(engine)[1] == "user:three", "what was not answered is not remembered"

    def test_arrow_keys_bring_lines_back(self, server, engine) -> None:
        pytest.importorskip("readline")
        with terminal("chat", "--server", server.url) as seen:
            seen.until("tiny-base>")
            seen.enter("one")
            seen.until("Hello wörld", "stop]\ntiny-base>")
            seen.send("\x1b[A\x1b[D\x1b[Dx\r")
            seen.until("oxne\nHello")
            seen.send("/ada\t")
            seen.until("tiny-base> /adapter")
            seen.interrupt()
            seen.until("/adapter\ntiny-base>")
            assert seen.leave() == 0

    def test_an_answer_cannot_command_the_terminal(self, server, engine) -> None:
        engine.script = say("a\x1b]0;owned\x07b\x1b[2Jc")
        with terminal("chat", "--server", server.url) as seen:
            seen.until("tiny-base>")
            seen.enter("hi")
            seen.until("a\ufffd]0;owned\ufffdb\ufffd[2Jc")
            assert b"\x1b]0;owned" not in seen.raw

    def test_who_is_not_there(self, server) -> None:
        for arguments, code, says in (
            (("nobody", "--server", server.url), 1, "lorasrv: the model 'nobody' does not exist"),
            (("--server", "http://127.0.0.1:1"), 3, "lorasrv: no server answers at http://127.0.0.1:1"),
        ):
            with terminal("chat", *arguments) as seen:
                assert seen.end() == code
                assert says in seen.text


async def gone(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 500, "headers": []})
    await send({"type": "http.response.body", "body": b"?"})


class TestPiped:
    def test_lines_and_plain_answers(self, cli, server, engine, mia: str) -> None:
        done = cli("chat", mia, "--server", server.url, stdin="one\n\n  \n/base\n")
        digest = str(engine.added[0].adapter)[:12]
        assert (done.code, done.err) == (0, "")
        assert done.out == f"I am {digest}\n" * 2
        assert prompts(engine)[1].splitlines()[-1] == "user:/base", "commands are for people"

    def test_json(self, cli, server) -> None:
        done = cli("chat", "--json", "--server", server.url, stdin="one\ntwo\n")
        assert [json.loads(line)["text"] for line in done.out.splitlines()] == ["Hello wörld"] * 2

    def test_the_first_error_ends(self, cli, server, engine) -> None:
        engine.breaks(2)
        done = cli("chat", "--server", server.url, stdin="one\ntwo\n")
        assert (done.code, done.out, done.err) == (1, "He", "lorasrv: the engine died: Test\n")
        assert len(engine.added) == 1


class TestGenerate:
    @pytest.mark.parametrize(
        ("options", "field"),
        [
            (("--presence-penalty", "0.5"), "presence_penalty"),
            (("--frequency-penalty", "0.5"), "frequency_penalty"),
            (("--repetition-penalty", "1.1"), "repetition_penalty"),
            (("--logit-bias", "42=-5", "--logit-bias", "7=1"), "logit_bias"),
            (("--min-tokens", "3"), "min_tokens"),
            (("--logprobs", "2"), "logprobs"),
            (("--json-object",), "response_format"),
            (("--regex", "a+"), "guided_regex"),
            (("--choice", "yes", "--choice", "no"), "guided_choice"),
            (("--field", "typical_p=0.9"), "typical_p"),
            (("--field", "guided_grammar=root"), "guided_grammar"),
        ],
    )
    def test_served_or_refused_by_name(self, cli, server, options, field: str) -> None:
        done = cli("generate", "hi", *options, "--server", server.url)
        assert done.code in (0, 1)
        if done.code:
            assert (done.out, done.err.count("\n")) == ("", 1)
            assert field in done.err

    def test_the_servers_refusal_is_shown(self, cli, server, monkeypatch) -> None:
        monkeypatch.setitem(INERT_VALUES, "some_day", (None,))
        for command, stdin in ((("generate", "hi"), ""), (("chat",), "hi\n")):
            done = cli(*command, "--field", "some_day=1", "--server", server.url, stdin=stdin)
            assert (done.code, done.out) == (1, "")
            assert done.err == "lorasrv: some_day: not supported here; leave it out\n"

    def test_every_option_reaches_the_body(self, cli, server, monkeypatch, tmp_path: Path) -> None:
        sent = []

        def chat(client, body):
            sent.append(body)
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
        flags = [part for pair in given.items() for part in pair]
        assert cli("generate", "hi", "--ignore-eos", "--server", server.url, *flags).code == 130
        [body] = sent
        body.pop("messages")
        assert body == {
            "model": "tiny-base", "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
            "min_p": 0.1, "seed": 3, "stop": ["x"], "ignore_eos": True, "presence_penalty": 0.1,
            "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"42": -5.0}, "n": 2, "logprobs": True,
            "top_logprobs": 3, "priority": -1, "timeout_s": 9.0, "on_cold": "reject", "cache_salt": "s",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": {"type": "object"}, "strict": True},
            },
        }  # fmt: skip
        assert cli("generate", "hi", "--grammar", grammar, "--server", server.url).code == 130
        assert sent[1]["guided_grammar"] == "root ::= x"
        only_here = {"--min-tokens", "--logit-bias", "-n", "--logprobs", "--json-schema"}
        flags = [part for pair in given.items() if pair[0] not in only_here for part in pair]
        assert cli("chat", "--server", server.url, *flags, stdin="hi\n").code == 130
        of_generate = {"min_tokens", "ignore_eos", "logit_bias", "n", "logprobs", "top_logprobs", "response_format"}
        sent[2].pop("messages")
        assert sent[2] == {name: value for name, value in body.items() if name not in of_generate}

    def test_ends_of_lines_that_only_unicode_knows(self, cli, server, engine) -> None:
        text = "a\u2028b\u2029c\u0085d"
        engine.script = say(text)
        assert cli("generate", "hi", "--server", server.url).out == text + "\n"
        [line] = cli("generate", "hi", "--json", "--server", server.url).out.splitlines()
        assert json.loads(line)["text"] == text

    def test_several_answers(self, cli, server, engine) -> None:
        engine.script = say("one", "two")
        done = cli("generate", "hi", "-n", 2, "--server", server.url)
        assert done.out == "--- 1 of 2 (stop)\none\n--- 2 of 2 (stop)\ntwo\n"
        answer = json.loads(cli("generate", "hi", "-n", 2, "--json", "--server", server.url).out)
        assert answer["text"] == "one"
        assert [choice["text"] for choice in answer["choices"]] == ["one", "two"]

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
    def test_usage(self, cli, server, options: tuple[str, ...]) -> None:
        done = cli("generate", "hi", *options, "--server", server.url)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
