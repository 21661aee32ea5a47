"""`lorasrv batch`: answered, resumed, stopped, refused."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import random
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cli_process
import httpx2
import pytest
from answers import failed
from batch_lines import CHAT, line, lines, text_of
from batch_lines import results as results_of
from fake_engine import HANG, say
from proxy import proxied

from api.batches import runner
from api.batches.input_lines import duplicates, scan
from lorasrv.errors import DeadlineUnreachable, LimitExceeded, StepFailed


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def batch(cli, server, files) -> Callable[..., Any]:
    """Runs the command on these lines; None leaves the file as it is."""

    def run(lines: Sequence[str] | None, *options: object, url: str = server.url) -> Any:
        if lines is not None:
            files[0].write_text("\n".join(lines))
        return cli("batch", *files, "--server", url, *options)

    return run


def results(path: Path) -> dict[str, dict[str, Any]]:
    return results_of(path.read_text().splitlines())


class TestAnswers:
    def test_all(self, batch, files, engine) -> None:
        done = batch([*lines(30), line("chat", CHAT)], "--json")
        assert done.code == 0, done.err
        summary = {"total": 31, "completed": 31, "failed": 0, "already": 0, "completion_tokens": 31 * 11}
        assert summary.items() <= json.loads(done.out).items()
        found = results(files[1])
        assert set(found) == {*(f"r{i}" for i in range(30)), "chat"}
        assert text_of(found["chat"]) == "Hello wörld"
        assert found["r3"]["response"]["request_id"].startswith("req-")
        assert {added.priority for added in engine.added} == {100}

    def test_failures(self, batch, files) -> None:
        wrong = [line("b", model="nobody"), "", "{", line("c", stream=True), line("d", temperature=-1), "[]"]
        done = batch([line("a"), *wrong, line("e")[:-1] + ', "model": "mia"}'])
        assert (done.code, "6 of 7 lines failed" in done.err) == (1, True)
        assert done.out.startswith("1 of 7 lines answered")
        found = results(files[1])
        assert set(found) == {"a", "b", "c", "d", "e", "line 4", "line 7"}
        assert found["e"]["error"]["param"] == "model", "which stands in the body"
        assert found["b"]["response"]["status_code"] == 404
        assert found["c"]["response"]["body"]["error"]["param"] == "stream"
        assert found["d"]["response"]["body"]["error"]["param"] == "temperature"
        assert found["line 4"]["error"]["message"].startswith("line 4: the line is not JSON")
        assert found["line 4"]["response"] is None

    def test_ordered(self, batch, files, engine) -> None:
        waits = random.Random(0)

        async def wait(_: int) -> None:
            for _ in range(waits.randrange(40)):
                await asyncio.sleep(0)

        engine.before_add = wait
        ids = [f"r{i}" for i in range(100)]
        ids[7] = "line 8"
        assert batch([line(name) if name[0] == "r" else "{" for name in ids], "--ordered", "--concurrency", 4).code == 1
        assert list(results(files[1])) == ids

    def test_concurrency_is_bounded(self, batch, engine) -> None:
        inside, most = [0], [0]

        async def count(_: int) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            for _ in range(20):
                await asyncio.sleep(0)
            inside[0] -= 1

        engine.before_add = count
        assert batch(lines(30), "--concurrency", 3).code == 0
        assert most[0] <= 3

    def test_a_limit_is_waited_for(self, batch, engine, monkeypatch) -> None:
        monkeypatch.setattr("api.batches.runner.MAX_PAUSE_S", 0.01)
        asked = []

        async def refuse_five(number: int) -> None:
            asked.append(number)
            if number < 5:
                raise LimitExceeded("adapter 'mia' has 2 requests waiting", retry_after_s=1)

        engine.before_add = refuse_five
        assert batch(lines(3)).code == 0
        assert len(asked) == 8

    @pytest.mark.parametrize(
        ("error", "most_s", "times", "response"),
        [
            (DeadlineUnreachable("it would take 9 s", retry_after_s=1), 0.0, 1, (503, "deadline_unreachable")),
            # Pauses of 1, 1.5 and 2.25 s.
            *(
                (LimitExceeded("2 requests waiting", retry_after_s=1), most_s, times, (429, "limit_exceeded"))
                for most_s, times in ((0.0, 1), (1.0, 2), (4.0, 4))
            ),
        ],
    )
    def test_none_is_asked_for_ever(
        self, batch, files, engine, monkeypatch, error, most_s: float, times: int, response: tuple[int, str]
    ) -> None:
        monkeypatch.setattr("api.batches.runner.USUAL_PAUSE_S", 0.5)
        monkeypatch.setitem(runner.MAX_PUT_OFF_S, 429, most_s)
        monkeypatch.setattr("api.batches.runner.random.uniform", lambda low, high: 0.0)
        asked = []

        async def never(number: int) -> None:
            asked.append(number)
            raise error

        engine.before_add = never
        assert batch([line("a")]).code == 1
        found = results(files[1])["a"]["response"]
        assert (found["status_code"], found["body"]["error"]["code"]) == response
        assert len(asked) == times


class TestResumed:
    def test_a_result_is_not_asked_again(self, batch, files, engine) -> None:
        assert batch([*lines(10), "{"]).code == 1
        whole, asked = files[1].read_bytes().splitlines(keepends=True), len(engine.added)
        files[1].write_bytes(b"".join(whole[:6]) + whole[6][: len(whole[6]) // 2])
        assert json.loads(batch(None, "--json").out)["already"] == 6
        assert len(engine.added) - asked <= 5
        assert set(results(files[1])) == {*(f"r{i}" for i in range(10)), "line 11"}
        asked = len(engine.added)
        done = batch(None, "--json")
        assert (done.code, json.loads(done.out)["already"], len(engine.added)) == (1, 11, asked)
        assert batch(None).out == "10 of 11 lines have answers already; nothing was sent\n"

    def test_at_any_byte(self, batch, files) -> None:
        """Wherever a crash tore the file, the next run makes it whole."""
        batch([line(f"r{i}", max_tokens=1) for i in range(3)])
        content = files[1].read_bytes()
        for size in (0, 5, len(content) // 2, len(content) - 1):
            files[1].write_bytes(content[:size])
            assert batch(None).code == 0
            assert set(results(files[1])) == {"r0", "r1", "r2"}

    def test_restart(self, batch, files, engine) -> None:
        batch([line("a")])
        engine.script = say("other")
        assert batch(None, "--restart").code == 0
        assert text_of(results(files[1])["a"]) == "other"

    def test_failed_ones_are_asked_again(self, batch, files, engine) -> None:
        other = '{"id":"batch_req_0","custom_id":"other","response":null,"error":{"code":"x","message":"y"}}\n'
        files[1].write_text(other)
        files[1].chmod(0o640)
        engine.script = lambda *args: [StepFailed("no")] if bytes(args[2].prompt) == b"bad" else say()(*args)
        given = [line("a"), line("b", prompt="bad"), "{", line("c"), line("d", prompt="bad")]
        assert batch(given).code == 1
        before = results(files[1])
        engine.script, asked = say(), len(engine.added)
        done = batch(None, "--retry-failed", "--json")
        summary = json.loads(done.out)
        assert (done.code, summary["completed"], summary["failed"], summary["already"]) == (1, 4, 1, 2)
        after = results(files[1])
        assert len(engine.added) - asked == 2
        assert set(after) == {"a", "b", "c", "d", "other", "line 3"}
        assert [after[name] == before[name] for name in ("a", "c", "other", "b", "d")] == [True] * 3 + [False] * 2
        assert [after[name]["response"]["status_code"] for name in "abcd"] == [200] * 4
        assert files[1].stat().st_mode & 0o777 == 0o640
        assert sorted(path.name for path in files[1].parent.glob("*jsonl*")) == ["in.jsonl", "out.jsonl"]
        files[0].write_text("\n".join(given[:2]))
        assert batch(None, "--retry-failed").code == 0, "nothing is left to ask"

    def test_ordered_holds_over_runs(self, batch, files, engine) -> None:
        """Whether failed lines are retried, or earlier results came in another order."""
        other = '{"id":"batch_req_0","custom_id":"other","response":null,"error":{"code":"x","message":"y"}}\n'
        files[1].write_text(other)
        engine.script = lambda *args: [StepFailed("no")] if bytes(args[2].prompt) == b"bad" else say()(*args)
        given = [line("a", prompt="bad"), "{", line("b"), line("c", prompt="bad"), line("d")]
        assert batch(given, "--ordered").code == 1
        before = results(files[1])
        engine.script = say()
        assert batch(None, "--retry-failed", "--ordered").code == 1
        after = results(files[1])
        assert list(after) == ["a", "line 2", "b", "c", "d", "other"]
        assert [after[name] == before[name] for name in ("b", "d", "other", "a", "c")] == [True] * 3 + [False] * 2
        turned = b"".join(reversed(files[1].read_bytes().splitlines(keepends=True)[2:]))
        files[1].write_bytes(turned)
        assert batch(None, "--ordered").code == 1
        assert list(results(files[1])) == ["a", "line 2", "b", "c", "d", "other"]
        written = files[1].stat().st_ino
        assert batch(None, "--ordered").code == 1
        assert files[1].stat().st_ino == written, "what is in order is not written again"

    @pytest.mark.parametrize("option", ["--retry-failed", "--restart"])
    def test_results_stay_if_no_server_answers(self, batch, files, option: str) -> None:
        assert batch([line("a", model="nobody")]).code == 1
        before = files[1].read_bytes()
        assert batch(None, option, url="http://127.0.0.1:9").code == 3
        assert files[1].read_bytes() == before
        assert batch(None, "--retry-failed", "--restart").code == 2

    @pytest.mark.parametrize("status", [502, 503, 504])
    def test_a_proxy_whose_server_is_away(self, batch, files, server, monkeypatch, status: int) -> None:
        """Its page is no line's answer; but a 504 may be about that line alone, and then ends it."""
        monkeypatch.setattr("api.batches.remote.USUAL_PAUSE_S", 0.0)
        with proxied(server.url, status) as proxy:
            proxy.refuses = 2
            done = batch(lines(8), "--concurrency", 1, url=proxy.url)
            assert done.code == 0, done.err
            assert len(results(files[1])) == 8
            files[1].unlink()
            proxy.refuses = 3
            done = batch([line("late")], url=proxy.url)
        if status == 504:
            assert (done.code, results(files[1])["late"]["response"]["status_code"]) == (1, 504)
        else:
            assert (done.code, files[1].read_bytes()) == (3, b"")
            assert f"a proxy says {status}" in done.err

    @pytest.mark.parametrize("content", ["my diary\n", "my diary", '{"a": 1}\n', "[]\n{"])
    def test_other_files_are_left_alone(self, batch, files, content: str) -> None:
        files[1].write_text(content)
        done = batch([line("a")])
        assert (done.code, "--restart" in done.err) == (2, True)
        assert files[1].read_text() == content

    def test_interrupted(self, batch, files, engine) -> None:
        async def interrupt(number: int) -> None:
            if number == 39:
                engine.breaks(0, HANG)
                # To the thread that waits in its loop: another, and nothing would wake it.
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        engine.before_add = interrupt
        done = batch(lines(100))
        assert (done.code, "run the same command to resume" in done.err) == (130, True)
        assert 0 < len(results(files[1])) < 100
        engine.script, engine.before_add = say(), None
        assert batch(None).code == 0
        assert len(results(files[1])) == 100

    def test_a_server_that_goes_away(self, batch, files, monkeypatch) -> None:
        monkeypatch.setattr("api.batches.remote.USUAL_PAUSE_S", 0.0)
        post, sent = httpx2.AsyncClient.post, []

        async def post_some(self: Any, *arguments: Any, **options: Any) -> Any:
            sent.append(1)
            if len(sent) > 20:
                raise httpx2.ReadError("gone")
            return await post(self, *arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(httpx2.AsyncClient, "post", post_some)
            done = batch(lines(50))
        assert (done.code, "stopped answering" in done.err) == (3, True)
        assert 0 < len(results(files[1])) <= 20
        assert batch(None).code == 0


class TestRefused:
    def test_duplicates_before_anything_runs(self, batch, files, engine) -> None:
        done = batch([line("a"), line("b"), line("a"), line("b")])
        failed(done, 2, *(f"line {n}: custom_id {i!r} is also that of line {n - 2}" for n, i in ((3, "a"), (4, "b"))))
        assert (engine.added, files[1].exists()) == ([], False)

    def test_paths(self, cli, server, files, tmp_path: Path) -> None:
        source, target = files
        assert cli("batch", source, target).code == 2
        source.write_text("")
        assert cli("batch", source, target).code == 2
        source.write_text(line("a"))
        folder = tmp_path / "no"
        says = {
            tmp_path: "a regular file",
            folder / "out": f"OUT: the folder {folder} does not exist",
            source: "the same",
        }
        for wrong, why in says.items():
            failed(cli("batch", source, wrong, "--server", server.url), 2, why)
        assert source.read_text() == line("a")
        os.mkfifo(tmp_path / "pipe")
        failed(cli("batch", tmp_path / "pipe", target, "--server", server.url), 2, "IN: ", "a regular file")

    def test_a_server_or_an_engine(self, batch) -> None:
        failed(batch([line("a")], "--model", "x"), 2, "give one of them")
        assert batch(None, url="http://127.0.0.1:9").code == 3

    def test_two_at_a_time(self, batch, files) -> None:
        files[1].touch()
        with files[1].open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            failed(batch([line("a")]), 2, "another command")


class TestHostileLines:
    def test_each_is_its_own_error(self, batch, files, engine) -> None:
        wrong = [b"\0" * 50, b"\xff\xfe\xfd", b"[" * 100_000, b'{"a":' * 300, b"{}", b"null", b'"x"', b"1e999", b"NaN"]
        good = [one.encode() for one in lines(3)]
        files[0].write_bytes(b"\xef\xbb\xbf" + good[0] + b"\r\n" + b"\n".join([*wrong, good[1], b"", good[2]]))
        assert batch(None).code == 1
        found = results(files[1])
        assert set(found) == {"r0", "r1", "r2", *(f"line {2 + i}" for i in range(len(wrong)))}
        assert len(engine.added) == 3

    def test_a_line_without_end(self, batch, files, monkeypatch) -> None:
        monkeypatch.setattr("api.batches.input_lines.MAX_LINE_BYTES", 1000)
        monkeypatch.setattr("api.batches.input_lines.SKIP_BYTES", 64)
        assert batch([line("a"), "x" * 10_000, line("b"), "y" * 10_000]).code == 1
        found = results(files[1])
        assert set(found) == {"a", "b", "line 2", "line 4"}
        assert "more than 1000 bytes" in found["line 2"]["error"]["message"]

    def test_memory_of_many_lines(self, tmp_path: Path) -> None:
        """8 bytes a line, and one line at a time: 10 MB of lines take less than 1 MB."""
        source = tmp_path / "in.jsonl"
        with source.open("w") as file:
            file.writelines(line(f"r{i}", prompt="x" * 2000) + "\n" for i in range(5000))
        tracemalloc.start()
        try:
            found = scan(source)
            assert duplicates(source, found) == []
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (found.total, most < 1_000_000) == (5000, True)


class TestProgress:
    def test_plain_lines(self, batch) -> None:
        done = batch(lines(200))
        told = [one for one in done.err.splitlines() if " of 200 lines, " in one]
        assert 1 <= len(told) <= 10
        assert all("lines/s" in one and "left" in one for one in told)
        assert "\x1b" not in done.err

    def test_a_bar_on_a_terminal(self, batch, monkeypatch) -> None:
        leader, follower = pty.openpty()
        shown = bytearray()

        def read() -> None:
            with contextlib.suppress(OSError):
                while piece := os.read(leader, 4096):
                    shown.extend(piece)

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(follower, "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            monkeypatch.setenv("TERM", "xterm")
            done = batch(lines(20))
        reader.join(10)
        os.close(leader)
        text = shown.decode()
        assert (done.code, "20/20" in text, "lines/s" in text) == (0, True, True)
        assert done.out.startswith("20 of 20 lines answered")


@pytest.mark.long
def test_sigkill_at_random_moments(server, files) -> None:
    """A real process, killed without warning until it is done: every line has one result."""
    source, target = files
    source.write_text("\n".join(lines(120)))
    wanted = random.Random(1).randrange(1000, 20_000)
    with cli_process.started("batch", source, target, "--server", server.url) as process:
        while process.poll() is None and (not target.exists() or target.stat().st_size < wanted):
            time.sleep(0.002)
    done = cli_process.run("batch", source, target, "--server", server.url)
    assert done.returncode == 0, done.stderr
    assert set(results(target)) == {f"r{i}" for i in range(120)}
