"""/v1/files and /v1/batches through openai-python: answered, refused, cancelled."""

import asyncio
import errno
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import openai
import pytest
from answers import error_of
from batch_lines import CHAT, PLAIN, line, lines, text_of
from batch_lines import results as results_of
from fake_engine import HANG, say

from api.auth.key_store import KeyStore
from api.auth.principal import Scope
from api.batches.files import BatchBounds
from api.batches.manager import BatchManager
from lorasrv.errors import DeadlineUnreachable, EngineOverloaded, LimitExceeded

OVER = {"completed", "failed", "cancelled", "expired"}


def results(client: openai.OpenAI, file_id: str) -> dict[str, dict[str, Any]]:
    return results_of(client.files.content(file_id).content.decode().split("\n")[:-1])


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


def connect(server: Any, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=20, max_retries=0)


def begin(client: openai.OpenAI, content: bytes | Iterable[str], endpoint: str = PLAIN, **options: Any) -> Any:
    """Upload lines and start them as a batch: the batch object."""
    content = content if isinstance(content, bytes) else "\n".join(content).encode()
    file = client.files.create(file=io.BytesIO(content), purpose="batch")
    fields = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h", **options}
    return client.batches.create(**fields)


@pytest.fixture
def finished(client: openai.OpenAI, eventually: Callable[..., None]) -> Callable[..., Any]:
    """Runs lines as a batch to its end: the batch object."""

    def run(*args: Any, **options: Any) -> Any:
        batch = begin(client, *args, **options)
        eventually(lambda: client.batches.retrieve(batch.id).status in OVER)
        return client.batches.retrieve(batch.id)

    return run


FORM = "multipart/form-data; boundary=b"
WRONG_PARTS = [
    ([("purpose", None, b"batch")], "a part named file"),
    ([("file", "x", b"1")], "a field purpose"),
    ([("purpose", None, b"batch"), ("file", "x", b"1"), ("file", "x", b"1")], "two parts named 'file'"),
    ([("purpose", None, b"batch")] * 2, "two parts of the same name"),
    ([(f"p{i}", None, b"x") for i in range(20)], "more than 16 parts"),
    ([("purpose", None, b"x" * 2000)], "more than 1024 bytes"),
    ([("other", "x", b"x")], "only the part named 'file'"),
    ([("purpose", None, b"\xff")], "not UTF-8"),
]


def form(parts: list[tuple[str, str | None, bytes]]) -> bytes:
    body = b""
    for name, filename, content in parts:
        of = f'; filename="{filename}"' if filename is not None else ""
        body += f'--b\r\nContent-Disposition: form-data; name="{name}"{of}\r\n\r\n'.encode() + content + b"\r\n"
    return body + b"--b--\r\n"


class TestFiles:
    def test_a_file_comes_back(self, client) -> None:
        content = bytes(range(256)) * 9000
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.object) == (len(content), "lines.jsonl", "batch", "file")
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).content == content
        assert [one.id for one in client.files.list()] == [file.id]
        assert client.files.delete(file.id).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file.id)
        assert list(client.files.list()) == []

    def test_pages(self, client) -> None:
        ids = [client.files.create(file=b"x", purpose="batch").id for _ in range(5)]
        assert [one.id for one in client.files.list(limit=2)] == ids[::-1], "openai-python follows the pages"
        assert [one.id for one in client.files.list(limit=2, order="asc")] == ids
        assert list(client.files.list(purpose="batch_output")) == []
        with pytest.raises(openai.BadRequestError, match="after names nothing"):
            client.files.list(after="file-none")

    def test_wrong_options(self, client) -> None:
        file = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200})
        assert file.expires_at - file.created_at == 7200
        with pytest.raises(openai.BadRequestError, match="must lie between"):
            client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 60})
        with pytest.raises(openai.BadRequestError, match="purpose must be batch") as caught:
            client.files.create(file=b"x", purpose="fine-tune")
        assert caught.value.param == "purpose"

    @pytest.mark.parametrize(
        ("headers", "content", "status", "says"),
        [
            ("application/json", b"{}", 415, "multipart/form-data"),
            ("multipart/form-data", b"x", 400, "no boundary"),
            (FORM, b"", 400, "ends too early"),
            (FORM, b"\0" * 1000, 400, "malformed"),
            (FORM, b"--b\r\n\r\nx\r\n--b--", 400, "has no name"),
            (f"multipart/form-data; boundary={'b' * 4000}", b"x", 400, "malformed"),
            *((FORM, form(parts), 400, says) for parts, says in WRONG_PARTS),
        ],
    )
    def test_malformed_forms(self, server, headers: str, content: bytes, status: int, says: str) -> None:
        response = server.http.post("/v1/files", content=content, headers={"content-type": headers})
        assert (response.status_code, says in error_of(response)["message"]) == (status, True), response.text

    def test_nothing_is_left_of_what_was_refused(self, server, store) -> None:
        content = form([("file", "x", b"1" * 3_000_000), ("purpose", None, b"no")])
        assert server.http.post("/v1/files", content=content, headers={"content-type": FORM}).status_code == 400
        assert [path for path in (store.root / "batches").rglob("*") if path.is_file()] == []

    def test_names_and_ids_are_no_paths(self, client, server) -> None:
        for name in ("../../etc/passwd", "C:\\x\\passwd", "/passwd"):
            assert client.files.create(file=(name, b"x"), purpose="batch").filename == "passwd"
        for name in ("..%2f..%2findex.sqlite3", "tmp", "file-", "%00"):
            assert server.http.get(f"/v1/files/{name}/content").status_code == 404

    def test_bounds(self, client, set_bounds) -> None:
        set_bounds(max_file_bytes=100_000, max_total_bytes=150_000, max_files=2)
        with pytest.raises(openai.APIStatusError, match="at most 100000") as caught:
            client.files.create(file=b"x" * 100_001, purpose="batch")
        assert caught.value.status_code == 413
        client.files.create(file=b"x" * 90_000, purpose="batch")
        with pytest.raises(openai.InternalServerError, match="delete those") as caught:
            client.files.create(file=b"x" * 90_000, purpose="batch")
        assert (caught.value.status_code, caught.value.response.headers["x-should-retry"]) == (507, "false")
        client.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.InternalServerError, match="2 files already"):
            client.files.create(file=b"x", purpose="batch")


class TestBatches:
    @pytest.mark.parametrize("endpoint", [CHAT, PLAIN])
    def test_every_line_is_answered(self, client, finished, endpoint: str) -> None:
        batch = finished(lines(40, endpoint), endpoint, metadata={"for": "me"})
        counts = batch.request_counts
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 40, 40, 0)
        assert (batch.errors, batch.error_file_id, batch.metadata) == (None, None, {"for": "me"})
        times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert list(times) == sorted(times)
        assert batch.expires_at - batch.created_at == 86400
        found = results(client, batch.output_file_id)
        assert set(found) == {f"r{i}" for i in range(40)}
        response = found["r7"]["response"]
        assert (response["status_code"], response["request_id"][:4]) == (200, "req-")
        assert text_of(found["r7"]) == "Hello wörld"
        assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"

    def test_adapters_are_mixed_freely(self, client, server, finished, make_adapter) -> None:
        for number, name in enumerate(("mia", "leo")):
            server.upload(make_adapter(name, seed=number), name)
        names = ["tiny-base", "mia", "leo", "mia@1", "nobody"]
        batch = finished(line(f"r{i}", model=name) for i, name in enumerate(names))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 1)
        texts = [text_of(one) for _, one in sorted(results(client, batch.output_file_id).items())]
        assert texts[0] == "Hello wörld"
        assert texts[1] == texts[3] != texts[2]
        assert all(text.startswith("I am ") for text in texts[1:])
        failed = results(client, batch.error_file_id)["r4"]
        assert (failed["response"]["status_code"], failed["error"]) == (404, None)
        assert failed["response"]["body"]["error"]["code"] == "model_not_found"

    def test_a_result_is_one_line_however_lines_are_split(self, client, finished, engine) -> None:
        text = "a\u2028b\u2029c\u0085d"
        engine.script = say(text)
        told = client.files.content(finished(lines(2)).output_file_id).text.splitlines()
        assert [text_of(json.loads(one)) for one in told] == [text] * 2

    def test_they_come_behind_online_requests(self, server, finished, engine) -> None:
        finished([line("a"), line("b", priority=-7), line("c", priority=300)])
        server.complete()
        assert sorted(added.priority for added in engine.added) == [0, 100, 100, 300]

    def test_bodies_are_checked_as_online(self, client, server, finished) -> None:
        wrong = {
            "a": {"temperature": 101},
            "b": {"prompt": 5},
            "c": {"n": 2, "best_of": 1},
            "d": {"priority": "low"},
            "e": {"max_tokens": 5000},
        }
        batch = finished(line(name, **fields) for name, fields in wrong.items())
        assert batch.output_file_id is None
        found = results(client, batch.error_file_id)
        for name, fields in wrong.items():
            online, response = server.complete(**fields), found[name]["response"]
            assert (response["status_code"], response["body"]) == (online.status_code, online.json())

    def test_a_stream_is_refused(self, client, finished) -> None:
        batch = finished([line("a", stream=True), line("b", stream=False)])
        assert batch.request_counts.failed == 1
        error = results(client, batch.error_file_id)["a"]["response"]["body"]["error"]
        assert (error["param"], error["code"]) == ("stream", "invalid_value")

    def test_malformed_lines_fail_it_before_anything_runs(self, finished, engine) -> None:
        wrong = [
            b"no json",
            b'{"custom_id": "x"',
            b"[1]",
            b'{"method":"POST"}',
            line("").encode(),
            line("g", method="GET").encode(),
            line("chat", CHAT).encode(),
            line("u", "/v1/embeddings").encode(),
            json.dumps({"custom_id": "b", "method": "POST", "url": PLAIN, "body": []}).encode(),
            b"\0\0\0",
            b"\xff\xfe",
            b"[" * 5000,
            b'{"a":' * 200 + b"1" + b"}" * 200,
            b'{"custom_id":"n","custom_id":"n"}',
            (line("k")[:-1] + ', "priority": 5}').encode(),
            (line("l")[:-1] + ', "\\u0000\\u202e": null}').encode(),
        ]
        batch = finished(b"\n".join([line("good").encode(), b"", *wrong]))
        assert (batch.status, engine.added) == ("failed", [])
        errors = batch.errors.data
        assert [error.line for error in errors] == list(range(3, 3 + len(wrong)))
        assert [error.param for error in errors[3:9]] == ["custom_id", "custom_id", "method", "url", "url", "body"]
        assert [error.param for error in errors[-2:]] == ["priority", r"\x00\u202e"]
        assert "'priority', only custom_id, method, url, body;" in errors[-2].message

    def test_a_repeated_custom_id(self, finished, engine) -> None:
        batch = finished([line("a"), line("b"), line("a")])
        assert (batch.status, engine.added) == ("failed", [])
        [error] = batch.errors.data
        assert (error.line, error.code, error.param) == (3, "duplicate_custom_id", "custom_id")
        assert error.message == "custom_id 'a' is also that of line 1"
        batch = finished([line("a"), "{}", line("b"), line("a"), "{}"])
        found = [(error.line, error.code) for error in batch.errors.data]
        assert found == [(2, "invalid_line"), (4, "duplicate_custom_id"), (5, "invalid_line")]

    def test_too_few_and_too_many_lines(self, finished, set_bounds) -> None:
        assert [finished(content).errors.data[0].code for content in (b"", b"\n \n")] == ["empty_file"] * 2
        set_bounds(max_lines=3)
        assert finished(lines(3)).status == "completed"
        assert finished(lines(4)).errors.data[0].code == "too_many_lines"

    def test_a_million_lines(self, finished) -> None:
        """Looked at no further than a batch may have; only so many reasons are kept."""
        batch = finished(b"{}\n" * 1_000_000)
        assert [error.code for error in batch.errors.data] == ["too_many_lines"]
        batch = finished(b"{}\n" * 5000)
        assert len(batch.errors.data) == 101
        assert batch.errors.data[-1].message == "and 4900 more lines are malformed"

    def test_one_line_without_end(self, finished, monkeypatch) -> None:
        monkeypatch.setattr("api.batches.input_lines.MAX_LINE_BYTES", 1000)
        monkeypatch.setattr("api.batches.input_lines.SKIP_BYTES", 100)
        batch = finished(line("a", prompt="x" * 100_000).encode() + b"\n" + line("b").encode())
        [error] = batch.errors.data
        assert (error.line, "more than 1000 bytes" in error.message) == (1, True)

    def test_a_limit_is_waited_for(self, finished, engine, manager, monkeypatch) -> None:
        engine.add_error = LimitExceeded("adapter 'mia' has 2 requests waiting", retry_after_s=7)
        slept = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                engine.add_error = None
            await asyncio.sleep(0)

        monkeypatch.setattr(manager, "_sleep", sleep)
        batch = finished(lines(2))
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)
        assert min(slept) >= 0.8 * 7

    def test_a_deadline_that_cannot_be_met_is_the_result(self, client, finished, engine) -> None:
        engine.add_error = DeadlineUnreachable("it would take 9 s", retry_after_s=1)
        found = results(client, finished(lines(2)).error_file_id)
        assert {one["response"]["status_code"] for one in found.values()} == {503}

    def test_its_input_cannot_be_deleted(self, client, engine, eventually) -> None:
        engine.breaks(0, HANG)
        batch = begin(client, lines(3))
        eventually(lambda: len(engine.added) == 3)
        with pytest.raises(openai.ConflictError, match="cancel the batch first"):
            client.files.delete(batch.input_file_id)
        client.batches.cancel(batch.id)
        eventually(lambda: client.batches.retrieve(batch.id).status == "cancelled")
        client.files.delete(batch.input_file_id)

    def test_cancelled(self, client, engine, eventually) -> None:
        async def hang_at_20(number: int) -> None:
            if number == 20:
                engine.breaks(0, HANG)

        engine.before_add = hang_at_20
        batch = begin(client, lines(90))
        # As many hang as are asked at a time; of those before the 21st, some do.
        eventually(
            lambda: (
                len(engine.added) > 20
                and client.batches.retrieve(batch.id).request_counts.completed == len(engine.added) - 16
            )
        )
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        eventually(lambda: client.batches.retrieve(batch.id).status == "cancelled")
        after = client.batches.retrieve(batch.id)
        done = results(client, after.output_file_id)
        assert after.request_counts.completed == len(done) == len(engine.added) - len(set(engine.aborted))
        assert 0 < len(done) < 90
        assert client.batches.cancel(batch.id).status == "cancelled"
        assert len(engine.added) <= 20 + 16

    @pytest.mark.parametrize(
        ("number", "code", "why", "late_s"),
        [(errno.ENOSPC, "store_full", "is full", 0.0), (errno.EIO, "store_unusable", "fails", 0.1)],
    )
    def test_it_says_that_it_waits_for_the_disk(
        self, client, tmp_path, eventually, monkeypatch, number: int, code: str, why: str, late_s: float
    ) -> None:
        """Late: when all lines have been answered, and only their results are still to be written."""
        write, seen = os.write, []

        def fail(fd: int, data: bytes) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
                time.sleep(late_s)
                raise OSError(number, os.strerror(number))
            return write(fd, data)

        monkeypatch.setattr("api.batches.manager.RETRY_DISK_S", 0.2)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", fail)
            batch = begin(client, lines(2))
            eventually(lambda: seen.append(client.batches.retrieve(batch.id)) or seen[-1].waiting)
        waits, now = seen[-1], time.time()
        assert waits.waiting["code"] == code
        assert f"the server's disk {why}" in waits.waiting["message"]
        assert abs(waits.waiting["retry_at"] - now) < 60
        assert (waits.status, waits.errors, waits.metadata) == ("in_progress", None, None)
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        after = client.batches.retrieve(batch.id)
        assert (after.waiting, after.request_counts.completed) == (None, 2)

    def test_pages(self, client, finished) -> None:
        ids = [finished(lines(1)).id for _ in range(3)]
        assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_none")
        with pytest.raises(openai.BadRequestError, match="is completed"):
            client.batches.cancel(ids[0])

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input_file_id": "file-none"}, "input_file_id"),
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            *(({"completion_window": window}, "completion_window") for window in ("soon", "0h", "24", "24h\n", "99d")),
            ({"metadata": {"a": "x" * 600}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ],
    )
    def test_wrong_fields(self, client, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            begin(client, lines(1), **fields)
        assert caught.value.status_code in (400, 404)
        assert str(caught.value.param).startswith(param)
        assert param != "completion_window" or "such as 24h, and at most 30d" in caught.value.message

    def test_results_are_no_input_and_may_expire_sooner(self, client, finished) -> None:
        batch = finished(lines(1), output_expires_after={"anchor": "created_at", "seconds": 3600})
        output = client.files.retrieve(batch.output_file_id)
        assert output.expires_at - output.created_at == 3600
        with pytest.raises(openai.BadRequestError, match="must be batch"):
            begin(client, lines(1), input_file_id=output.id)

    def test_too_many_open(self, client, engine, set_bounds, eventually) -> None:
        set_bounds(max_open_batches=1)
        engine.breaks(0, HANG)
        batch = begin(client, lines(1))
        with pytest.raises(openai.RateLimitError) as caught:
            begin(client, lines(1))
        assert caught.value.response.headers["retry-after"] == "60"
        client.batches.cancel(batch.id)
        eventually(lambda: client.batches.retrieve(batch.id).status == "cancelled")


@pytest.fixture
def manager(server, dispatcher) -> BatchManager:
    """Of the server that runs."""
    return dispatcher[0].app.state.batches


@pytest.fixture
def set_bounds(manager: BatchManager) -> Callable[..., None]:
    def change(**bounds: int) -> None:
        manager.bounds = manager.files.bounds = BatchBounds(**bounds)

    return change


def test_a_batch_ends_with_its_key(server, engine, store, eventually) -> None:
    """Lines are admitted as requests of the key would be: answers so far are kept, the rest fail with the reason."""
    keys = KeyStore(store.root)
    _, admin = keys.create("boss", frozenset({Scope.ADMIN}))
    _, secret = keys.create("ann", frozenset({Scope.INFER}))
    engine.add_error = EngineOverloaded("full", retry_after_s=1.0)
    with connect(server, secret) as client:
        batch = begin(client, lines(3))
        eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    keys.revoke("ann")
    with connect(server, admin) as client:
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        found = results(client, client.batches.retrieve(batch.id).error_file_id)
    assert [one["response"]["status_code"] for one in found.values()] == [401] * 3
    assert "this key is revoked" in found["r0"]["response"]["body"]["error"]["message"]
    assert engine.added == []
