"""`lorasrv chat` at a real pseudo-terminal, and as plain lines when piped."""

import json

import pytest
import tool_templates as templates
from fake_apps import always
from fake_engine import HANG, say
from spelled_engine import spelled, tiny_tokenizer
from terminal import terminal

from lorasrv.text.chat_template import ChatTemplate


def prompts(engine) -> list[str]:
    return [bytes(added.prompt).decode() for added in engine.added]


@pytest.fixture
def reasons(engine) -> None:
    engine.tokenizer, engine.chat_template = tiny_tokenizer(), ChatTemplate(templates.QWEN3)
    engine.script = spelled(engine.tokenizer, "<think>\nSo.\n</think>\n\nHello")


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
        assert [bool(added.adapter_key) for added in engine.added] == [False, True, False, False]
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
            app, dispatcher[0].app = dispatcher[0].app, always(500, b"?")
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

    def test_reasoning_is_dimmed(self, server, reasons) -> None:
        with terminal("chat", "--server", server.url) as seen:
            seen.until("tiny-base>")
            seen.enter("hi")
            seen.until("> hi\nSo.\n\nHello")
            assert b"\x1b[2m" in seen.raw.partition(b"\x1b[0m\r\n\r\nH")[0]
            assert b"\x1b[2mH" not in seen.raw

    def test_reasoning_of_several_answers_is_dimmed(self, server, reasons) -> None:
        with terminal("generate", "hi", "-n", "2", "--server", server.url) as seen:
            seen.until("1 of 2 (stop)\nSo.\n\nHello", "2 of 2 (stop)\n")
            assert seen.end() == 0
            assert b"\x1b[2mSo." in seen.raw

    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (("nobody", "--server", "{url}"), 1, "lorasrv: the model 'nobody' does not exist"),
            (("--server", "http://127.0.0.1:1"), 3, "lorasrv: no server answers at http://127.0.0.1:1"),
        ],
    )
    def test_it_ends_at_once(self, server, arguments: tuple[str, ...], code: int, says: str) -> None:
        with terminal("chat", *(part.format(url=server.url) for part in arguments)) as seen:
            assert (seen.end(), says in seen.text) == (code, True)


class TestPiped:
    def test_lines_and_plain_answers(self, cli, server, engine, mia: str) -> None:
        done = cli("chat", mia, "--server", server.url, stdin="one\n\n  \n/base\n")
        said = f"I am {str(engine.added[0].adapter_key)[:12]}"
        assert (done.code, done.out, done.err) == (0, f"{said}\n" * 2, "")
        assert prompts(engine)[1] == f"user:one\nassistant:{said}\nuser:/base", "commands are for a terminal"

    def test_json(self, cli, server) -> None:
        done = cli("chat", "--json", "--server", server.url, stdin="one\ntwo\n")
        assert [json.loads(line)["text"] for line in done.out.splitlines()] == ["Hello wörld"] * 2

    def test_answers_without_their_reasoning(self, cli, server, engine, reasons) -> None:
        done = cli("chat", "--server", server.url, stdin="one\ntwo\n")
        assert (done.code, done.out, done.err) == (0, "Hello\nHello\n", "")
        said = "".join(engine.tokenizer.token(token) for token in engine.added[1].prompt)
        assert "So." not in said, "templates drop it of earlier turns"
        for fields in ((), ("--field", "n=2")):
            done = cli("chat", "--json", *fields, "--server", server.url, stdin="one\n")
            [line] = map(json.loads, done.out.splitlines())
            assert (line["reasoning"], line["text"]) == ("So.", "Hello")
            assert [choice.get("reasoning") for choice in line.get("choices", [])] == ["So.", None][: len(fields)]

    def test_the_first_error_ends_it(self, cli, server, engine) -> None:
        engine.breaks(2)
        done = cli("chat", "--server", server.url, stdin="one\ntwo\n")
        assert (done.code, done.out, done.err) == (1, "He", "lorasrv: the engine died: Test\n")
        assert len(engine.added) == 1
