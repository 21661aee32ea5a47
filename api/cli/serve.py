"""serve: options to settings, settings to a server."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.console import CliError, ExitCode, print_json, progress, say
from api.cli.options import JsonOption

if TYPE_CHECKING:
    from pydantic import ValidationError

    from api.server import Ready

_MODEL, _MEMORY, _STEP, _LIMITS, _NET, _TRACE = "Model", "Memory", "Scheduling", "Limits", "Network", "Recording"
_ADAPTERS = "Adapters"


def _text(text: str, panel: str) -> Any:
    # A bracket would be markup.
    return typer.Option(help=text.replace("[", r"\["), rich_help_panel=panel, show_default=False)


def serve(
    model: Annotated[
        str | None, _text("Built-in name, .gguf file or Hugging Face folder. [default: smollm2-135m]", _MODEL)
    ] = None,
    quantization: Annotated[
        str | None,
        _text(
            "Format of the base's weights: none, int8, int4, q3h, fp8, or auto: 4-bit files as they are, else int8.",
            _MODEL,
        ),
    ] = None,
    quantization_group: Annotated[
        int | None, _text("Weights that share a scale: 32, 64 or 128. [default: the format's]", _MODEL)
    ] = None,
    quantized_weights: Annotated[
        Path | None, _text("What lorasrv quantize has made of the model: its format and groups.", _MODEL)
    ] = None,
    dtype: Annotated[str | None, _text("Of adapters, and of the base with none: bfloat16 or float32.", _MODEL)] = None,
    device: Annotated[str | None, _text("auto, cpu or cuda. [default: auto]", _MODEL)] = None,
    kernels: Annotated[str | None, _text("auto, numba, triton or torch. [default: auto]", _MODEL)] = None,
    load_format: Annotated[
        str | None, _text("auto, or dummy: random weights of the model's shape. [default: auto]", _MODEL)
    ] = None,
    served_model_name: Annotated[str | None, _text("What clients call the base.", _MODEL)] = None,
    max_model_len: Annotated[
        int | None, _text("Most tokens of prompt and answer. [default: the model's]", _MODEL)
    ] = None,
    store: Annotated[Path | None, _text("Folder of adapters. [default: ~/.local/share/lorasrv]", _MEMORY)] = None,
    max_adapters: Annotated[
        int | None, _text("Most adapter versions in the store. [default: no limit]", _LIMITS)
    ] = None,
    store_bytes: Annotated[
        str | None, _text("Most weights in the store, e.g. 20GiB. [default: no limit]", _LIMITS)
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        _text("Adapters of this machine to serve: name=folder ..., or JSON as vLLM has it.", _ADAPTERS),
    ] = None,
    lora_import_root: Annotated[
        Path | None, _text("Let requests register folders below this one by path. [default: none]", _ADAPTERS)
    ] = None,
    accept_base_change: Annotated[
        bool,
        typer.Option(
            "--accept-base-change",
            help="The store was filled for another base: check every adapter against this one.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = False,
    kv_dtype: Annotated[str | None, _text("Of the KV cache: auto, bfloat16 or float32.", _MEMORY)] = None,
    pool_bytes: Annotated[
        str | None, _text("Memory of KV and adapters, e.g. 2GiB. [default: a quarter of what is free]", _MEMORY)
    ] = None,
    host_cache_bytes: Annotated[str | None, _text("Host memory for adapters. [default: 1GiB]", _MEMORY)] = None,
    swap_bytes: Annotated[
        str | None, _text("Host memory for preempted requests; 0 for none. [default: 256MiB]", _MEMORY)
    ] = None,
    no_enable_prefix_caching: Annotated[
        bool,
        typer.Option("--no-enable-prefix-caching", help="Compute every prompt anew.", rich_help_panel=_MEMORY),
    ] = False,
    adapter_pool_fraction: Annotated[
        float | None, _text("Split the pool for good, this share for adapters. [default: shared]", _MEMORY)
    ] = None,
    max_lora_rank: Annotated[int | None, _text("Highest rank to accept. [default: 256]", _MEMORY)] = None,
    max_num_seqs: Annotated[int | None, _text("Most requests in a step. [default: 64]", _STEP)] = None,
    max_num_batched_tokens: Annotated[int | None, _text("Most tokens in a step. [default: 512]", _STEP)] = None,
    preemption: Annotated[
        str | None, _text("What becomes of a preempted request: auto, recompute or swap. [default: auto]", _STEP)
    ] = None,
    policy: Annotated[str | None, _text("Who goes first: fair, fcfs, mlfq or sjf. [default: fair]", _STEP)] = None,
    target_itl_ms: Annotated[
        str | None, _text("What a step with answers in it should take at most, or off. [default: 250]", _STEP)
    ] = None,
    max_wait_steps: Annotated[
        int | None, _text("Put before all others who has waited so many steps. [default: 512]", _STEP)
    ] = None,
    queue_timeout_s: Annotated[
        float | None, _text("Longest wait of a request for its first step. [default: for ever]", _STEP)
    ] = None,
    early_abort: Annotated[
        bool,
        typer.Option("--early-abort", help="Refuse what would miss its deadline.", rich_help_panel=_STEP),
    ] = False,
    max_queued: Annotated[
        int | None, _text("Most requests in the server; more are refused. [default: 4096]", _LIMITS)
    ] = None,
    max_running_per_adapter: Annotated[
        int | None, _text("Most requests of an adapter in a step. [default: no limit]", _LIMITS)
    ] = None,
    max_queued_per_adapter: Annotated[
        int | None, _text("Most requests of an adapter that wait. [default: no limit]", _LIMITS)
    ] = None,
    tokens_per_s_per_adapter: Annotated[
        float | None, _text("Most tokens of an adapter in a second, on average. [default: no limit]", _LIMITS)
    ] = None,
    resident_bytes_per_adapter: Annotated[
        str | None, _text("Most of the pool for an adapter and its requests, e.g. 64MiB. [default: no limit]", _LIMITS)
    ] = None,
    max_running_per_key: Annotated[
        int | None, _text("Most requests of a key in a step. [default: no limit]", _LIMITS)
    ] = None,
    max_queued_per_key: Annotated[
        int | None, _text("Most requests of a key that wait. [default: no limit]", _LIMITS)
    ] = None,
    tokens_per_s_per_key: Annotated[
        float | None, _text("Most tokens of a key in a second, on average. [default: no limit]", _LIMITS)
    ] = None,
    resident_bytes_per_key: Annotated[
        str | None, _text("Most of the pool for a key's requests and their adapters. [default: no limit]", _LIMITS)
    ] = None,
    host: Annotated[str | None, _text("Address to listen on. [default: 127.0.0.1]", _NET)] = None,
    port: Annotated[int | None, _text("Port; 0 takes a free one. [default: 8000]", _NET)] = None,
    allowed_origins: Annotated[
        list[str] | None, _text("Origins whose web pages may use the server; may be repeated.", _NET)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines without keys.", rich_help_panel=_NET)
    ] = False,
    profile: Annotated[
        Path | None, _text("Write where the time of steps went to this JSON file, at the end.", _TRACE)
    ] = None,
    record_trace: Annotated[
        Path | None, _text("Append a line for each request that ends, for lorasrv plan.", _TRACE)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a base model and its adapters. Every option can also be set as LORASRV_NAME in the environment."""
    given = {name: value for name, value in locals().items() if name != "as_json"}
    # By identity: 0 equals False, and --port 0 is an answer.
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    if options.pop("no_enable_prefix_caching", False):
        options["enable_prefix_caching"] = False
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from pydantic import ValidationError

    from api.lora_modules import ModulesRefused
    from api.server import run
    from api.settings import ServerSettings

    try:
        settings = ServerSettings(**options)
    except ValidationError as error:
        raise CliError(_complaints(error), code=ExitCode.USAGE) from None
    try:
        with progress() as step:
            run(settings, lambda what, share: step(what, share, 1.0), lambda ready: _print_ready(ready, as_json))
    except ModulesRefused as error:
        raise CliError(str(error), details=error.reasons) from None
    except OSError as error:
        if error.filename is not None:
            raise
        place = f"{settings.host}:{settings.port}"
        raise CliError(f"cannot listen on {place}: {error.strerror or error}; --port 0 takes a free port") from None


def _print_ready(ready: "Ready", as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        print_json({"event": "ready", **asdict(ready)})
        return
    pool = f"pool {ready.pool_bytes / 2**20:.0f} MiB ({ready.pages} pages)"
    say(f"ready: {ready.url}  model {ready.model} ({ready.quantization})  {pool}  in {ready.seconds:.1f} s")


def _complaints(error: "ValidationError") -> str:
    """One line: each wrong option and why."""
    lines = []
    for problem in error.errors():
        flag = "".join(f"--{part}".replace("_", "-") for part in problem["loc"][:1])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{flag}: {message}" if flag else message)
    return "; ".join(lines)
