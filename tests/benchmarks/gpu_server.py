"""Serve a random Llama-3-8B with 32 adapters on a GPU, as a user would start it, under the loads of `lorasrv bench`.

    python tests/benchmarks/gpu_server.py        # rows as lines of JSON; docs/gpu.md

The first load meets adapters that are not in memory yet. Then sweeps of clients and adapters with short and long
prompts, and requests with each kind of sampling at once, without streams. Last what the server counted of itself. Then
the short prompts again without speculation, and with a base in int8. A dry run serves two layers on the CPU.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_cases import DRY_RUN, emit, need_gpu

from api.cli.bench.server import adapter_names, fill
from api.cli.common.child_server import running_server

COMMAND = (sys.executable, "-P", "-c", "from api.cli.main import main; main()", "bench", "--json")
ADAPTERS, RANK = (2, 8) if DRY_RUN else (32, 16)
SHORT, LONG, OUTPUT = (8, 16, 4) if DRY_RUN else (64, 1024, 64)
CLIENTS = "2" if DRY_RUN else "1,32,64"
SOME = "0,2" if DRY_RUN else "0,1,32"
LOADS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cold", ("--adapters", str(ADAPTERS), "--concurrency", CLIENTS.split(",")[-1], "--warmup", "0")),
    ("short prompts", ("--adapters", SOME, "--concurrency", CLIENTS)),
    ("long prompts", ("--adapters", SOME, "--concurrency", CLIENTS, "--prompt-tokens", str(LONG))),
)
SERVERS: tuple[tuple[str, str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = (
    ("int4", "auto", LOADS),
    *((("int8", "off", LOADS[1:2]),) if DRY_RUN else (("int4", "off", LOADS[1:2]), ("int8", "auto", LOADS[1:2]))),
)
"""(`--quantization`, `--speculation`, loads) of each server; the first also meets each kind of sampling."""
SAMPLING: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
)
COUNTED = ("late_kernels", "graph", "draft_tokens", "step_seconds_sum", "step_seconds_count", "generation_tokens")
"""What of the names of metrics is of interest."""
DRY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}


def flags(folder: Path, quantization: str, speculation: str) -> list[str]:
    """Return options of `serve`."""
    chosen = ["--load-format", "dummy", "--quantization", quantization, "--speculation", speculation]
    if not DRY_RUN:
        need_gpu()
        return ["--model", "llama-3-8b", "--device", "cuda", *chosen]
    (folder / "config.json").write_text(json.dumps(DRY_MODEL), "utf-8")
    return ["--model", str(folder), "--device", "cpu", *chosen]


def load(url: str, label: str, options: tuple[str, ...], **server: str) -> None:
    """Send the loads of one call of `lorasrv bench`, and print a row for each as it ends."""
    lengths = ("--prompt-tokens", str(SHORT), "--output-tokens", str(OUTPUT), "--rank", str(RANK))
    command = (*COMMAND, "--url", url, *lengths, *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            of, settings = told["figures"], told["settings"]
            times = {f"{name}_{p}": (of[name] or {}).get(p) for name in ("ttft_ms", "itl_ms") for p in ("p50", "p99")}
            emit(
                "loads",
                **server,
                load=label,
                clients=settings["concurrency"],
                adapters=settings["adapters"],
                tok_s=of["output_tok_per_s"],
                failed=of["failed"],
                **times,
            )
    if process.returncode:
        raise SystemExit(f"{label}: lorasrv bench ended with {process.returncode}")


def sampling(url: str, names: tuple[str, ...], clients: int) -> None:
    """Time one wave of requests with each kind of sampling."""

    def ask(number: int, how: dict[str, float]) -> int:
        body = {"model": names[number % len(names)], "prompt": f"{number} is", "max_tokens": OUTPUT, "ignore_eos": True}
        data = json.dumps(body | how).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            tokens: int = json.load(answer)["usage"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(clients) as pool:
        for how in SAMPLING:
            begun = time.perf_counter()
            tokens = sum(pool.map(lambda number, how=how: ask(number, how), range(clients)))
            emit("sampling", **how, clients=clients, tok_s=tokens / (time.perf_counter() - begun))


def counted(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    held = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in held if any(part in name for part in COUNTED)}


def main() -> None:
    names = adapter_names(ADAPTERS)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        begun = time.perf_counter()
        fill(store, flags(Path(folder), "int4", "off"), names, RANK, 0)
        emit("adapters", made=ADAPTERS, seconds=time.perf_counter() - begun)
        for quantization, speculation, loads in SERVERS:
            server = {"base": quantization, "speculation": speculation}
            begun = time.perf_counter()
            with running_server([*flags(Path(folder), quantization, speculation), "--store", str(store)]) as url:
                emit("start", **server, seconds=time.perf_counter() - begun)
                for label, options in loads:
                    load(url, label, options, **server)
                if loads is LOADS:
                    sampling(url, names, int(CLIENTS.rpartition(",")[2]))
                for name, value in counted(url).items():
                    emit("counted", **server, name=name, value=value)


if __name__ == "__main__":
    main()
