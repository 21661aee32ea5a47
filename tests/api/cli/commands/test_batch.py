"""`lorasrv batch`: answered, gone on with, stopped, refused."""

import contextlib
import json
import os
import pty
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proxy import proxied

from api.batches import runner
from lorasrv.errors import DeadlineUnreachable, LimitExceeded, StepFailed

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"


def line(custom_id: str, **fields: Any) -> str:
    url = CHAT if custom_id.startswith("chat") else PLAIN
    given = {"prompt": "hi"} if url == PLAIN else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "tiny-base", **given, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def batch(cli, server, files) -> Callable[..., Any]:
    """Runs the command on these lines; None leaves the file as it is."""

    def run(lines: list[str] | None, *options: object) -> Any:
        if lines is not None:
            files[0].write_text("\n".join(lines))
        return cli("batch", *files, "--server", server.url, *options)

    return run


def results(path: Path) -> dict[str | None, dict[str, Any]]:
    """By custom_id; those without one by `line N`."""
    found = [json.loads(one) for one in path.read_text().splitlines()]
    named = {one["custom_id"] or f"line {one['error']['line']}": one for one in found}
    assert len(named) == len(found), "no line has two results"
    return named


class TestAnswers:
    def test_all(self, batch, files, engine) -> None:
        done = batch([line(f"r{i}") for i in range(30)] + [line("chat")], "--json")
        assert done.code == 0, done.err
        summary = json.loads(done.out)
        assert (summary["total"], summary["completed"], summary["failed"], summary["already"]) == (31, 31, 0, 0)
        assert summary["completion_tokens"] == 31 * 11
        found = results(files[1])
        assert set(found) == {*(f"r{i}" for i in range(30)), "chat"}
        assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello wörld"
        assert found["r3"]["response"]["request_id"].startswith("req-")
        assert {added.priority for added in engine.added} == {100}

    def test_adapters_are_mixed(self, batch, files, server, make_adapter) -> None:
        for number, name in enumerate(("mia", "leo")):
            server.upload(make_adapter(name, seed=number), name)
        names = ["mia", "leo", "tiny-base", "mia"] * 5
        assert batch([line(f"r{i}", model=name) for i, name in enumerate(names)]).code == 0
        texts = {
            (names[int(name[1:])], one["response"]["body"]["choices"][0]["text"])
            for name, one in results(files[1]).items()
        }
        assert len(texts) == 3, "each adapter one text, and each its own"

    def test_failures(self, batch, files) -> None:
        lines = [line("a"), line("b", model="nobody"), "", "{", line("c", stream=True), line("d", temperature=-1), "[]"]
        done = batch(lines)
        assert done.code == 1
        assert "5 of 6 lines failed" in done.err
        assert done.out.startswith("1 of 6 lines answered")
        found = results(files[1])
        assert set(found) == {"a", "b", "c", "d", "line 4", "line 7"}
        assert found["b"]["response"]["status_code"] == 404
        assert found["c"]["response"]["body"]["error"]["param"] == "stream"
        assert found["d"]["response"]["body"]["error"]["param"] == "temperature"
        assert found["line 4"]["error"]["message"].startswith("line 4: the line is not JSON")
        assert found["line 4"]["response"] is None

    def test_ordered(self, batch, files, engine) -> None:
        add, waits = engine.add_choices, random.Random(0)

        async def add_slowly(*arguments: Any, **options: Any) -> Any:
            import asyncio

            for _ in range(waits.randrange(40)):
                await asyncio.sleep(0)
            return await add(*arguments, **options)

        engine.add_choices = add_slowly
        lines = [line(f"r{i}") for i in range(100)]
        lines[7] = "{"
        assert batch(lines, "--ordered", "--concurrency", 4).code == 1
        expected = [f"line {i + 1}" if i == 7 else f"r{i}" for i in range(100)]
        assert list(results(files[1])) == expected

    def test_concurrency_is_bounded(self, batch, engine) -> None:
        add, inside, most = engine.add_choices, [0], [0]

        async def add_counted(*arguments: Any, **options: Any) -> Any:
            import asyncio

            inside[0] += 1
            most[0] = max(most[0], inside[0])
            for _ in range(20):
                await asyncio.sleep(0)
            inside[0] -= 1
            return await add(*arguments, **options)

        engine.add_choices = add_counted
        assert batch([line(f"r{i}") for i in range(30)], "--concurrency", 3).code == 0
        assert most[0] <= 3

    def test_a_limit_is_waited_for(self, batch, engine, monkeypatch) -> None:
        monkeypatch.setattr("api.batches.runner.MAX_PAUSE_S", 0.01)
        add, refused = engine.add_choices, []

        async def add_later(*arguments: Any, **options: Any) -> Any:
            if len(refused) < 5:
                refused.append(1)
                raise LimitExceeded("adapter 'mia' has 2 requests waiting", retry_after_s=1)
            return await add(*arguments, **options)

        engine.add_choices = add_later
        assert batch([line(f"r{i}") for i in range(3)]).code == 0
        assert len(refused) == 5

    def test_a_deadline_that_cannot_be_met_is_told_once(self, batch, files, engine) -> None:
        asked = []

        async def add_never(*_: Any, **__: Any) -> Any:
            asked.append(1)
            raise DeadlineUnreachable("it would take 9 s", retry_after_s=1)

        engine.add_choices = add_never
        assert batch([line("a", timeout_s=1)]).code == 1
        assert results(files[1])["a"]["response"]["body"]["error"]["code"] == "deadline_unreachable"
        assert len(asked) == 1

    @pytest.mark.parametrize("most_s", [0.0, 1.0, 4.0])
    def test_nothing_is_asked_for_ever(self, batch, files, engine, monkeypatch, most_s: float) -> None:
        monkeypatch.setattr("api.batches.runner.USUAL_PAUSE_S", 0.5)
        monkeypatch.setitem(runner.MAX_PUT_OFF_S, 429, most_s)
        monkeypatch.setattr("api.batches.runner.random.uniform", lambda low, high: 0.0)
        asked = []

        async def add_never(*_: Any, **__: Any) -> Any:
            asked.append(1)
            raise LimitExceeded("adapter 'mia' has 2 requests waiting", retry_after_s=1)

        engine.add_choices = add_never
        assert batch([line("a")]).code == 1
        assert results(files[1])["a"]["response"]["status_code"] == 429
        assert len(asked) == {0.0: 1, 1.0: 2, 4.0: 4}[most_s], "pauses of 1, 1.5 and 2.25 s"


class TestGoingOn:
    def test_what_is_there_is_not_asked_again(self, batch, files, engine) -> None:
        lines = [line(f"r{i}") for i in range(10)] + ["{"]
        assert batch(lines).code == 1
        whole = files[1].read_bytes().splitlines(keepends=True)
        asked = len(engine.added)
        files[1].write_bytes(b"".join(whole[:6]) + whole[6][: len(whole[6]) // 2])
        done = batch(None, "--json")
        assert json.loads(done.out)["already"] == 6
        assert len(engine.added) - asked <= 5
        assert set(results(files[1])) == {*(f"r{i}" for i in range(10)), "line 11"}
        asked = len(engine.added)
        done = batch(None, "--json")
        assert (done.code, json.loads(done.out)["already"], len(engine.added)) == (1, 11, asked)

    def test_at_any_byte(self, batch, files, engine) -> None:
        """Wherever a crash tore the file, the next run makes it whole."""
        lines = [line(f"r{i}", max_tokens=1) for i in range(3)]
        batch(lines)
        content = files[1].read_bytes()
        for size in (0, 5, len(content) // 2, len(content) - 1):
            files[1].write_bytes(content[:size])
            assert batch(None).code == 0
            assert set(results(files[1])) == {"r0", "r1", "r2"}

    def test_restart(self, batch, files, engine) -> None:
        batch([line("a")])
        engine.text = "other"
        assert batch(None, "--restart").code == 0
        assert results(files[1])["a"]["response"]["body"]["choices"][0]["text"] == "other"

    def test_failed_ones_are_asked_again(self, batch, files, engine) -> None:
        other = '{"id":"batch_req_0","custom_id":"other","response":null,"error":{"code":"x","message":"y"}}\n'
        files[1].write_text(other)
        files[1].chmod(0o640)
        add = engine.add_choices

        async def add_some(*arguments: Any, **options: Any) -> Any:
            if "bad" in repr((arguments, options)):
                raise StepFailed("no")
            return await add(*arguments, **options)

        engine.add_choices = add_some
        lines = [line("a"), line("b", prompt="bad"), "{", line("c"), line("d", prompt="bad")]
        assert batch(lines).code == 1
        before = results(files[1])
        engine.add_choices, asked = add, len(engine.added)
        done = batch(None, "--retry-failed", "--json")
        summary = json.loads(done.out)
        assert (done.code, summary["completed"], summary["failed"], summary["already"]) == (1, 4, 1, 2)
        after = results(files[1])
        assert len(engine.added) - asked == 2
        assert set(after) == {"a", "b", "c", "d", "other", "line 3"}
        assert [after[name] == before[name] for name in ("a", "c", "other", "b", "d")] == [True] * 3 + [False] * 2
        assert [after[name]["response"]["status_code"] for name in "abcd"] == [200] * 4
        assert files[1].stat().st_mode & 0o777 == 0o640
        assert sorted(path.name for path in files[1].parent.iterdir() if "jsonl" in path.name) == [
            "in.jsonl",
            "out.jsonl",
        ]
        files[0].write_text("\n".join(lines[:2]))
        assert batch(None, "--retry-failed").code == 0, "nothing is left to ask"

    def test_retrying_that_asks_nobody_drops_nothing(self, batch, cli, files) -> None:
        assert batch([line("a", model="nobody")]).code == 1
        before = files[1].read_bytes()
        assert cli("batch", *files, "--retry-failed", "--server", "http://127.0.0.1:9").code == 3
        assert files[1].read_bytes() == before
        assert batch(None, "--retry-failed", "--restart").code == 2

    @pytest.mark.parametrize("status", [502, 503, 504])
    def test_a_proxy_whose_server_is_away(self, cli, files, server, monkeypatch, status: int) -> None:
        """Its page is no line's answer; but a 504 may be about that line alone, and then ends it."""
        monkeypatch.setattr("api.batches.remote.USUAL_PAUSE_S", 0.0)
        files[0].write_text("\n".join(line(f"r{i}") for i in range(8)))
        with proxied(server.url, status) as proxy:
            proxy.refuses = 2
            done = cli("batch", *files, "--server", proxy.url, "--concurrency", 1)
            assert done.code == 0, done.err
            assert len(results(files[1])) == 8
            files[0].write_text(line("late"))
            files[1].unlink()
            proxy.refuses = 3
            done = cli("batch", *files, "--server", proxy.url)
        if status == 504:
            assert (done.code, results(files[1])["late"]["response"]["status_code"]) == (1, 504)
        else:
            assert (done.code, files[1].read_bytes()) == (3, b"")
            assert f"a proxy says {status}" in done.err

    def test_a_restart_that_asks_nobody_drops_nothing(self, batch, cli, files) -> None:
        batch([line("a")])
        before = files[1].read_bytes()
        assert cli("batch", *files, "--restart", "--server", "http://127.0.0.1:9").code == 3
        assert files[1].read_bytes() == before

    @pytest.mark.parametrize("content", ["my diary\n", "my diary", '{"a": 1}\n', "[]\n{"])
    def test_other_files_are_left_alone(self, batch, files, content: str) -> None:
        files[1].write_text(content)
        done = batch([line("a")])
        assert (done.code, "--restart" in done.err) == (2, True)
        assert files[1].read_text() == content

    def test_interrupted(self, batch, files, engine) -> None:
        add, asked = engine.add_choices, []

        async def add_and_interrupt(*arguments: Any, **options: Any) -> Any:
            asked.append(1)
            if len(asked) == 40:
                engine.hang_after = 0
                # To the thread that waits in its loop: another, and nothing would wake it.
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return await add(*arguments, **options)

        engine.add_choices = add_and_interrupt
        done = batch([line(f"r{i}") for i in range(100)])
        assert done.code == 130
        assert "run the same command to resume" in done.err
        some = len(results(files[1]))
        assert 0 < some < 100
        engine.hang_after, engine.add_choices = None, add
        assert batch(None).code == 0
        assert len(results(files[1])) == 100

    def test_a_server_that_goes_away(self, batch, files, engine, monkeypatch) -> None:
        monkeypatch.setattr("api.batches.remote.USUAL_PAUSE_S", 0.0)
        import httpx2

        post, sent = httpx2.AsyncClient.post, []

        async def post_some(self: Any, *arguments: Any, **options: Any) -> Any:
            sent.append(1)
            if len(sent) > 20:
                raise httpx2.ReadError("gone")
            return await post(self, *arguments, **options)

        monkeypatch.setattr(httpx2.AsyncClient, "post", post_some)
        done = batch([line(f"r{i}") for i in range(50)])
        assert (done.code, "stopped answering" in done.err) == (3, True)
        assert 0 < len(results(files[1])) <= 20
        monkeypatch.setattr(httpx2.AsyncClient, "post", post)
        assert batch(None).code == 0


class TestRefused:
    def test_duplicates_before_anything_runs(self, batch, files, engine) -> None:
        done = batch([line("a"), line("b"), line("a"), line("b")])
        assert (done.code, engine.added, files[1].exists()) == (2, [], False)
        assert "line 3: custom_id 'a' is also that of line 1" in done.err
        assert "line 4: custom_id 'b' is also that of line 2" in done.err

    def test_paths(self, cli, server, files, tmp_path: Path) -> None:
        source, target = files
        assert cli("batch", source, target).code == 2
        source.write_text("")
        assert cli("batch", source, target).code == 2
        source.write_text(line("a"))
        for wrong in (tmp_path, tmp_path / "no" / "out.jsonl", source):
            assert cli("batch", source, wrong, "--server", server.url).code == 2
        assert source.read_text() == line("a")

    def test_nobody_there(self, cli, files) -> None:
        files[0].write_text(line("a"))
        assert cli("batch", *files, "--server", "http://127.0.0.1:9").code == 3

    def test_a_server_or_an_engine(self, cli, files, server) -> None:
        files[0].write_text(line("a"))
        done = cli("batch", *files, "--server", server.url, "--model", "x")
        assert (done.code, "give one of them" in done.err) == (2, True)

    def test_two_at_a_time(self, batch, files) -> None:
        import fcntl

        files[1].touch()
        with files[1].open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            done = batch([line("a")])
        assert (done.code, "another command" in done.err) == (2, True)


class TestHostileLines:
    def test_each_is_its_own_error(self, batch, files, engine) -> None:
        wrong = [b"\0" * 50, b"\xff\xfe\xfd", b"[" * 100_000, b'{"a":' * 300, b"{}", b"null", b'"x"', b"1e999", b"NaN"]
        good = [line(f"r{i}").encode() for i in range(3)]
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
        import tracemalloc

        from api.batches.input_lines import duplicates, scan

        source = tmp_path / "in.jsonl"
        text = "x" * 2000
        with source.open("w") as file:
            for i in range(5000):
                file.write(f'{{"custom_id":"r{i}","method":"POST","url":"{PLAIN}","body":{{"p":"{text}"}}}}\n')
        tracemalloc.start()
        try:
            found = scan(source)
            assert duplicates(source, found) == []
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found.total == 5000
        assert most < 1_000_000


class TestProgress:
    def test_plain_lines(self, batch) -> None:
        done = batch([line(f"r{i}") for i in range(200)])
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
            done = batch([line(f"r{i}") for i in range(20)])
        reader.join(10)
        os.close(leader)
        text = shown.decode()
        assert done.code == 0
        assert "20/20" in text
        assert "lines/s" in text
        assert done.out.startswith("20 of 20 lines answered")


class TestKilled:
    @pytest.mark.long
    def test_sigkill_at_random_moments(self, tmp_path: Path, server, files) -> None:
        """A real process, killed without warning until it is done: every line has one result."""
        import subprocess

        source, target = files
        source.write_text("\n".join(line(f"r{i}") for i in range(120)))
        command = [sys.executable, "-P", "-c", "from api.cli.main import main; main()"]
        moments = random.Random(1)
        for kills_left in (1, 0):
            process = subprocess.Popen(
                [*command, "batch", str(source), str(target), "--server", server.url],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            if kills_left:
                begun = len(target.read_bytes()) if target.exists() else 0
                wanted = begun + moments.randrange(1000, 20_000)
                while process.poll() is None and (not target.exists() or target.stat().st_size < wanted):
                    time.sleep(0.002)
                process.kill()
            err = process.communicate()[1].decode()
        assert process.returncode == 0, err
        assert set(results(target)) == {f"r{i}" for i in range(120)}
