"""Measure what limits of keys cost a server that follows a registry, and that all servers together keep them.

    python tests/benchmarks/bench_loans.py [--followers 2] [--seconds 30]

A registry and its followers serve a tiny model of random weights, so that an answer of one token takes milliseconds.
First one request after another at one follower: with a key without limits, with limited keys that it sees for the first
time, and with one that it knows. Then clients that send what they can to all followers at once with one key of `--rpm`
requests a minute: how many get through, beside what one server would let through in that time.
"""

import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx2
from harness import arguments, environment, lorasrv_command, machine_line, row, table
from served import Served, serve
from tiny_llama import write_config

FLAGS = ("--load-format", "dummy", "--quantization", "none", "--pool-bytes", "64MiB", "--log-level", "warning")
NEW_KEYS, REQUESTS = 20, 300
CLIENTS = 2
"""At each follower."""
BODY = {"model": "base", "prompt": "a", "max_tokens": 1, "temperature": 0}


def new_key(store: Path, name: str, *limits: object) -> str:
    """Create a key and return its secret."""
    command = lorasrv_command("key", "create", "--name", name, *limits, "--store", store, "--json")
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    return str(json.loads(done.stdout)["key"])


def is_ready(follower: Served) -> bool:
    return follower.http.get("/ready").status_code == 200


def ask(http: httpx2.Client, key: str) -> tuple[int, float]:
    """Return the status of one request, and its milliseconds."""
    begun = time.perf_counter()
    answer = http.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
    return answer.status_code, 1e3 * (time.perf_counter() - begun)


def one_after_another(http: httpx2.Client, keys: Sequence[str]) -> tuple[float, float]:
    """Return the median and the 99th percentile of requests with these keys, ms."""
    asked = [ask(http, key) for key in keys]
    assert {status for status, _ in asked} == {200}, asked[:3]
    times = sorted(ms for _, ms in asked)
    return statistics.median(times), times[min(len(times) - 1, int(0.99 * len(times)))]


def flood(followers: Sequence[Served], key: str, seconds: float) -> tuple[int, int]:
    """Send what clients can for some seconds; return how many requests got through, and how many did not."""
    until, counted = time.perf_counter() + seconds, {200: 0, 429: 0}
    lock = threading.Lock()

    def client(url: str) -> None:
        with httpx2.Client(base_url=url, trust_env=False, timeout=60) as http:
            while time.perf_counter() < until:
                status, _ = ask(http, key)
                with lock:
                    counted[status] += 1
                if status == 429:
                    time.sleep(0.05)

    threads = [threading.Thread(target=client, args=(one.url,)) for one in followers for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counted[200], counted[429]


def main() -> None:
    a = arguments(
        __doc__,
        followers=(2, "servers that follow the registry"),
        seconds=(30.0, "length of the flood"),
        rpm=(120, "requests a minute of the flood's key"),
    )
    print(machine_line(), flush=True)
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as name, ExitStack() as opened:
        folder = Path(name)
        write_config(folder / "base")
        common = ("--cluster-secret", "of-the-bench", "--model", folder / "base", *FLAGS)
        kept = folder / "registry"
        free = new_key(kept, "free")
        wide = ("--rpm", 1_000_000, "--tpm", 100_000_000, "--concurrent", 1000)
        known, *fresh = (new_key(kept, f"limited-{number}", *wide) for number in range(NEW_KEYS + 1))
        tight = new_key(kept, "tight", "--rpm", a.rpm)
        registry = opened.enter_context(serve(*common, store=kept, command="registry"))
        followers = [
            opened.enter_context(serve(*common, "--registry", registry.url, store=folder / f"follower-{number}"))
            for number in range(a.followers)
        ]
        for one in followers:
            one.until(partial(is_ready, one))
        with httpx2.Client(base_url=followers[0].url, trust_env=False, timeout=60) as http:
            for _ in range(50):
                ask(http, free)
                ask(http, known)
            table(("requests one after another", "median, ms", "p99, ms"))
            row("a key without limits", *one_after_another(http, [free] * REQUESTS))
            row("limited keys, each for the first time", *one_after_another(http, fresh))
            row("a limited key in use", *one_after_another(http, [known] * REQUESTS))
            row("a key without limits, again", *one_after_another(http, [free] * REQUESTS))
        through, refused = flood(followers, tight, a.seconds)
        most = a.rpm * (1 + a.seconds / 60)
        table(("flood at all servers", "let through", "refused", "one server would let through", "share"))
        row(f"{a.rpm} a minute, {a.seconds:g} s", through, refused, most, through / most)


if __name__ == "__main__":
    main()
