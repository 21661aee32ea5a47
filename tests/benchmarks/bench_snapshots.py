"""Time to the first token after a restart of a persona of 1,000 tokens, with its snapshot and without, by turns.

python tests/benchmarks/bench_snapshots.py [--runs 3] [FLAG...]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import harness  # noqa: F401
from served import Served, lorasrv, serve

ADAPTER = Path(__file__).parents[2] / "examples" / "persona_bots" / "adapters" / "basho"
TEXT = "The keeper walks the stairs every evening and counts the ships that pass along the cold coast, naming each. "
DEFAULTS = {"system": f"You are Mia. {TEXT * 46}", "temperature": 0, "max_tokens": 16}
PERSONAS = {"muse": "without an adapter", "mia": "with an adapter of rank 16"}


def ask(served: Served, model: str) -> tuple[float, str, dict[str, Any]]:
    """Milliseconds to the first text, the text, and the usage."""
    turns = [{"role": "user", "content": "Who are you?"}]
    body = {"model": model, "messages": turns, "stream": True, "stream_options": {"include_usage": True}}
    begun, first, text = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                first = first or (bool(said) and 1e3 * (time.perf_counter() - begun))
                text, usage = text + said, event.get("usage") or usage
    return first, text, usage


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    options, flags = parser.parse_known_args()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    texts = defaultdict(set)
    usage: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, store = Path(folder) / "persona.json", Path(folder) / "store"
        file.write_text(json.dumps(DEFAULTS))
        with serve(*flags, store=store) as served:
            lorasrv("defaults", "muse", file, "--new", "--server", served.url)
            lorasrv("upload", ADAPTER, "--id", "mia", "--defaults", file, "--server", served.url)
            for name in PERSONAS:
                print(lorasrv("snapshot", name, "--server", served.url).stdout.strip())
        for _ in range(options.runs):
            for size in ("1GiB", "0"):
                for name in PERSONAS:
                    with serve(*flags, "--snapshot-bytes", size, store=store) as served:
                        time.sleep(1)
                        for kind in (size, "warm"):
                            first, text, usage = ask(served, name)
                            found[name, kind].append(first)
                            texts[name].add(text)
    print(f"{usage['prompt_tokens']} tokens of prompt; load average {os.getloadavg()[0]:.1f}")
    for name, what in PERSONAS.items():
        print(f"{what}; {len(texts[name])} different answers")
        for kind, label in (("0", "computed"), ("1GiB", "restored"), ("warm", "in the prefix cache")):
            times = found[name, kind]
            print(f"  {label}: {statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})")


if __name__ == "__main__":
    main()
