"""The command line against a running server: what it prints, where, and its exit codes."""

import json
import subprocess
import sys

import pytest

from api.client import Client, Refused, ServerUnreachable


class TestAdapters:
    def test_upload_show_list_rm(self, cli, server, make_adapter) -> None:
        to_server = ("--server", server.url)
        folder = make_adapter()
        (folder / "training_args.bin").write_bytes(b"x")
        done = cli("upload", folder, "--id", "mia", *to_server)
        assert done.code == 0
        assert done.out.startswith("registered mia@1  ")
        assert "4 of 4 modules matched in 2 layers, rank 2, scaling 2, F32" in done.out
        assert "not used: training_args.bin" in done.err
        assert "hashing done" in done.err
        assert "sending done" in done.err
        assert cli("upload", folder, "--id", "mia", *to_server).out.startswith("unchanged: mia@1")
        [row] = cli("list", *to_server).out.splitlines()
        assert row.split("\t")[:2] == ["mia", "1"]
        assert "version 1: " in cli("show", "mia", *to_server).out
        assert cli("rm", "mia", *to_server).out == "removed mia (1 version)\n"
        gone = cli("show", "mia", *to_server)
        assert (gone.code, gone.out) == (1, "")
        assert gone.err == "lorasrv: adapter 'mia' does not exist\n"

    def test_json(self, cli, server, make_adapter) -> None:
        options = ("--json", "--server", server.url)
        done = json.loads(cli("upload", make_adapter(), "--id", "mia", *options).out)
        assert (done["version"], done["report"]["modules_matched"]) == (1, 4)
        assert [a["id"] for a in json.loads(cli("list", *options).out)] == ["mia"]
        assert json.loads(cli("show", "mia", *options).out)["digest"] == done["digest"]
        assert json.loads(cli("rm", "mia@1", *options).out)["deleted"]

    def test_refused_with_every_problem(self, cli, server, make_adapter) -> None:
        folder = make_adapter(use_dora=True, lora_bias=True)
        refused = cli("upload", folder, "--id", "mia", "--server", server.url)
        assert (refused.code, refused.out) == (1, "")
        assert "lorasrv: the adapter is refused" in refused.err
        assert "use_dora" in refused.err
        assert "lora_bias" in refused.err

    def test_a_bad_id_comes_with_a_good_one(self, cli, server, make_adapter) -> None:
        refused = cli("upload", make_adapter(), "--id", "Mia!", "--server", server.url)
        assert refused.code == 1
        assert "try 'mia'" in refused.err

    def test_if_not_exists(self, cli, server, make_adapter) -> None:
        command = ("upload", make_adapter(), "--id", "mia", "--if-not-exists", "--server", server.url)
        assert cli(*command).code == 0
        assert cli(*command).code == 1

    def test_no_adapter_there(self, cli, server, tmp_path) -> None:
        for folder in (tmp_path / "nowhere", tmp_path):
            refused = cli("upload", folder, "--id", "mia", "--server", server.url)
            assert refused.code == 1
            assert refused.err.count("\n") == 2


class TestHabits:
    """What is typed out of habit, from ollama, docker or vLLM."""

    @pytest.mark.parametrize(
        ("typed", "ours"),
        [
            (("help",), ("--help",)),
            (("help", "key", "create"), ("key", "create", "--help")),
            (("version",), ("--version",)),
            (("ls",), ("list",)),
            (("ps",), ("pool",)),
            (("run", "mia", "hi"), ("generate", "hi", "--adapter", "mia")),
            (("chat", "mia", "hi"), ("generate", "hi", "--adapter", "mia")),
            (("chat", "--adapter", "mia"), ("chat", "mia")),
            (("generate", "hi", "--model", "mia"), ("generate", "hi", "-a", "mia")),
        ],
    )
    def test_does_what_is_meant(self, cli, server, make_adapter, monkeypatch, typed, ours) -> None:
        monkeypatch.setenv("LORASRV_SERVER", server.url)
        assert cli("upload", make_adapter()).out.startswith("registered mia@1  "), "named as its folder"
        meant = cli(*ours, stdin="hi\n")
        assert meant.code == 0
        assert meant.out
        assert cli(*typed, stdin="hi\n") == meant

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("serve", "a.gguf", "--model", "b"), "'a.gguf' and --model 'b' are the same option; give one of them"),
            (("chat", "mia", "--adapter", "tom"), "give the adapter once: mia, or --adapter tom"),
        ],
    )
    def test_given_twice(self, cli, arguments, says: str) -> None:
        done = cli(*arguments)
        assert (done.code, done.out, done.err) == (2, "", f"lorasrv: {says}\n")

    def test_rm_of_several(self, cli, server, make_adapter) -> None:
        to_server = ("--server", server.url)
        for name in ("Org Mia", "tom"):
            assert cli("upload", make_adapter(name), *to_server).code == 0
        done = cli("rm", "org-mia", "nobody", "tom", *to_server)
        assert (done.code, done.out) == (1, "removed org-mia (1 version)\nremoved tom (1 version)\n")
        assert done.err == "lorasrv: 1 of 3 were not removed\n  adapter 'nobody' does not exist\n"


class TestTalk:
    def test_generate(self, cli, server, engine) -> None:
        done = cli(
            "generate", "hi", "--system", "be kind", "--temperature", "0", "--max-tokens", "5", "--server", server.url
        )
        assert (done.code, done.out, done.err) == (0, "Hello\n", "")
        assert bytes(engine.added[0].prompt) == b"system:be kind\nuser:hi"
        assert (engine.added[0].sampling.temperature, engine.added[0].sampling.max_tokens) == (0, 5)

    def test_priority_and_timeout(self, cli, server, engine) -> None:
        options = ("--priority", "-3", "--timeout", "2.5", "--server", server.url)
        assert cli("generate", "hi", *options).code == 0
        assert cli("chat", *options, stdin="hi\n").code == 0
        assert cli("generate", "hi", "--server", server.url).code == 0
        assert [(added.priority, added.timeout_s) for added in engine.added] == [(-3, 2.5)] * 2 + [(0, None)]

    def test_generate_json_says_who(self, cli, server, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        done = cli("generate", "-", "-a", "mia", "--json", "--server", server.url, stdin="from a pipe")
        answer = json.loads(done.out)
        assert answer["text"].startswith("I am ")
        assert (answer["adapter_id"], answer["adapter_tier"], answer["finish_reason"]) == ("mia", "disk", "stop")
        assert answer["usage"]["prompt_tokens"] == len("user:from a pipe")

    def test_chat_remembers(self, cli, server, engine) -> None:
        done = cli("chat", "--server", server.url, stdin="one\ntwo\n")
        assert (done.code, done.out) == (0, "Hello wörld\nHello wörld\n")
        assert bytes(engine.added[1].prompt).decode() == "user:one\nassistant:Hello wörld\nuser:two"

    def test_unknown_adapter(self, cli, server) -> None:
        refused = cli("chat", "nobody", "--server", server.url, stdin="hi\n")
        assert (refused.code, refused.err) == (1, "lorasrv: the model 'nobody' does not exist\n")

    def test_error_in_a_stream(self, cli, server, engine) -> None:
        engine.breaks(2)
        refused = cli("generate", "hi", "--server", server.url)
        assert (refused.code, refused.err) == (1, "lorasrv: the engine died: Test\n")


class TestExitCodes:
    @pytest.mark.parametrize(
        "arguments",
        [["fly"], ["list", "--what"], ["upload"], ["serve", "--port", "x"], ["generate", "x", "--max-tokens", "0"]],
    )
    def test_usage(self, cli, arguments: list[str]) -> None:
        assert cli(*arguments).code == 2

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["--host", "0.0.0.0"], "--insecure"),
            (["--pool-bytes", "lots"], "--pool-bytes"),
            (["--port", "70000"], "--port"),
            (["--dtype", "float8"], "--dtype"),
            (["--max-num-seqs", "0"], "--max-num-seqs"),
            (["--host-cache-bytes", "0"], "--host-cache-bytes must be positive, not 0"),
            (["--swap-bytes", "-1"], "--swap-bytes"),
            (["--adapter-pool-fraction", "1.0"], "--adapter-pool-fraction must be above 0 and below 1, not 1.0"),
            (["--adapter-pool-fraction", "0"], "--adapter-pool-fraction"),
            (["--policy", "fare"], "--policy 'fare' is unknown; choose from fair, fcfs, mlfq, sjf"),
            (["--target-itl-ms", "0"], "--target-itl-ms must be positive, not 0"),
            (["--target-itl-ms", "none"], "--target-itl-ms: "),
            (["--max-wait-steps", "0"], "--max-wait-steps must be positive"),
            (["--queue-timeout-s", "-1"], "--queue-timeout-s must be positive"),
            (["--queue-timeout-s", "nan"], "--queue-timeout-s"),
            (["--max-queued", "0"], "--max-queued: "),
            (["--max-running-per-adapter", "0"], "--max-running-per-adapter must be above 0, not 0"),
            (["--max-queued-per-adapter", "-2"], "--max-queued-per-adapter must be above 0"),
            (["--tokens-per-s-per-adapter", "nan"], "--tokens-per-s-per-adapter must be above 0"),
            (["--resident-bytes-per-adapter", "0"], "--resident-bytes-per-adapter must be above 0"),
            (["--resident-bytes-per-adapter", "-1"], "--resident-bytes-per-adapter: must not be negative"),
            (["--resident-bytes-per-key", "much"], "--resident-bytes-per-key: "),
            (["--max-running-per-key", "0"], "--max-running-per-key must be above 0"),
            (["--max-queued-per-key", "0"], "--max-queued-per-key must be above 0"),
            (["--tokens-per-s-per-key", "inf"], "--tokens-per-s-per-key must be above 0"),
            (
                ["--max-running-per-adapter", "9", "--max-num-seqs", "8"],
                "--max-running-per-adapter 9 is more than --max-num-seqs 8",
            ),
            (["--max-running-per-key", "65"], "--max-running-per-key 65 is more than --max-num-seqs 64"),
            (["--preemption", "never"], "--preemption 'never' is unknown; choose from auto, recompute, swap"),
        ],
    )
    def test_serve_refuses_wrong_values_in_one_line(self, cli, tmp_path, options: list[str], says: str) -> None:
        done = cli("serve", "--port", "0", "--model", "nowhere.gguf", "--store", tmp_path, *options)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert says in done.err

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", "base.gguf: the GGUF file is empty"),
            (b"PK\x03\x04", "base.gguf: not a GGUF file: it does not begin with GGUF"),
            (b"GGUF\x03\0\0\0", "base.gguf: the GGUF file is truncated in its header, at byte 8 of 8"),
            (b"GGUF\x01\0\0\0" + bytes(16), "base.gguf: GGUF version 1 (or byte order) is not supported; known: 2, 3,"),
            (b"GGUF\x03\0\0\0" + b"\xff" * 16, "base.gguf: the GGUF file is damaged or truncated: 184467440737095516"),
            (b"GGUF\x03\0\0\0" + bytes(16), "base.gguf: architecture '' is not supported; known: Gemma2ForCausalLM, "),
        ],
    )
    def test_serve_refuses_a_corrupt_gguf_in_one_line(self, cli, tmp_path, content: bytes, says: str) -> None:
        file = tmp_path / "base.gguf"
        file.write_bytes(content)
        done = cli("serve", "--port", "0", "--kernels", "torch", "--model", file, "--store", tmp_path / "store")
        lines = done.err.splitlines()
        assert (done.code, done.out, lines[-1][: len(says) + 9]) == (1, "", f"lorasrv: {says}")
        assert "Traceback" not in done.err
        assert [line for line in lines if line.startswith("lorasrv: ")] == lines[-1:]

    @pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://nowhere.invalid", "gopher://x", "127.0.0.1:1", ""])
    def test_unreachable(self, cli, url: str, tmp_path) -> None:
        for command in (
            ["list"],
            ["rm", "mia"],
            ["generate", "hi"],
            ["chat"],
            ["warm", "mia"],
            ["pin", "mia"],
            ["pool"],
            ["limit", "mia"],
        ):
            done = cli(*command, "--server", url)
            assert (done.code, done.out, done.err.count("\n")) == (3, "", 1), done.err

    def test_something_else_answers(self, cli, server, dispatcher) -> None:
        async def other(scope, receive, send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>"})

        dispatcher[0].app = other
        done = cli("list", "--server", server.url)
        assert (done.code, done.err.count("\n")) == (3, 1)
        assert "not lorasrv" in done.err

    def test_a_bug_is_one_line_too(self, cli, monkeypatch) -> None:
        def bug(*_: object) -> None:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(Client, "adapters", bug)
        done = cli("list")
        assert done.code == 1
        assert done.err.startswith("lorasrv: unexpected ZeroDivisionError: oops\n")

    def test_version_and_help(self, cli) -> None:
        assert cli("--version").out.strip().count(".") == 2
        commands = ("serve", "upload", "list", "show", "rm", "chat", "generate", "check", "demo")
        for command in (*commands, "warm", "pin", "unpin", "pool", "limit"):
            assert cli(command, "--help").code == 0
        assert "256MiB]" in cli("serve", "--help").out


class TestClient:
    def test_a_stream_that_breaks_off_is_no_answer(self, server, engine) -> None:
        engine.breaks(2, ZeroDivisionError())
        with Client(server.url) as client, pytest.raises(ServerUnreachable):
            list(client.chat({"model": "tiny-base", "messages": [{"role": "user", "content": "x"}]}))

    @pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
    def test_the_base_is_asked_for(self, cli, server, suffix: str) -> None:
        """Also at the address that OpenAI's clients are given."""
        assert cli("generate", "hi", "--server", server.url + suffix).out == "Hello wörld\n"
        with Client(server.url + suffix) as client:
            assert client.base_name() == "tiny-base"
            with pytest.raises(Refused) as caught:
                client.adapter("a/b@c")
        assert caught.value.status == 404


def test_help_and_client_commands_import_neither_torch_nor_the_server() -> None:
    heavy = {"torch", "numpy", "fastapi", "uvicorn", "pydantic"}
    script = f"import sys, api.cli.main, api.client; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


class TestCheck:
    @pytest.fixture(autouse=True)
    def tiny_base(self, store, monkeypatch) -> None:
        monkeypatch.setattr("api.cli.commands.check.shapes_of", lambda model: store.base)

    def test_good(self, cli, make_adapter) -> None:
        folder = make_adapter("given/run-1").parent
        (folder / "run-1" / "optimizer.pt").write_bytes(b"x")
        done = cli("check", folder)
        assert done.code == 0
        assert done.out.startswith("ok  ")
        assert "4 of 4 modules matched" in done.out
        assert done.err.splitlines() == ["found in sub-folder run-1", "not used: optimizer.pt"]
        assert json.loads(cli("check", folder, "--json").out)["report"]["rank_max"] == 2

    def test_bad(self, cli, make_adapter) -> None:
        folder = make_adapter(use_dora=True, rank=4)
        done = cli("check", folder, "--max-lora-rank", 3, "--json")
        assert done.code == 1
        codes = {problem["field"] for problem in json.loads(done.out)["problems"]}
        assert "use_dora" in codes
        assert len(codes) > 1
        assert done.err.startswith("lorasrv: the adapter is refused\n  ")

    def test_the_digest_is_the_servers(self, cli, server, make_adapter) -> None:
        folder = make_adapter()
        uploaded = server.upload(folder, "mia").json()["digest"]
        assert uploaded == "sha256:" + json.loads(cli("check", folder, "--json").out)["report"]["digest"]
