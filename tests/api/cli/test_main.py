"""What holds for every command: an example in its help, --json, exit codes, Ctrl-C, closed pipes, completion."""

import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cli_process
import pytest
from answers import failed
from cli_reference import PAGE, commands, examples, page, parameters
from fake_apps import always
from fake_engine import HANG
from terminal import terminal

from api.cli.common import options as completion
from api.cli.common.suggestions import ELSEWHERE
from api.cli.common.terminal import note, say
from api.client import Client

COMMANDS = dict(commands())
NOBODY = "http://127.0.0.1:1"
# What is typed behind the name, so that the server is asked.
ASKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("list", "pool"), ()),
    **dict.fromkeys(
        ("show", "rm", "rollback", "warm", "pin", "unpin", "limit", "verify", "chat", "defaults", "snapshot"), ("mia",)
    ),
    "alias": ("mia:prod", "1"),
    "compose": ("night", "mia"),
    "top": ("--once",),
    "generate": ("hi", "--adapter", "mia"),
}
HAVE_TESTS_OF_THEIR_OWN = {"plan", "bench", "upload", "batch", "key", "watermark", "import-card", "import-modelfile"}


def flags(command: Any) -> set[str]:
    return {opt for param in parameters(command) for opt in param.opts}


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text("utf-8") == page(), "stale: python tests/support/cli_reference.py > docs/cli.md"


@pytest.mark.parametrize("name", sorted(COMMANDS))
class TestEvery:
    def test_help_has_an_example(self, cli, name: str) -> None:
        done = cli(*name.split(), "--help")
        assert (done.code, done.err, "Example: " in done.out) == (0, "", True)
        assert [line for line in done.out.splitlines() if "--" in line and "…" in line] == [], "a flag is cut off"
        found = examples(COMMANDS[name])
        assert found
        assert all(f"lorasrv {name}" in example for example in found)
        # What stands behind -- is meant for serve.
        for known, part in ((flags(COMMANDS[name]), 0), (flags(COMMANDS["serve"]), 1)):
            words = " ".join([*example.split(" -- "), ""][part] for example in found).split()
            assert [word for word in words if word[:2] == "--" and word not in known] == []

    def test_json(self, name: str) -> None:
        assert "--json" in flags(COMMANDS[name])

    def test_wrong_usage_is_one_line(self, cli, name: str) -> None:
        done = cli(*name.split(), "--no-such-flag")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith("lorasrv: no such option: --no-such-flag")
        assert done.err.endswith(f"See: lorasrv {name} --help\n")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("upload {folder} --name bb", "no such option: --name. Did you mean --id or --allow-partial?"),
        ("list --url x", "no such option: --url. Did you mean --server?"),
        ("chat --base x", "no such option: --base. Did you mean --adapter or --model?"),
        ("generate hi --max_tokens 3", "no such option: --max_tokens. Did you mean --max-tokens?"),
        ("generate hi --temp 0", "no such option: --temp. Did you mean --temperature?"),
        ("key create --admin", "no such option: --admin. Did you mean --scope?"),
        ("key create --role admin", "no such option: --role. Did you mean --scope?"),
        ("list --host x", "no such option: --host. Did you mean --server?"),
        ("top --refresh 2", "no such option: --refresh. Did you mean --interval?"),
        ("limit mia --rpm 5", "no such option: --rpm. It is an option of key create."),
        ("rm mia --to 2", "no such option: --to. It is an option of rollback."),
        ("serve --listen x", "no such option: --listen. Did you mean --host or --port?"),
        ("serve --pool-size 1GiB", "no such option: --pool-size. Did you mean --pool-bytes?"),
        ("serve --model-paths x", "no such option: --model-paths. Did you mean --model or --draft-model?"),
        ("serve --model-path x", "no such option: --model-path. Use --model."),
        ("serve --max-concurrent-requests 8", "no such option: --max-concurrent-requests. Use --max-num-queued-seqs."),
        ("serve -dp 2", "no such option: --data-parallel-size. Use --replicas."),
        (
            "serve --max-active-adapters 8",
            "no such option: --max-active-adapters. There is no limit: a batch may hold any number of adapters.",
        ),
        (
            "serve --no-enable-chunked-prefill",
            "no such option: --no-enable-chunked-prefill. Prompts are always computed in chunks; "
            "--max-num-batched-tokens bounds a step.",
        ),
        ("serve --tensor-parallel 2", "no such option: --tensor-parallel. Did you mean --tensor-parallel-size?"),
        ("serve --ctx-size 4096", "no such option: --ctx-size."),
        ("fsck", "no such command 'fsck'. Did you mean store fsck?"),
        ("delete mia", "no such command 'delete'. Did you mean rm?"),
        ("status", "no such command 'status'."),
        ("keys list", "no such command 'keys'. Did you mean key?"),
        ("key revok mia", "no such command 'revok'. Did you mean revoke?"),
        (
            "upload bb {folder}",
            "invalid value for 'DIR': dir 'bb' does not exist. Usage: lorasrv upload [OPTIONS] DIR.",
        ),
        ("upload {folder} bb", "got unexpected extra argument(s) (bb). Usage: lorasrv upload [OPTIONS] DIR."),
        ("rollback mia 1", "got unexpected extra argument(s) (1). Usage: lorasrv rollback [OPTIONS] ID."),
        ("limit", "missing argument 'ID'. Usage: lorasrv limit [OPTIONS] ID."),
        ("rm", "missing argument 'ID[@VERSION]'. Usage: lorasrv rm [OPTIONS] ID[@VERSION]...."),
        ("list --store {folder}/x", "invalid value for '--store': '{folder}/x' does not exist."),
        ("store gc --store {folder}/x", "invalid value for '--store': '{folder}/x' does not exist."),
        ("generate hi --max-tokens abc", "invalid value for '--max-tokens': must be a whole number, not 'abc'."),
        ("doctor --rank 0", "invalid value for '--rank': must be at least 1, not '0'."),
    ],
)
def test_what_was_meant_is_told(cli, tmp_path: Path, typed: str, says: str) -> None:
    done = cli(*typed.format(folder=tmp_path).split())
    says = says.replace("{folder}", str(tmp_path))
    assert (done.code, done.err.partition(" See: lorasrv ")[0]) == (2, f"lorasrv: {says}")


def test_the_variable_is_named_where_it_was_the_source(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASRV_STORE", "/nowhere")
    assert "invalid value for '--store' (env var: 'LORASRV_STORE')" in cli("store", "gc").err
    assert "invalid value for '--store':" in cli("store", "gc", "--store", "/nowhere").err


def test_what_other_servers_options_are_here() -> None:
    serve = flags(COMMANDS["serve"])
    assert set(ELSEWHERE) & serve == set(), "those need no hint"
    named = {flag for text in ELSEWHERE.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert named - serve == set()
    page = PAGE.with_name("migrating.md").read_text("utf-8")
    assert [flag for flag in ELSEWHERE if f"`{flag}`" not in page] == []


@pytest.mark.parametrize("name", sorted(ASKS))
def test_no_server_answers(cli, name: str) -> None:
    done = cli(name, *ASKS[name], "--server", NOBODY, stdin="hi\n")
    assert (done.code, done.out) == (3, "")
    assert done.err == (
        f"lorasrv: no server answers at {NOBODY}; start one with: lorasrv serve --port 1 "
        "(it answers once it is ready), or name its address by --server\n"
    )


def test_a_server_without_tls_is_not_one_that_does_not_answer(cli, server) -> None:
    url = server.url.replace("http:", "https:")
    done = cli("list", "--server", url)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith(f"lorasrv: no TLS connection to {url}: ")
    assert done.err.endswith("; name the server itself by --server http://HOST:PORT\n")


@pytest.mark.parametrize("name", sorted(set(ASKS) - {"list", "pool", "top", "compose"}))
def test_an_unknown_adapter(cli, server, name: str) -> None:
    done = cli(name, *ASKS[name], "--server", server.url, stdin="hi\n")
    failed(done, 1, "lorasrv: ", "mia")
    assert done.err.count("\n") == 1


def test_no_server_answers_elsewhere(cli) -> None:
    done = cli("list", "--server", "http://nowhere.invalid:8000")
    assert (done.code, done.err.partition("; ")[2]) == (
        3,
        "check the address (--server), and that the server is ready\n",
    )


def test_every_command_that_has_a_server_is_here() -> None:
    assert set(ASKS) >= {name for name in COMMANDS if "--server" in flags(COMMANDS[name])} - HAVE_TESTS_OF_THEIR_OWN


class TestHabits:
    """What is typed out of habit, from ollama, docker or vLLM."""

    @pytest.mark.parametrize(
        ("typed", "ours"),
        [
            ("help", "--help"),
            ("help key create", "key create --help"),
            ("version", "--version"),
            ("ls", "list"),
            ("ps", "pool"),
            ("run mia hi", "generate hi --adapter mia"),
            ("chat mia hi", "generate hi --adapter mia"),
            ("chat --adapter mia", "chat mia"),
            ("chat -a mia hi", "chat mia hi"),
            ("generate hi --model mia", "generate hi -a mia"),
            ("start --help", "serve --help"),
            ("serve -tp 2 -pp 2 -q int8 --help", "serve --help"),
            ("remove --help", "rm --help"),
        ],
    )
    def test_does_what_is_meant(self, cli, server, make_adapter, monkeypatch, typed: str, ours: str) -> None:
        monkeypatch.setenv("LORASRV_SERVER", server.url)
        assert cli("upload", make_adapter()).out.startswith("registered mia@1  "), "named as its folder"
        meant = cli(*ours.split(), stdin="hi\n")
        assert (meant.code, meant.out != "") == (0, True)
        assert cli(*typed.split(), stdin="hi\n") == meant

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ("serve a.gguf --model b", "'a.gguf' and --model 'b' are the same option; give one of them"),
            ("chat mia hi --adapter tom", "give the adapter once: mia, or --adapter tom"),
        ],
    )
    def test_given_twice(self, cli, arguments: str, says: str) -> None:
        done = cli(*arguments.split())
        assert (done.code, done.out, done.err) == (2, "", f"lorasrv: {says}\n")


class TestExitCodes:
    def test_no_command_is_help(self, cli) -> None:
        for arguments in ((), ("store",), ("config",)):
            done = cli(*arguments)
            assert (done.code, "Usage: " in done.out + done.err) == (2, True)

    @pytest.mark.parametrize(
        "arguments",
        ["fly", "list --what", "upload", "serve --port x", "generate x --max-tokens 0", "verify x --timeout nan"],
    )
    def test_usage(self, cli, arguments: str) -> None:
        assert cli(*arguments.split()).code == 2

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ("warm mia --deadline-ms 600001", "'--deadline-ms'"),
            ("warm mia --deadline-ms 9999999999999", "'--deadline-ms'"),
            ("generate x --logit-bias 1=nan", "--logit-bias"),
            ("generate x --logit-bias 1=-inf", "--logit-bias"),
            ("generate x --field max_tokens=NaN", "--field max_tokens: NaN is not a JSON number"),
            ('chat mia hi --field x={"a":Infinity}', "--field x: Infinity is not a JSON number"),
            ("chat mia hi --field x=[1e999]", "--field x: number 1e999 is too large"),
            ('chat mia hi --field x="\\ud800"', "--field x: it holds a lone surrogate"),
            (f"generate x --field x={'[' * 100_000}", "--field x: "),
            ("generate x --timeout -1", "'--timeout'"),
            ("defaults mia --clear --new", "--clear"),
            ("defaults mia --new", "--new needs FILE"),
            ("defaults mia /dev/null --clear", "--clear"),
            # What only the server knows.
            ("verify mia --timeout 0", "--timeout: "),
            ("generate x --on-cold maybe", "--on-cold: "),
            ("generate x --n 9", "--n: "),
            ("generate x --top-p 2", "--top-p must be above 0"),
            ("generate x --logit-bias 1=200", "--logit-bias must be between"),
            ("generate x --logprobs 50", "--logprobs: "),
            ("chat mia hi --top-k -5", "--top-k must be between"),
            ("chat mia hi --field n=9", "--field n: "),
        ],
    )
    def test_usage_names_the_option(self, run, server, make_adapter, arguments: str, says: str) -> None:
        server.upload(make_adapter(), "mia")
        done = run(*arguments.split())
        failed(done, 2, says)
        assert done.err.count("\n") == 1

    @pytest.mark.parametrize("reference", ["", "mia/x", ":x", "@1"])
    @pytest.mark.parametrize(
        "command",
        ["show", "defaults", "limit", "rollback", "warm", "pin", "unpin", "verify", "snapshot", "rm", "alias"],
    )
    def test_what_can_be_no_id(self, run, command: str, reference: str) -> None:
        failed(run(command, reference), 2, f"adapter id {reference!r} is not allowed: use 1 to 64 of a-z")

    def test_unreachable(self, cli) -> None:
        done = cli("list", "--server", "http://nowhere.invalid")
        assert (done.code, done.out, done.err.count("\n")) == (3, "", 1), done.err

    @pytest.mark.parametrize("url", ["gopher://x", "127.0.0.1:1", ""])
    def test_what_is_no_address_is_wrong_usage(self, cli, url: str) -> None:
        """A script that waits for a server on 3 would wait for ever."""
        done = cli("list", "--server", url)
        assert (done.code, done.out) == (2, "")
        assert done.err == f"lorasrv: {url} is not a server address; expected http://HOST:PORT\n"

    def test_something_else_answers(self, cli, server, dispatcher) -> None:
        dispatcher[0].app = always(200, b"<html>")
        done = cli("list", "--server", server.url)
        assert (done.code, done.err.count("\n"), "not lorasrv" in done.err) == (3, 1, True)

    def test_a_bug_is_one_line_too(self, cli, monkeypatch) -> None:
        def bug(*_: object) -> None:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(Client, "adapters", bug)
        done = cli("list")
        assert (done.code, done.err.splitlines()[0]) == (1, "lorasrv: unexpected ZeroDivisionError: oops")

    def test_version_and_defaults(self, cli) -> None:
        assert cli("--version").out.strip().count(".") == 2
        assert "64MiB]" in cli("serve", "--help").out

    @pytest.mark.parametrize("words", ["config show", "serve --help"])
    def test_a_closed_pipe_is_no_error(self, words: str) -> None:
        read, write = os.pipe()
        os.close(read)
        try:
            done = cli_process.run(*words.split(), stdout=write)
        finally:
            os.close(write)
        assert (done.returncode, done.stderr) == (0, "")

    def test_what_others_have_written_cannot_command_the_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "a\x1b]0;x\x07\x9b b\u202ec\t👨\u200d👩\u200d👧"
        for is_terminal, shown in ((True, "a\ufffd]0;x\ufffd\ufffd b\ufffdc\t👨\u200d👩\u200d👧"), (False, text)):
            for name, write in (("stdout", say), ("stderr", note)):
                stream = io.StringIO()
                monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
                monkeypatch.setattr(sys, name, stream)
                write(text)
                assert stream.getvalue() == f"{shown}\n"

    @pytest.mark.parametrize("stream", [0, 1, 2])
    def test_a_closed_stream_is_an_empty_one(self, server, stream: int) -> None:
        for arguments in (("generate", "-"), ("list", "--json")):
            done = cli_process.run(*arguments, "--server", server.url, preexec_fn=partial(os.close, stream))
            assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("why", ["reader left", "disk full"])
    def test_a_command_goes_on_if_its_progress_is_not_read(self, server, make_adapter, why: str) -> None:
        read, write = os.pipe()
        os.close(read)
        if why == "disk full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), write)
        try:
            done = cli_process.run("upload", make_adapter(), "--id", "mia", "--server", server.url, stderr=write)
        finally:
            os.close(write)
        assert done.returncode == 0
        assert server.http.get("/v1/adapters/mia").status_code == 200

    def test_letters_that_the_terminal_lacks(self, server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONUTF8", "0")
        monkeypatch.setenv("PYTHONIOENCODING", "ascii")
        done = cli_process.run("generate", "hi", "--server", server.url)
        assert (done.returncode, done.stdout) == (0, "Hello w?rld\n")
        done = cli_process.run("generate", "hi", "--json", "--server", server.url)
        assert json.loads(done.stdout)["text"] == "Hello wörld"

    def test_ctrl_c(self, server, engine, eventually) -> None:
        engine.breaks(2, HANG)
        with cli_process.started("generate", "hi", "--server", server.url) as process:
            assert process.stdout.read(2) == "He"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "")
        eventually(lambda: len(engine.aborted) == 1)


def test_help_and_client_commands_import_neither_torch_nor_the_server() -> None:
    heavy = {"torch", "numpy", "fastapi", "uvicorn", "pydantic"}
    assert imported_by("api.cli.program, api.client") & heavy == set()
    assert "httpx2" not in imported_by("api.cli.program")


def imported_by(modules: str) -> set[str]:
    script = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


class TestTables:
    @pytest.fixture(autouse=True)
    def _adapters(self, server, make_adapter) -> None:
        server.upload(make_adapter(), "mia", alias="prod")
        server.upload(make_adapter("tom", seed=1), "tom")

    def test_at_a_terminal(self, server) -> None:
        with terminal("list", "--server", server.url) as seen:
            assert seen.end() == 0
            title, mia, tom = seen.lines[:3]
            assert title.split() == ["id", "version", "digest", "rank", "stored", "size"]
            assert [line.split()[:2] for line in (mia, tom)] == [["mia", "1"], ["tom", "1"]]
            assert mia.index("1") == tom.index("1") == title.index("version")
            assert "\t" not in seen.raw.decode()

    def test_piped(self, run) -> None:
        assert [line.split("\t")[:2] for line in run("list").out.splitlines()] == [["mia", "1"], ["tom", "1"]]
        shown = run("show", "mia").out
        assert "mia:prod -> mia@1" in shown
        assert "  tier resident, 0 requests since the start\n" in shown
        assert "\x1b" not in shown


class TestCompletion:
    def complete(self, words: str, **environment: str) -> list[str]:
        count = str(len(words.split(" ")) - 1)
        variables = {"_LORASRV_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count, **environment}
        done = cli_process.run(env=variables)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    def test_ids_commands_and_flags(self, server, make_adapter) -> None:
        for seed, name in enumerate(("mia", "mio", "tom")):
            server.upload(make_adapter(name, seed=seed), name)
        assert self.complete("lorasrv show mi", LORASRV_SERVER=server.url) == ["mia", "mio"]
        assert self.complete(f"lorasrv rm --server {server.url} t") == ["tom"]
        assert self.complete(f"lorasrv generate hi --server {server.url} --adapter ") == ["mia", "mio", "tom"]
        assert "rollback" in self.complete("lorasrv ro")
        assert self.complete("lorasrv serve --max-wait") == ["--max-wait-steps"]

    @pytest.mark.long
    def test_nothing_if_no_server_answers(self, server, dispatcher) -> None:
        assert self.complete("lorasrv show m", LORASRV_SERVER=NOBODY) == []
        dispatcher[0].app = always(200, b"<html>")
        assert self.complete("lorasrv show m", LORASRV_SERVER=server.url) == []

    def test_a_server_that_does_not_answer_is_waited_for_shortly(self, server, dispatcher, monkeypatch) -> None:
        dispatcher[0].app = lambda *_: asyncio.sleep(30)
        monkeypatch.setattr(completion, "WAIT_S", 0.05)
        context = SimpleNamespace(params={"server": server.url})
        assert completion.complete_adapter_ids(context, "m") == []

    @pytest.mark.long
    @pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
    def test_in_bash(self, server, make_adapter, tmp_path: Path) -> None:
        server.upload(make_adapter(), "mia")
        program = tmp_path / "lorasrv"
        program.write_text(f"#!{sys.executable}\nfrom api.cli.main import main\nmain()\n")
        program.chmod(0o755)
        variables = {
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
            "HOME": str(tmp_path),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LORASRV_SERVER": server.url,
        }
        shown = cli_process.run("--show-completion", "bash", env=variables).stdout
        assert "complete -o default -F _lorasrv_completion lorasrv" in shown
        assert cli_process.run("--install-completion", "bash", env=variables).returncode == 0
        assert "lorasrv" in (tmp_path / ".bashrc").read_text()
        script = "source ~/.bash_completions/lorasrv.sh; COMP_WORDS=(lorasrv show m); COMP_CWORD=2; "
        script += "_lorasrv_completion lorasrv; echo ${COMPREPLY[@]}"
        environment, how = {**os.environ, **variables}, {"text": True, "capture_output": True, "timeout": 120}
        done = subprocess.run(["bash", "--norc", "-c", script], env=environment, check=False, **how)
        assert (done.stdout, done.stderr) == ("mia\n", "")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("bench --trace", "--trace"),
        ("plan --trace", "--trace"),
        ("plan --law poisson --costs", "--costs"),
        ("verify mia --prompts", "--prompts"),
        ("quantize model.safetensors --text", "--text"),
        ("upload . --defaults", "--defaults"),
        ("compose both mia zoe --defaults", "--defaults"),
        ("defaults mia", "FILE"),
        ("import-card --id mia", "FILE"),
        ("import-modelfile --id mia", "FILE"),
        ("batch", "IN"),
        ("store import", "DIR_OR_TAR"),
        ("check . --store", "--store"),
        ("list --store", "--store"),
        ("demo --personas", "--personas"),
        ("generate hi --json-schema", "--json-schema"),
        ("serve --config", "--config"),
    ],
)
def test_a_file_that_is_not_there_is_wrong_usage(cli, tmp_path: Path, words: str, named: str) -> None:
    """Told before anything is loaded or asked, with the option and the file."""
    path = tmp_path / "nowhere"
    done = cli(*words.split(), path, *(["out.jsonl"] if words == "batch" else []))
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert str(path) in done.err
