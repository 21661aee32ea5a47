"""Measure whether HTTP in a process of its own would make steps shorter: the same load three times, on this machine.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_isolation.py --rows 16 --adapters 0

alone: steps of the engine in this process, without HTTP: no arrangement can be faster.
beside: the same steps, while another process streams as many tokens at the same pace, detokenized, as server-sent
  events, to `lorasrv bench`: an engine process beside an HTTP process, with free messages between them.
served: `lorasrv serve` as it is, engine and HTTP as threads of one process, under the same `lorasrv bench`: time
  between tokens.

The difference between served and beside is the most that a process could gain.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from harness import adapter_folders, arguments, decode_seconds, environment, lorasrv_command, row, run_json, table

from api.asgi.sse import DONE, event
from lorasrv.config import BUILTIN_MODEL
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.tokenizer import Tokenizer

NEW_TOKENS, PROMPT_TOKENS = 160, 64
# Steps at both ends are left out: not all rows run then.
EDGE = 16
PORT = 18753
TEXT = "The quick brown fox jumps over the lazy dog, and then goes home. "


def steps_ms(llm: LLM, names: list[str | None]) -> float:
    """Return the median of steps in which all rows decode."""
    return 1e3 * statistics.median(decode_seconds(llm, names, PROMPT_TOKENS, NEW_TOKENS)[EDGE:-EDGE])


def fake_server(step_s: float) -> None:
    """Stream tokens to every request at a pace; the same few tokens, but through a detokenizer each."""
    with closing(open_checkpoint(BUILTIN_MODEL)) as checkpoint:
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source())
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "bench"}]}

    def completion(text: str, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        return {"id": "x", "object": "text_completion", "model": "fake", "choices": [choice], **more}

    async def events(count: int, usage: dict[str, int]) -> AsyncGenerator[bytes, None]:
        pieces, begun = Detokenizer(tokenizer), time.monotonic()
        for i in range(count):
            await asyncio.sleep(max(0.0, begun + i * step_s - time.monotonic()))
            yield event(completion(pieces.push([tokens[i % len(tokens)]])))
        yield event({**completion(""), "choices": [], "usage": usage})
        yield DONE

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        count = body["max_tokens"]
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count, "total_tokens": PROMPT_TOKENS + count}
        if not body.get("stream"):
            return Response(json.dumps(completion("x", usage=usage)), media_type="application/json")
        return StreamingResponse(events(count, usage), media_type="text/event-stream")

    uvicorn.run(app, port=PORT, log_level="error")


def load(rows: int, requests: int, *more: object) -> list[object]:
    """Return the words of a `lorasrv bench` command."""
    shape = ["--prompt-tokens", PROMPT_TOKENS, "--output-tokens", NEW_TOKENS, "--warmup", 0]
    return ["bench", "--json", "--concurrency", rows, "--requests", requests, *shape, *more]


def in_this_process(rows: int, adapters: int) -> tuple[float, float]:
    """Return the milliseconds of a step alone, and beside another process that streams."""
    with LLM() as llm:
        folders = adapter_folders(adapters)
        for folder in folders:
            llm.add_adapter(folder.name, folder)
        names = [folders[i % adapters].name if adapters else None for i in range(rows)]
        steps_ms(llm, names)
        alone = steps_ms(llm, names)
        fake = subprocess.Popen([sys.executable, __file__, "--fake", str(alone)], env=environment())
        try:
            time.sleep(6)
            command = lorasrv_command(*load(rows, 100 * rows, "--adapters", 0, "--url", f"http://127.0.0.1:{PORT}"))
            nowhere = subprocess.DEVNULL
            client = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=environment())
            time.sleep(4)
            beside = steps_ms(llm, names)
            assert client.poll() is None, "the load ended before the steps did"
            client.terminate()
            client.wait()
        finally:
            fake.terminate()
            fake.wait()
    return alone, beside


def main() -> None:
    a = arguments(
        __doc__,
        rows=(16, "requests at a time"),
        adapters=(0, "that they are for"),
        rounds=(2, "times"),
        fake=(float, "for the other process: stream, with so many milliseconds a step"),
    )
    if a.fake:
        fake_server(a.fake / 1e3)
        return
    table(("round", "alone ms", "beside ms", "served ms", "served over beside"))
    for number in range(a.rounds):
        alone, beside = in_this_process(a.rows, a.adapters)
        served = run_json(*load(a.rows, a.rows, "--adapters", a.adapters))["figures"]["itl_ms"]["p50"]
        row(number + 1, f"{alone:.1f}", f"{beside:.1f}", f"{served:.1f}", served / beside)


if __name__ == "__main__":
    main()
