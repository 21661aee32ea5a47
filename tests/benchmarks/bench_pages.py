"""Pages between two processes of one machine: bytes a second of a hand-over, and streams beside prompts with roles.

python tests/benchmarks/bench_pages.py rate [--tokens 4096] [--runs 20] [FLAG...]
python tests/benchmarks/bench_pages.py roles [--prompt 1024] [--streams 4] [--seconds 30] [--rounds 2] [FLAG...]

`rate` asks a server for the pages of a prompt that it has computed, with the client that a replica uses, into host
memory; the last line is the same with the bytes that a socket alone moves. `roles` compares two servers that share
streams and prompts with one that computes prompts for another, by turns.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness  # noqa: F401
import httpx2
from served import Served, serve

from adapter_store.storage.snapshots import SnapshotName
from api.replication.page_client import PageClient
from lorasrv.memory.prefix_cache import page_hashes, root_hash
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest, Peer
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import PeerSnapshot

SECRET = "of-one-cluster"
GIVER = """
import json, sys, time
from api.config.settings import ServerSettings
from api.server import bind, serve_on

def tell(running):
    pages = running.services.engine.pages
    print(json.dumps([running.ready.url, dict(pages.facts), pages.page_bytes]), flush=True)

settings = ServerSettings(**json.loads(sys.argv[1]))
serve_on(bind("127.0.0.1", 0), settings, lambda *_: None, tell, time.monotonic(), computes=True)
"""


@contextmanager
def giver(**options: Any) -> Iterator[tuple[str, dict[str, Any], int]]:
    """A server process; its URL, what its pages depend on, and their bytes."""
    root = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-c", GIVER, json.dumps({**options, "store": store, "cluster_secret": SECRET})]
        environment = {**os.environ, "PYTHONPATH": root}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                yield tuple(json.loads(process.stdout.readline()))
            finally:
                process.terminate()


def rate(options: argparse.Namespace) -> None:
    prompt = [20 + (7 * number) % 300 for number in range(options.tokens + 1)]
    own = {"model": options.model, "load_format": options.load_format, "pool_bytes": options.pool}
    with giver(**own) as (url, facts, page_bytes):
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        model = httpx2.get(f"{url}/v1/models").json()["data"][-1]["id"]
        begun = time.perf_counter()
        httpx2.post(f"{url}/v1/completions", json={**body, "model": model}, timeout=600).raise_for_status()
        computed_s = time.perf_counter() - begun
        digests = page_hashes(root_hash(None, ""), prompt[:-1], 16)
        message = EngineCoreRequest(RequestId("r"), tuple(prompt), 1, SamplingParams())
        peer, name = Peer(url, computes=False), SnapshotName("peer", "x")
        wanted = PeerSnapshot(name, peer, facts, digests, 0, tuple(prompt[:-1]), message, 60.0)
        rates = []
        for _ in range(options.runs):
            begun = time.perf_counter()
            data = PageClient(SECRET)(wanted, page_bytes, lambda: True)
            assert data.nbytes == len(digests) * page_bytes
            rates.append(data.nbytes / (time.perf_counter() - begun) / 1e9)
        nbytes = len(digests) * page_bytes
        best, median = max(rates), statistics.median(rates)
        plain = statistics.median(_plain_rate(nbytes) for _ in range(5))
        took_s = nbytes / median / 1e9
        print(f"{nbytes / 1e6:.1f} MB of {options.tokens} tokens; computed in {computed_s:.2f} s")
        print(f"hand-over: median {median:.2f} GB/s, best {best:.2f}; {took_s / computed_s:.4f} of computing")
        print(f"a socket alone: {plain:.2f} GB/s")


def _plain_rate(nbytes: int) -> float:
    """Bytes a second that two threads move over loopback."""
    data, target = bytearray(nbytes), bytearray(nbytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        taker, _ = listener.accept()
        begun = time.perf_counter()
        sending = threading.Thread(target=sender.sendall, args=(data,))
        sending.start()
        view = memoryview(target)
        while view:
            view = view[taker.recv_into(view) :]
        took = time.perf_counter() - begun
        sending.join()
        sender.close()
        taker.close()
    return nbytes / took / 1e9


def _stream(served: Served, until_s: float, number: int) -> list[float]:
    """Seconds between the tokens of one stream after another."""
    gaps: list[float] = []
    with httpx2.Client(base_url=served.url, timeout=600) as http:
        while time.monotonic() < until_s:
            body = {"prompt": [30 + number] * 20, "max_tokens": 400, "stream": True, "ignore_eos": True, "seed": 1}
            last = 0.0
            with http.stream("POST", "/v1/completions", json={"model": "m", **body}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        gaps += [now - last] if last else []
                        last = now
                        if now > until_s:
                            break
    return gaps


def _prompts(targets: Sequence[Served], peer: Served | None, length: int, until_s: float) -> list[float]:
    """Seconds to the answers of long prompts, one after another."""
    took, number = [], 0
    headers = {} if peer is None else {"x-lorasrv-cluster": SECRET, "x-lorasrv-prefill": peer.url}
    with httpx2.Client(timeout=600) as http:
        while time.monotonic() < until_s:
            number += 1
            body = {"model": "m", "prompt": [20 + (number * 31 + at) % 300 for at in range(length)], "max_tokens": 1}
            # No prompt was computed before.
            body["cache_salt"] = f"{time.monotonic_ns()}"
            url = targets[number % len(targets)].url
            begun = time.monotonic()
            http.post(f"{url}/v1/completions", json=body, headers=headers).raise_for_status()
            took.append(time.monotonic() - begun)
    return took


def roles(options: argparse.Namespace, flags: Sequence[str]) -> None:
    common = ("--model", options.model, "--load-format", options.load_format, "--served-model-name", "m")
    common = (*common, "--pool-bytes", options.pool, "--cluster-secret", SECRET, *flags)
    with ExitStack() as opened:
        first = opened.enter_context(serve(*common, "--role", "both"))
        second = opened.enter_context(serve(*common, "--role", "both"))
        for _ in range(options.rounds):
            for kind, answering, peer in (("shared", [first, second], None), ("roles", [second], first)):
                until_s = time.monotonic() + options.seconds
                with ThreadPoolExecutor(options.streams + 1) as threads:
                    running = [
                        threads.submit(_stream, answering[number % len(answering)], until_s, number)
                        for number in range(options.streams)
                    ]
                    took = threads.submit(_prompts, answering, peer, options.prompt, until_s).result()
                    gaps = sorted(gap for stream in running for gap in stream.result())
                at = {share: 1e3 * gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.95, 0.99)}
                print(
                    f"{kind}: ITL p50 {at[0.5]:.0f}, p95 {at[0.95]:.0f}, p99 {at[0.99]:.0f} ms; "
                    f"{len(gaps) / options.seconds:.0f} tok/s of streams, {len(took)} prompts, "
                    f"TTFT p50 {1e3 * statistics.median(took):.0f} ms",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("rate", "roles"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--pool", default="512MiB")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    options, flags = parser.parse_known_args()
    if options.what == "rate":
        rate(options)
    else:
        roles(options, flags)


if __name__ == "__main__":
    main()
