"""The whole system: a real `lorasrv serve` process, the real command line, openai-python over real sockets."""

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from served import Served, serve

QUESTIONS = ("What should I eat for breakfast?", "How do I fall asleep faster?")
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def server(cli: Callable[..., Any], personas: dict[str, Path]) -> Iterator[Served]:
    with serve("--pool-bytes", "512MiB") as started:
        for name, folder in personas.items():
            done = cli("upload", str(folder), "--id", name, "--server", started.url)
            assert done.returncode == 0, done.stderr
            assert "matched" in done.stdout
        yield started


def _body(model: str, question: str, **more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0.0, **more}


async def _streamed(client: openai.AsyncOpenAI, model: str, question: str) -> tuple[str, str, int]:
    """(text, finish reason, completion tokens of the usage chunk)."""
    stream = await client.chat.completions.create(
        **_body(model, question), stream=True, stream_options={"include_usage": True}
    )
    text, reason, used = "", "", 0
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        if chunk.usage:
            assert chunk.choices == []
            used = chunk.usage.completion_tokens
    return text, reason, used


def test_personas_and_base_concurrently_streaming_and_not(server, personas: dict[str, Path]) -> None:
    names = ["smollm2-135m", *personas]

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            pairs = [(name, question) for name in names for question in QUESTIONS]
            streamed = await asyncio.gather(*(_streamed(client, *pair) for pair in pairs))
            whole = await asyncio.gather(*(client.chat.completions.create(**_body(*pair)) for pair in pairs))
        for (name, _), (text, reason, used), answer in zip(pairs, streamed, whole, strict=True):
            assert text
            assert reason in ("stop", "length")
            assert 0 < used <= NEW_TOKENS
            assert answer.model == name
            assert answer.choices[0].message.content
        by_name = {name: {t for (n, _), (t, _, _) in zip(pairs, streamed, strict=True) if n == name} for name in names}
        assert len({frozenset(texts) for texts in by_name.values()}) == len(names), "every name has a voice of its own"

    asyncio.run(main())


def test_the_answer_names_its_adapter(server, personas: dict[str, Path]) -> None:
    name = next(iter(personas))
    body = {**_body("smollm2-135m", QUESTIONS[0]), "adapter_id": f"{name}@1"}
    response = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200
    assert response.headers["x-adapter-id"].startswith(name)
    assert re.fullmatch(r"(sha256:)?[0-9a-f]{64}", response.headers["x-adapter-digest"])
    assert response.headers["x-adapter-tier"] in ("resident", "host", "disk")
    assert response.headers["x-request-id"]


def test_unknown_adapter_is_never_the_base(server, personas: dict[str, Path]) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    wrong = next(iter(personas))[:-1] + "x"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**_body(wrong, QUESTIONS[0]))
    assert caught.value.code == "model_not_found"
    assert next(iter(personas)) in str(caught.value)


def test_a_client_that_leaves_frees_its_pages(server) -> None:
    body = _body("smollm2-135m", QUESTIONS[0], stream=True, ignore_eos=True)
    with httpx2.stream("POST", server.url + "/v1/chat/completions", json={**body, "max_tokens": 4000}) as response:
        next(response.iter_lines())
    server.calm_down()


def test_bad_uploads_store_nothing(server, cli, personas: dict[str, Path], tmp_path: Path) -> None:
    source = next(iter(personas.values()))
    config = (source / "adapter_config.json").read_bytes()
    weights = (source / "adapter_model.safetensors").read_bytes()
    cases = {
        "truncated": (config, weights[:-100]),
        "pickle": (config, b"\x80\x04\x95" + b"x" * 100),
        "bdlora": (json.dumps({**json.loads(config), "use_bdlora": True}).encode(), weights),
        "rank": (json.dumps({**json.loads(config), "r": 3}).encode(), weights),
    }
    for name, (bad_config, bad_weights) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes(bad_config)
        (folder / "adapter_model.safetensors").write_bytes(bad_weights)
        done = cli("upload", str(folder), "--id", f"bad-{name}", "--server", server.url)
        assert done.returncode == 1, f"{name}: {done.stdout}"
        assert done.stderr
        assert "Traceback" not in done.stderr
    listed = httpx2.get(server.url + "/v1/models").json()["data"]
    assert not [m["id"] for m in listed if m["id"].startswith("bad-")]


@pytest.mark.long
def test_start_failures_are_one_clear_line(cli, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        in_use = cli("serve", "--port", port, "--store", str(tmp_path / "a"))
    missing = cli("serve", "--model", str(tmp_path / "nowhere.gguf"), "--port", "0", "--store", str(tmp_path / "b"))
    (tmp_path / "file").write_text("not a folder")
    unusable = cli("serve", "--port", "0", "--store", str(tmp_path / "file"))
    unknown = cli("serve", "--quantization", "int7", "--port", "0", "--store", str(tmp_path / "c"))
    for done, word in ((in_use, port), (missing, "nowhere"), (unusable, "store"), (unknown, "int8")):
        assert done.returncode in (1, 2), done.stdout + done.stderr
        assert word in done.stderr
        assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "flags", "named"),
    [
        (
            2,
            ["--quantization", "int5"],
            "--quantization 'int5' is unknown; choose from auto, none, int8, int4, q3h, nf4, fp4, fp8",
        ),
        pytest.param(
            2,
            ["--quantization", "int4", "--quantization-group", "48"],
            "choose from 32, 64, 128",
            marks=pytest.mark.exhaustive,
        ),
        (2, ["--quantization", "int4", "--quantization-group", "128"], "do not divide the 576 inputs"),
        (1, ["--quantized-weights", "nowhere.safetensors"], "there is no file nowhere.safetensors"),
    ],
)
def test_formats_that_cannot_be_had_are_one_clear_line(
    cli, tmp_path: Path, code: int, flags: list[str], named: str
) -> None:
    done = cli("serve", "--store", str(tmp_path / "store"), "--port", "0", *flags)
    assert (done.returncode, done.stdout) == (code, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lorasrv: ")
    assert named in last


def test_unreachable_server_is_exit_code_3(cli) -> None:
    done: subprocess.CompletedProcess[str] = cli("list", "--server", "http://127.0.0.1:9")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_adapters_survive_a_restart(cli, personas: dict[str, Path], tmp_path: Path) -> None:
    name, folder = next(iter(personas.items()))
    answers = []
    for starts in range(2):
        with serve("--pool-bytes", "128MiB", store=tmp_path / "store") as server:
            if not starts:
                assert cli("upload", str(folder), "--id", name, "--server", server.url).returncode == 0
            asked = ("--adapter", name, "--max-tokens", "12", "--temperature", "0", "--server", server.url)
            answers.append(cli("generate", QUESTIONS[0], *asked))
            assert answers[-1].returncode == 0
    assert answers[0].stdout == answers[1].stdout
