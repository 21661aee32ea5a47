"""What holds for every command: an example in its help, --json, exit codes, Ctrl-C, closed pipes, completion."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_reference import PAGE, commands, examples, page, parameters
from fake_engine import HANG
from terminal import terminal

COMMANDS = dict(commands())
MAIN = [sys.executable, "-c", "from api.cli.main import main; main()"]
NOBODY = "http://127.0.0.1:1"
# What is typed behind the name, so that the server is asked.
ASKS: dict[str, tuple[str, ...]] = {
    "list": (),
    "show": ("mia",),
    "rm": ("mia",),
    "alias": ("mia:prod", "1"),
    "rollback": ("mia",),
    "warm": ("mia",),
    "pin": ("mia",),
    "unpin": ("mia",),
    "limit": ("mia",),
    "verify": ("mia",),
    "pool": (),
    "top": ("--once",),
    "chat": ("mia",),
    "generate": ("hi", "--adapter", "mia"),
}
OF_AN_ADAPTER = sorted(set(ASKS) - {"list", "pool", "top"})


def flags(command: Any) -> set[str]:
    return {opt for param in parameters(command) for opt in param.opts}


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text("utf-8") == page(), "stale: python tests/support/cli_reference.py > docs/cli.md"


@pytest.mark.parametrize("name", sorted(COMMANDS))
class TestEvery:
    def test_help_has_an_example(self, cli, name: str) -> None:
        done = cli(*name.split(), "--help")
        assert (done.code, done.err) == (0, "")
        assert "Example: " in done.out
        found = examples(COMMANDS[name])
        assert found
        assert all(f"lorasrv {name}" in example for example in found)
        # What stands behind -- is meant for serve.
        for known, part in ((flags(COMMANDS[name]), 0), (flags(COMMANDS["serve"]), 1)):
            words = " ".join([*example.split(" -- "), ""][part] for example in found).split()
            assert [word for word in words if word[:2] == "--" and word not in known] == []

    def test_no_flag_is_cut_off_in_a_narrow_help(self, cli, name: str) -> None:
        done = cli(*name.split(), "--help")
        assert [line for line in done.out.splitlines() if "--" in line and "…" in line] == []

    def test_json(self, name: str) -> None:
        assert "--json" in flags(COMMANDS[name])

    def test_wrong_usage_is_one_line(self, cli, name: str) -> None:
        done = cli(*name.split(), "--no-such-flag")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith("lorasrv: no such option: --no-such-flag")
        assert done.err.endswith(f"See: lorasrv {name} --help\n")


@pytest.mark.parametrize("name", sorted(ASKS))
def test_nobody_answers(cli, name: str) -> None:
    done = cli(name, *ASKS[name], "--server", NOBODY, stdin="hi\n")
    assert (done.code, done.out) == (3, "")
    assert done.err == f"lorasrv: no server answers at {NOBODY}; start one with: lorasrv serve\n"


@pytest.mark.parametrize("name", OF_AN_ADAPTER)
def test_refused(cli, server, name: str) -> None:
    done = cli(name, *ASKS[name], "--server", server.url, stdin="hi\n")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert done.err.startswith("lorasrv: ")
    assert "mia" in done.err


def test_every_command_that_has_a_server_is_here() -> None:
    assert set(ASKS) >= {name for name in COMMANDS if "--server" in flags(COMMANDS[name])} - {"plan", "upload"} - {
        # Colleagues' own, which have tests of their own.
        "batch", "key", "watermark",
    }  # fmt: skip


def test_no_command_is_help(cli) -> None:
    for arguments in ((), ("store",), ("config",)):
        done = cli(*arguments)
        assert done.code == 2
        assert "Usage: " in done.out + done.err


def run(*arguments: str, environment: dict[str, str] | None = None, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*MAIN, *arguments], env={**os.environ, **(environment or {})}, text=True, timeout=120, check=False, **more
    )


def test_a_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run("config", "show", stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c(server, engine, eventually) -> None:
    engine.breaks(2, HANG)
    command = [*MAIN, "generate", "hi", "--server", server.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.read(2) == "He"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (130, "")
    eventually(lambda: len(engine.aborted) == 1)


class TestTables:
    @pytest.fixture(autouse=True)
    def _adapters(self, server, make_adapter) -> None:
        server.upload(make_adapter(), "mia", alias="prod")
        server.upload(make_adapter("tom", seed=1), "tom")

    def test_at_a_terminal(self, server) -> None:
        with terminal("list", "--server", server.url) as seen:
            assert seen.end() == 0
            assert seen.lines[0].split() == ["id", "version", "digest", "rank", "size"]
            assert [line.split()[:2] for line in seen.lines[1:3]] == [["mia", "1"], ["tom", "1"]]
            assert seen.lines[1].index("1") == seen.lines[2].index("1") == seen.lines[0].index("version")
            assert "\t" not in seen.raw.decode()

    def test_piped(self, cli, server) -> None:
        assert [line.split("\t")[0] for line in cli("list", "--server", server.url).out.splitlines()] == ["mia", "tom"]
        shown = cli("show", "mia", "--server", server.url).out
        assert "mia:prod -> mia@1" in shown
        assert "  tier resident, 0 requests since the start\n" in shown
        assert "\x1b" not in shown


class TestCompletion:
    def complete(self, words: str, **environment: str) -> list[str]:
        count = str(len(words.split(" ")) - 1)
        variables = {"_LORASRV_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count, **environment}
        done = run(environment=variables, capture_output=True)
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
    def test_silent_where_nobody_answers(self, server, dispatcher) -> None:
        assert self.complete("lorasrv show m", LORASRV_SERVER=NOBODY) == []

        async def broken(scope, receive, send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>"})

        dispatcher[0].app = broken
        assert self.complete("lorasrv show m", LORASRV_SERVER=server.url) == []

    def test_a_server_that_is_silent_is_waited_for_shortly(self, server, dispatcher, monkeypatch) -> None:
        import asyncio

        from api.cli.common import options as completion

        async def silent(scope, receive, send) -> None:
            await asyncio.sleep(30)

        dispatcher[0].app = silent
        monkeypatch.setattr(completion, "WAIT_S", 0.05)
        context = type("Context", (), {"params": {"server": server.url}})()
        assert completion.complete_adapter_ids(context, "m") == []

    @pytest.mark.long
    @pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
    def test_in_bash(self, server, make_adapter, tmp_path: Path) -> None:
        server.upload(make_adapter(), "mia")
        command = tmp_path / "lorasrv"
        command.write_text(f"#!{sys.executable}\nfrom api.cli.main import main\nmain()\n")
        command.chmod(0o755)
        variables = {
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
            "HOME": str(tmp_path),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "LORASRV_SERVER": server.url,
        }
        shown = run("--show-completion", "bash", environment=variables, capture_output=True).stdout
        assert "complete -o default -F _lorasrv_completion lorasrv" in shown
        assert run("--install-completion", "bash", environment=variables, capture_output=True).returncode == 0
        assert "lorasrv" in (tmp_path / ".bashrc").read_text()
        script = "source ~/.bash_completions/lorasrv.sh; COMP_WORDS=(lorasrv show m); COMP_CWORD=2; "
        script += "_lorasrv_completion lorasrv; echo ${COMPREPLY[@]}"
        done = self.bash(["bash", "--norc", "-c", script], variables)
        assert (done.stdout, done.stderr) == ("mia\n", "")

    def bash(self, command: Sequence[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, **variables}
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120, check=False)
