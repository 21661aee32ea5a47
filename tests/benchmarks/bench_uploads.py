"""What uploads cost those who are being answered: time between tokens with and without uploads beside.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_uploads.py --streams 8 --rates 0,1,4

`lorasrv serve` of the built-in base streams to `lorasrv bench`, as many streams as adapters, while this process uploads
adapters of its own at so many a second: rank 16 on all linears, each of other weights and under an id of its own, at
fixed times (an upload that is late begins at once). One machine: server, bench and uploader share its cores.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from peer_servers import lorasrv, machine
from tier_common import row, table

from adapter_store.formats.adapter_dir import open_adapter_dir
from api.client import Client

ASSETS = Path(__file__).parents[2] / "build" / "bench"
LORASRV = str(Path(sys.executable).parent / "lorasrv")
WEIGHTS = "adapter_model.safetensors"
CHANGED_BYTES = 256


class Uploader(threading.Thread):
    """Sends one adapter after another until told to stop."""

    def __init__(self, url: str, original: Path, folder: Path, a_second: float) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._url, self._interval_s = url, 1 / a_second
        self._copy = folder / "changing"
        shutil.copytree(original, self._copy)
        self._stopped = threading.Event()

    def run(self) -> None:
        begun, number = time.monotonic(), 0
        with Client(self._url) as client:
            while not self._stopped.wait(max(0.0, begun + number * self._interval_s - time.monotonic())):
                self._change(number)
                sent = time.perf_counter()
                with open_adapter_dir(self._copy) as adapter:
                    client.upload(adapter, f"upload-{self._interval_s:g}-{number}")
                self.seconds.append(time.perf_counter() - sent)
                number += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _change(self, number: int) -> None:
        """Other bytes at the file's end: small floats still, of whatever type they are."""
        with (self._copy / WEIGHTS).open("r+b") as file:
            file.seek(-CHANGED_BYTES, 2)
            file.write((number % 60).to_bytes(1, "little") * CHANGED_BYTES)


def gaps_ms(url: str, names: list[str], requests: int, tokens: int) -> dict[str, float]:
    load = [LORASRV, "bench", "--json", "--url", url, "--models", ",".join(names), "--adapters", str(len(names))]
    shape = ["--concurrency", str(len(names)), "--requests", str(requests), "--output-tokens", str(tokens)]
    done = subprocess.run([*load, *shape], check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return dict(json.loads(done.stdout.strip().splitlines()[-1])["figures"]["itl_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rates", default="0,1,4", help="uploads a second, 0 for none")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    a = parser.parse_args()
    script = Path(__file__).parent / "peers" / "make_assets.py"
    subprocess.run([sys.executable, script, "--out", ASSETS, "--adapters", str(a.streams)], check=True)
    folders = sorted((ASSETS / "adapters").iterdir())[: a.streams]
    print(machine(), flush=True)
    table(("round", "uploads/s", "done", "upload ms, mean", "itl p50 ms", "itl p90 ms", "itl p99 ms"))
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder, lorasrv(Path(folder), folders, []) as served:
        names = [one.name for one in folders]
        gaps_ms(served.url, names, a.streams, a.tokens)
        for number in range(a.rounds):
            for rate in (float(part) for part in a.rates.split(",")):
                measured(number, rate, served.url, names, folders[0], Path(folder) / f"{number}-{rate}", a)


def measured(
    number: int, rate: float, url: str, names: list[str], original: Path, folder: Path, a: argparse.Namespace
) -> None:
    uploader = Uploader(url, original, folder, rate) if rate else None
    if uploader is not None:
        uploader.start()
    try:
        gaps = gaps_ms(url, names, a.requests, a.tokens)
    finally:
        if uploader is not None:
            uploader.stop()
    took = uploader.seconds if uploader is not None else []
    mean = f"{1e3 * sum(took) / len(took):.0f}" if took else "-"
    row(str(number + 1), f"{rate:g}", str(len(took)), mean, *(f"{gaps[key]:.1f}" for key in ("p50", "p90", "p99")))


if __name__ == "__main__":
    main()
