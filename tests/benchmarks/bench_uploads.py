"""Measure what uploads cost running streams: time between tokens with and without uploads beside them.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_uploads.py --streams 8 --rates 0,1,4

`lorasrv serve` of the built-in base streams to `lorasrv bench`, as many streams as adapters, while this process uploads
adapters of its own at so many a second: rank 16 on all linears, each of other weights and under an id of its own, at
fixed times (an upload that is late begins at once). One machine: server, bench and uploader share its cores.
"""

import shutil
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from harness import adapter_folders, arguments, lorasrv_server, machine_line, row, run_json, table

from adapter_store.formats.adapter_dir import open_adapter_dir
from api.client import Client

CHANGED_BYTES = 256


class Uploader(threading.Thread):
    """Uploads one adapter after another, `per_s` a second, while the context lasts."""

    def __init__(self, url: str, original: Path, copy: Path, per_s: float) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._url, self._copy, self._interval_s = url, copy, 1 / per_s
        shutil.copytree(original, copy)
        self._stopped = threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        begun, number = time.monotonic(), 0
        with Client(self._url) as client:
            while not self._stopped.wait(max(0.0, begun + number * self._interval_s - time.monotonic())):
                self._change(number)
                sent = time.perf_counter()
                with open_adapter_dir(self._copy) as adapter:
                    client.upload(adapter, f"upload-{self._copy.name}-{number}")
                self.seconds.append(time.perf_counter() - sent)
                number += 1

    def _change(self, number: int) -> None:
        """Write other bytes at the file's end: small floats still, of whatever type they are."""
        with (self._copy / "adapter_model.safetensors").open("r+b") as file:
            file.seek(-CHANGED_BYTES, 2)
            file.write((number % 60).to_bytes(1, "little") * CHANGED_BYTES)


def gaps_ms(url: str, names: list[str], requests: int, tokens: int) -> list[float]:
    """Return p50, p90 and p99 of the time between tokens."""
    load = ["--url", url, "--models", ",".join(names), "--adapters", len(names), "--concurrency", len(names)]
    done = run_json("bench", "--json", *load, "--requests", requests, "--output-tokens", tokens)
    return [done["figures"]["itl_ms"][share] for share in ("p50", "p90", "p99")]


def main() -> None:
    a = arguments(
        __doc__,
        streams=(8, "requests at a time, each on an adapter of its own"),
        rates=((0.0, 1.0, 4.0), "uploads a second, 0 for none"),
        requests=(32, "of each row"),
        tokens=(128, "of each answer"),
        rounds=(2, "times that each rate has its turn"),
    )
    folders = adapter_folders(a.streams)
    names = [one.name for one in folders]
    print(machine_line(), flush=True)
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as temporary:
        folder = Path(temporary)
        with lorasrv_server(folder / "store", adapters=folders) as server:
            gaps_ms(server.url, names, a.streams, a.tokens)
            table(("round", "uploads/s", "done", "upload ms, mean", "ITL p50 ms", "p90 ms", "p99 ms"))
            for turn, rate in ((turn, rate) for turn in range(a.rounds) for rate in a.rates):
                took: list[float] = []
                with ExitStack() as stack:
                    if rate:
                        uploader = Uploader(server.url, folders[0], folder / f"{turn}-{rate:g}", rate)
                        took = uploader.seconds
                        stack.enter_context(uploader)
                    gaps = gaps_ms(server.url, names, a.requests, a.tokens)
                mean = f"{1e3 * statistics.mean(took):.0f}" if took else "–"
                row(turn + 1, f"{rate:g}", len(took), mean, *(f"{ms:.1f}" for ms in gaps))


if __name__ == "__main__":
    main()
