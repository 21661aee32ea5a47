"""Serve a random Llama-3-8B with 32 adapters on a GPU, as a user would start it, under the loads of `lorasrv bench`.

    python tests/benchmarks/gpu_server.py        # rows as lines of JSON; docs/gpu.md
    python tests/benchmarks/gpu_server.py --tiny # a tiny llama instead: are answers over HTTP PEFT's?

The first load meets adapters that are not in memory yet. Then sweeps of clients and adapters with short and long
prompts, and requests with each kind of sampling at once, without streams. Last what the server counted of itself. Then
the short prompts again without speculation, and with a base in int8. A dry run serves two layers on the CPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_answers import COUNT, HELD, adapters_of, is_same
from gpu_cases import DRY_RUN, emit, need_gpu

from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.store import AdapterStore
from api.cli.bench.server import adapter_names, fill
from api.cli.common.child_server import running_server
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.models.lora_sites import base_shapes

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
COUNTED = (
    "late_kernels_total",
    "step_seconds_sum",
    "step_seconds_count",
    "draft_tokens_total",
    "accepted_draft_tokens_total",
)
"""Metrics of interest, without their prefix."""
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
        told = complete(url, names[number % len(names)], f"{number} is", OUTPUT, **how)
        tokens: int = told["usage"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(clients) as pool:
        for how in SAMPLING:
            begun = time.perf_counter()
            tokens = sum(pool.map(lambda number, how=how: ask(number, how), range(clients)))
            emit("sampling", **how, clients=clients, tok_s=tokens / (time.perf_counter() - begun))


def complete(url: str, model: str, prompt: str | list[int], count: int, **how: Any) -> Any:
    """Return what the server answers to a request for so many tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
    data = json.dumps(body | how).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def counted(url: str) -> dict[str, float]:
    """Return metrics by name, added up over their labels."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = Counter[str]()
    for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#")):
        plain = name.partition("{")[0].removeprefix("lorasrv_")
        found.update({plain: float(value)} if plain in COUNTED else {})
    return dict(found)


def serve_tiny(folder: Path) -> int:
    """Serve the tiny llama of `gpu_answers`, and ask for all its answers at the same time; return 1 if one is not
    PEFT's."""
    model = HELD / "llama" / "model"
    if not model.is_dir():
        emit("skipped", why="no build/gpu/answers: gpu_fetch.py")
        return 0 if DRY_RUN else 1
    with AdapterStore(folder, base_shapes(read_model_shape(str(model)).spec)) as store:
        for name, path in adapters_of(model.parent).items():
            peft = read_peft_dir(path)
            store.register(name, peft.config, store.add_blob(peft.weights_path))
    options = ["--model", str(model), "--store", str(folder), "--dtype", "float32", "--quantization", "none"]
    begun = time.perf_counter()
    with running_server([*options, "--device", "cpu" if DRY_RUN else "cuda"]) as url:
        emit("start", base="tiny", seconds=time.perf_counter() - begun)
        answers = json.loads((model.parent / "answers.json").read_text("utf-8"))

        def ask(one: dict[str, Any]) -> bool:
            told = complete(url, one["adapter"] or model.name, one["prompt"], COUNT, temperature=0.0)
            return is_same(one, told["choices"][0]["token_ids"])

        with ThreadPoolExecutor(len(answers)) as pool:
            same = sum(pool.map(ask, answers))
        emit("answers", count=len(answers), same=same, ok=same == len(answers), **counted(url))
    return 0 if same == len(answers) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="compare the answers of a tiny model with PEFT's")
    is_tiny = parser.parse_args().tiny
    need_gpu()
    names = adapter_names(ADAPTERS)
    with tempfile.TemporaryDirectory() as folder:
        if is_tiny:
            return serve_tiny(Path(folder))
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
                emit("counted", **server, **counted(url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
