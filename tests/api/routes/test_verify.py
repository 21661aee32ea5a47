"""Verifying over HTTP and from the command line, with processes that only play their part: ends, refusals, progress."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.auth.key_store import KeyStore
from api.auth.principal import Scope
from lorasrv.offline.verify.verifier import Verifier

RESULT: dict[str, Any] = {
    "verdict": "within",
    "reasons": [],
    "notes": ["a note"],
    "adapter_error": {
        "positions": 36,
        "max_abs": 0.5,
        "mean_abs": 0.1,
        "rms": 0.2,
        "spread": 3.0,
        "max_relative": 0.02,
        "greedy_equal": 35,
        "largest_gap": 0.01,
    },
    "effect": {"max_abs": 9.0, "mean_abs": 2.0, "rms": 3.0, "tokens_changed": 20, "shows_in_logits": True},
    "linears": {"compared": 8, "adapted": 8, "max_error": 0.002, "worst": "layers.0.x", "wrong": [], "num_wrong": 0},
    "computed_with": {"model": "tiny", "quantization": "int8", "dtype": "bfloat16", "kernels": "numba"},
    "seconds": 12.0,
    "cpu_seconds": 9.0,
    "peak_bytes": 1 << 30,
}
RESULT["base_error"] = RESULT["adapter_error"]
RESULT["linears"]["limit"] = 0.01

PART = """
import json, os, pathlib, sys, time
job = json.loads(sys.stdin.buffer.readline())
pathlib.Path({pids!r}).joinpath(str(os.getpid())).write_text(json.dumps(job))
def tell(**event):
    print(json.dumps(event), flush=True)
tell(progress=["loading", 0.5])
"""
ENDS = {
    "answers": f"tell(result=json.loads({json.dumps(RESULT)!r}))",
    "differs": f"tell(result=dict(json.loads({json.dumps(RESULT)!r}), verdict='differs', reasons=['it is wrong']))",
    "hangs": "time.sleep(600)",
    "fails": "tell(error='the adapter overflows'); sys.exit('Traceback: /secret/path')",
    "crashes": "print('noise of a library', file=sys.stderr); os._exit(7)",
    "is killed": "os.kill(os.getpid(), 9)",
}


class Children:
    """The processes that were started, by the files that each has left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def jobs(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in (file.read_text() for file in self._folder.iterdir()) if text]

    def alive(self) -> list[int]:
        return [pid for pid in (int(file.name) for file in self._folder.iterdir()) if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def children(tmp_path: Path) -> Children:
    folder = tmp_path / "pids"
    folder.mkdir()
    return Children(folder)


@pytest.fixture
def verified_by(make_server, make_adapter, monkeypatch: pytest.MonkeyPatch, children: Children) -> Callable[[str], Any]:
    """A server whose verifications end so; `mia` is there to be verified."""

    def start(end: str) -> Any:
        script = PART.format(pids=str(children._folder)) + ENDS[end]
        monkeypatch.setattr("api.app.Verifier", lambda: Verifier([sys.executable, "-c", script]))
        server = make_server()
        server.upload(make_adapter(), "mia").raise_for_status()
        return server

    return start


def verify(server: Any, reference: str = "mia", **body: Any) -> Any:
    return server.http.post(f"/v1/adapters/{reference}:verify", json=body)


def events(response: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class TestAnswer:
    def test_the_verdict_comes_back_and_is_stored(self, verified_by, store) -> None:
        server = verified_by("answers")
        before = server.http.get("/v1/adapters/mia").json()
        assert before["verified"] is None
        response = verify(server)
        assert response.status_code == 200
        body = response.json()
        assert (body["object"], body["id"], body["version"]) == ("adapter.verdict", "mia", 1)
        assert body["digest"] == before["digest"]
        assert {**body, **RESULT} == body
        assert server.http.get("/v1/adapters/mia").json()["verified"] == body
        assert store.version_history.verdict(store.resolve("mia@1")) == body

    def test_a_version_that_is_deleted_meanwhile(self, verified_by, store, monkeypatch) -> None:
        """Whoever has waited gets the verdict, which is kept nowhere."""
        record = store.version_history.record_verdict

        def deleted_first(*arguments: Any) -> None:
            store.delete("mia")
            record(*arguments)

        server, ref = verified_by("answers"), store.resolve("mia")
        monkeypatch.setattr(store.version_history, "record_verdict", deleted_first)
        response = verify(server)
        assert (response.status_code, response.json()["id"]) == (200, "mia")
        assert store.version_history.verdict(ref) is None

    def test_the_process_is_told_what_the_server_serves(self, verified_by, children: Children, store, engine) -> None:
        server = verified_by("answers")
        verify(server, prompts=["hello", "you"]).raise_for_status()
        (job,) = children.jobs()
        assert job["key"] == store.resolve("mia").key
        assert job["config"]["target_modules"] == ["q_proj", "v_proj"]
        assert [bytes(ids) for ids in job["prompts"]] == [b"user:hello", b"user:you"]
        assert (job["model"]["device"], job["model"]["model"]) == ("cpu", "smollm2-135m")

    def test_without_a_template_prompts_are_taken_as_they_are(self, verified_by, children: Children, engine) -> None:
        class Bytes:
            def encode(self, text: str) -> list[int]:
                return list(text.encode())

        server = verified_by("answers")
        engine.chat_template, engine.tokenizer = None, Bytes()
        verify(server, prompts=["hello"]).raise_for_status()
        assert bytes(children.jobs()[0]["prompts"][0]) == b"hello"

    def test_built_in_prompts_are_cut_to_what_fits(self, verified_by, children: Children, engine) -> None:
        server = verified_by("answers")
        engine.max_model_len = 20
        verify(server).raise_for_status()
        (job,) = children.jobs()
        assert len(job["prompts"]) == 4
        assert all(0 < len(ids) + job["new_tokens"] <= 20 for ids in job["prompts"])

    def test_progress_as_events(self, verified_by) -> None:
        told = events(verify(verified_by("answers"), stream=True))
        assert told[0] == {"progress": ["loading", 0.5]}
        assert told[1]["verdict"] == "within"
        assert len(told) == 2


class TestEnds:
    @pytest.mark.parametrize(
        ("end", "named"),
        [("fails", "the adapter overflows"), ("crashes", "exit code 7"), ("is killed", "signal 9")],
    )
    def test_no_verdict(self, verified_by, store, children: Children, end: str, named: str) -> None:
        server = verified_by(end)
        response = verify(server)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "verification_failed")
        assert response.headers["x-should-retry"] == "false"
        assert named in error["message"]
        assert "/secret" not in response.text
        assert store.version_history.verdict(store.resolve("mia")) is None
        assert children.alive() == []
        (failed,) = [told for told in events(verify(server, stream=True)) if "error" in told]
        assert named in failed["error"]["message"]

    def test_the_time_is_up(self, verified_by, children: Children) -> None:
        server = verified_by("hangs")
        response = verify(server, timeout_s=1.0)
        assert (response.status_code, response.json()["error"]["param"]) == (504, "timeout_s")
        assert "1 s" in response.json()["error"]["message"]
        assert len(children.jobs()) == 1
        assert children.alive() == []

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_client_leaves(self, verified_by, children: Children, eventually, stream: bool) -> None:
        server = verified_by("hangs")
        body = json.dumps({"stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = "POST /v1/adapters/mia:verify HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            eventually(children.jobs)
            assert children.alive()
        eventually(lambda: children.alive() == [])

    def test_one_at_a_time(self, verified_by, children: Children, eventually) -> None:
        server = verified_by("hangs")
        first: list[Any] = []
        thread = threading.Thread(target=lambda: first.append(verify(server, timeout_s=20)))
        thread.start()
        eventually(children.jobs)
        response = verify(server, "mia@1")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (429, "verification_running")
        assert "mia@1 is being verified" in error["message"]
        assert int(response.headers["retry-after"]) > 0
        for pid in children.alive():
            os.kill(pid, signal.SIGKILL)
        thread.join(20)
        assert first[0].status_code == 503
        assert verify(server, timeout_s=0.5).status_code == 504, "the next one may begin"

    @pytest.mark.long
    def test_what_is_deleted_meanwhile_stays_readable(self, verified_by, children: Children, eventually, store) -> None:
        server = verified_by("hangs")
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.append(verify(server, timeout_s=3)))
        thread.start()
        eventually(children.jobs)
        server.http.delete("/v1/adapters/mia").raise_for_status()
        store.collect()
        assert Path(children.jobs()[0]["weights"]).is_file()
        thread.join(20)
        assert done[0].status_code == 504
        eventually(lambda: store.collect() or not Path(children.jobs()[0]["weights"]).exists())

    def test_the_server_stops(self, verified_by, children: Children, eventually, dispatcher) -> None:
        server = verified_by("hangs")
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.append(verify(server)))
        thread.start()
        eventually(children.jobs)
        asyncio.run(dispatcher[0].app.state.services.verifier.close())
        thread.join(20)
        assert (done[0].status_code, verify(server).status_code) == (503, 503)
        assert "shutting down" in done[0].json()["error"]["message"]
        assert children.alive() == []


class TestRefused:
    def test_memory(self, verified_by, children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
        server = verified_by("answers")
        monkeypatch.setattr("lorasrv.offline.verify.verifier.free_bytes", lambda: 100 << 20)
        response = verify(server)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "verification_unavailable")
        assert "0.10 GiB are free" in error["message"]
        assert "ignore_memory" in error["message"]
        assert children.jobs() == []
        assert verify(server, ignore_memory=True).status_code == 200

    def test_memory_is_the_administrators(self, verified_by, children: Children, store) -> None:
        """Without memory the server goes down, for everybody."""
        server, book = verified_by("answers"), KeyStore(store.root)
        for scope, status in ((Scope.UPLOAD, 403), (Scope.ADMIN, 200)):
            server.http.headers["authorization"] = f"Bearer {book.create(f'only-{scope}', frozenset({scope}))[1]}"
            assert verify(server, ignore_memory=True).status_code == status
            assert len(children.jobs()) == (status == 200)

    @pytest.mark.parametrize("missing", ["peft", "transformers"])
    def test_packages(self, verified_by, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
        server = verified_by("answers")
        from importlib import util

        find = util.find_spec
        monkeypatch.setattr(util, "find_spec", lambda name, *args: None if name == missing else find(name, *args))
        response = verify(server)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "verification_unavailable")
        assert missing in error["message"]
        assert "pip install 'lorasrv[train]'" in error["message"]

    def test_an_unknown_adapter(self, verified_by) -> None:
        response = verify(verified_by("answers"), "mio")
        assert response.status_code == 404
        assert "mia" in response.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"prompts": []}, "prompts"),
            ({"prompts": [""]}, "prompts[0]"),
            ({"prompts": ["x"] * 17}, "prompts"),
            ({"prompts": ["x", "y" * 600]}, "prompts[1]"),
            ({"prompts": "x"}, "prompts"),
            ({"timeout_s": 0}, "timeout_s"),
            ({"timeout_s": 3601}, "timeout_s"),
            ({"stream": "yes"}, "stream"),
            ({"promts": ["x"]}, "promts"),
        ],
    )
    def test_fields_are_named(self, verified_by, children: Children, body: dict[str, Any], param: str) -> None:
        response = verify(verified_by("answers"), **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert children.jobs() == []


class TestCommand:
    def test_a_verdict(self, verified_by, cli, children: Children, tmp_path: Path) -> None:
        server = verified_by("answers")
        (tmp_path / "prompts.txt").write_text("one\n\n  two \n")
        done = cli("verify", "mia", "--server", server.url, "--prompts", tmp_path / "prompts.txt")
        assert done.code == 0
        assert "mia@1" in done.out
        assert "within" in done.out
        assert "35 of 36" in done.out
        assert "note: a note" in done.out
        kept = cli("show", "mia", "--server", server.url).out
        assert " UTC: within, logits off by at most " in kept
        assert "loading" in done.err
        assert [bytes(ids) for ids in children.jobs()[0]["prompts"]] == [b"user:one", b"user:two"]

    def test_as_json(self, verified_by, cli) -> None:
        server = verified_by("answers")
        done = cli("verify", "mia@1", "--server", server.url, "--json", "--timeout", 60)
        assert json.loads(done.out)["verdict"] == "within"

    def test_one_that_differs(self, verified_by, cli) -> None:
        server = verified_by("differs")
        done = cli("verify", "mia", "--server", server.url, "--json")
        assert done.code == 1
        assert "it is wrong" in done.err
        assert json.loads(done.out)["verdict"] == "differs"

    @pytest.mark.parametrize(("end", "named"), [("fails", "overflows"), ("hangs", "not done within 1 s")])
    def test_no_verdict(self, verified_by, cli, end: str, named: str) -> None:
        server = verified_by(end)
        done = cli("verify", "mia", "--server", server.url, "--timeout", 1)
        assert done.code == 1
        assert named in done.err

    def test_no_prompt(self, verified_by, cli, tmp_path: Path) -> None:
        (tmp_path / "none.txt").write_text("\n \n")
        done = cli("verify", "mia", "--prompts", tmp_path / "none.txt")
        assert done.code == 2
        assert "none.txt" in done.err
