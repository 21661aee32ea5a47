"""Would HTTP in a process of its own make steps shorter? The same load three times, on this machine.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_isolation.py --rows 16 --adapters 0

alone: steps of the engine in this process, no HTTP anywhere: what no arrangement can beat.
beside: the same steps, while another process streams as many tokens at the same pace, detokenized, as server-sent
  events, to `lorasrv bench`: an engine process beside an HTTP process, with nothing to pay for messages between them.
served: `lorasrv serve` as it is, engine and HTTP as threads of one process, under the same `lorasrv bench`: time
  between tokens.

What beside is below served is the most that a process could gain.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response

from api.asgi.sse import DONE, EventStream, event
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.tokenizer import Tokenizer

ASSETS = Path(__file__).parents[2] / "build" / "bench"
NEW_TOKENS, PROMPT_TOKENS = 160, 64
LORASRV = str(Path(sys.executable).parent / "lorasrv")
"""Steps and gaps at both ends are left out: not all rows are there."""
EDGE = 16


def steps_ms(llm: LLM, names: list[str | None]) -> float:
    """Median of steps in which all rows decode."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for i, name in enumerate(names):
        key = llm.store.resolve(name).key if name else None
        prompt = [100 + i, *range(200, 200 + PROMPT_TOKENS - 1)]
        llm.engine.add_request(llm.input_processor.process(RequestId(f"row{i}"), prompt, sampling, key))
    seconds = []
    while llm.engine.has_requests:
        begin = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds[EDGE:-EDGE])


def fake_server(step_s: float, port: int) -> None:
    """Streams tokens to everybody at a pace; they are the same few, but go through a detokenizer each."""
    checkpoint = open_checkpoint("smollm2-135m")
    tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source())
    text = tokenizer.encode(
        "The quick brown fox jumps over the lazy dog, and then goes home. ", add_special_tokens=False
    )
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "nobody"}]}

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        count = body["max_tokens"]

        async def events() -> AsyncGenerator[bytes, None]:
            pieces = Detokenizer(tokenizer)
            begun = time.monotonic()
            for i in range(count):
                await asyncio.sleep(max(0.0, begun + i * step_s - time.monotonic()))
                piece = pieces.push([text[i % len(text)]])
                choice = {"index": 0, "text": piece, "logprobs": None, "finish_reason": None}
                yield event({"id": "x", "object": "text_completion", "model": "fake", "choices": [choice]})
            ended = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
            yield event({"id": "x", "object": "text_completion", "model": "fake", "choices": [ended]})
            usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count, "total_tokens": PROMPT_TOKENS + count}
            yield event({"id": "x", "object": "text_completion", "model": "fake", "choices": [], "usage": usage})
            yield DONE

        async def close() -> None:
            pass

        if not body.get("stream"):
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            whole = {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": "x"}], "usage": usage}
            return Response(json.dumps(whole), media_type="application/json")
        return EventStream(events(), close, {})

    uvicorn.run(app, port=port, log_level="error")


def load(rows: int, adapters: int, *where: str) -> list[str]:
    shape = ["--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(NEW_TOKENS), "--warmup", "0"]
    return [LORASRV, "bench", "--json", "--concurrency", str(rows), "--requests", str(rows), *shape, *where]


def gap_ms(output: str) -> float:
    """Median time between tokens, from what `lorasrv bench --json` has printed."""
    return float(json.loads(output.strip().splitlines()[-1])["figures"]["itl_ms"]["p50"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fake", nargs=2, metavar=("MS", "PORT"), help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.fake:
        fake_server(float(a.fake[0]) / 1e3, int(a.fake[1]))
        return
    script = Path(__file__).parent / "peers" / "make_assets.py"
    subprocess.run([sys.executable, script, "--out", ASSETS, "--adapters", str(max(1, a.adapters))], check=True)
    print("| round | alone ms | beside ms | served ms | served over beside |\n|---|---|---|---|---|")
    for number in range(a.rounds):
        alone, beside = in_this_process(a.rows, a.adapters)
        served = gap_ms(_run(load(a.rows, a.adapters, "--adapters", str(a.adapters))))
        print(f"| {number + 1} | {alone:.1f} | {beside:.1f} | {served:.1f} | {served / beside:.2f} |", flush=True)


def in_this_process(rows: int, adapters: int) -> tuple[float, float]:
    """Milliseconds a step: alone, and beside another process that streams."""
    with LLM() as llm:
        folders = sorted((ASSETS / "adapters").iterdir())[:adapters]
        for folder in folders:
            llm.add_adapter(folder.name, folder)
        names: list[str | None] = [folders[i % adapters].name if adapters else None for i in range(rows)]
        steps_ms(llm, names)
        alone = steps_ms(llm, names)
        port = 18753
        fake = subprocess.Popen([sys.executable, __file__, "--fake", str(alone), str(port)])
        try:
            time.sleep(6)
            url = f"http://127.0.0.1:{port}"
            longer = load(rows, 0, "--adapters", "0", "--url", url)
            longer[longer.index("--requests") + 1] = str(8 * rows)
            client = subprocess.Popen(longer, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(4)
            beside = steps_ms(llm, names)
            assert client.poll() is None, "the load ended before the steps did"
            client.terminate()
            client.wait()
        finally:
            fake.terminate()
            fake.wait()
    return alone, beside


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
