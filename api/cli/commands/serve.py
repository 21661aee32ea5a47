"""serve: options to settings, settings to a server."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.common.options import ConfigOption, JsonOption
from api.cli.common.terminal import CliError, ExitCode, note, print_json, progress, say
from lorasrv.errors import ConfigError

if TYPE_CHECKING:
    from api.server import Ready

_MODEL, _MEMORY, _STEP, _LIMITS, _NET, _TRACE = "Model", "Memory", "Scheduling", "Limits", "Network", "Recording"
_ADAPTERS = "Adapters"
_WATERMARK = "Watermark"
_ENDS = "Faults and ends"
_SEEING = "Seeing"


def _text(text: str, panel: str) -> Any:
    # A bracket would be markup.
    return typer.Option(help=text.replace("[", r"\["), rich_help_panel=panel, show_default=False)


def _switch(name: str, text: str, panel: str = "", *, hidden: bool = False) -> Any:
    return typer.Option(f"--{name}", help=text, rich_help_panel=panel or None, show_default=False, hidden=hidden)


def _opposite(name: str) -> Any:
    """Undoes what a file or the environment says. Not in the help, whose columns would not hold both."""
    return _switch(name, "The opposite.", hidden=True)


_SWITCHES = ("accept_base_change", "enable_prefix_caching", "early_abort", "insecure", "testing", "log_prompts")


def serve(
    model: Annotated[
        str | None,
        _text("Built-in name, .gguf file, Hugging Face folder or hf:org/name. [default: smollm2-135m]", _MODEL),
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
    bf16_linears: Annotated[
        str | None,
        _text("auto: large steps in bf16 on CPUs where that is much faster, if memory allows; or off.", _MODEL),
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
        _switch(
            "accept-base-change",
            "The store was filled for another base: check every adapter against this one.",
            _ADAPTERS,
        ),
    ] = False,
    no_accept_base_change: Annotated[bool, _opposite("no-accept-base-change")] = False,
    kv_dtype: Annotated[str | None, _text("Of the KV cache: auto, bfloat16, float16 or float32.", _MEMORY)] = None,
    pool_bytes: Annotated[
        str | None, _text("Memory of KV and adapters, e.g. 2GiB. [default: a quarter of what is free]", _MEMORY)
    ] = None,
    host_cache_bytes: Annotated[str | None, _text("Host memory for adapters. [default: 1GiB]", _MEMORY)] = None,
    swap_bytes: Annotated[
        str | None, _text("Host memory for preempted requests; 0 for none. [default: 256MiB]", _MEMORY)
    ] = None,
    no_enable_prefix_caching: Annotated[
        bool, _switch("no-enable-prefix-caching", "Compute every prompt anew.", _MEMORY)
    ] = False,
    enable_prefix_caching: Annotated[bool, _opposite("enable-prefix-caching")] = False,
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
    early_abort: Annotated[bool, _switch("early-abort", "Refuse what would miss its deadline.", _STEP)] = False,
    no_early_abort: Annotated[bool, _opposite("no-early-abort")] = False,
    max_queued: Annotated[
        int | None, _text("Most requests that wait for their first step. [default: 4096]", _LIMITS)
    ] = None,
    max_queued_tokens: Annotated[
        int | None, _text("Most tokens of prompts that are not computed yet. [default: 1048576]", _LIMITS)
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
    api_key: Annotated[
        str | None,
        _text("A key that may do everything, besides those of lorasrv key; better set as LORASRV_API_KEY.", _NET),
    ] = None,
    insecure: Annotated[bool, _switch("insecure", "Serve other machines even without keys.", _NET)] = False,
    no_insecure: Annotated[bool, _opposite("no-insecure")] = False,
    max_connections: Annotated[int | None, _text("Most connections at a time. [default: 2048]", _NET)] = None,
    header_timeout_s: Annotated[
        float | None, _text("Longest time for a request's headers to come. [default: 10]", _NET)
    ] = None,
    body_timeout_s: Annotated[
        float | None, _text("Longest time for a body with less than 1 KiB/s. [default: 30]", _NET)
    ] = None,
    write_timeout_s: Annotated[
        float | None, _text("Longest time for a client that does not read its answer. [default: 60]", _NET)
    ] = None,
    keep_alive_s: Annotated[
        float | None, _text("Longest time between two requests of a connection. [default: 30]", _NET)
    ] = None,
    watermark_gamma: Annotated[
        float | None, _text("Share of tokens that are green for watermark: true. [default: 0.5]", _WATERMARK)
    ] = None,
    watermark_delta: Annotated[
        float | None, _text("What a green token's logit gets more. [default: 2]", _WATERMARK)
    ] = None,
    watermark_key: Annotated[
        int | None,
        _text("Whoever knows it can find the mark; better set as LORASRV_WATERMARK_KEY. [default: TGI's]", _WATERMARK),
    ] = None,
    watchdog_s: Annotated[
        float | None, _text("End with an error if a step takes longer than this; 0: never. [default: 60]", _ENDS)
    ] = None,
    drain_s: Annotated[
        float | None, _text("How long requests may go on when the server is told to end. [default: 25]", _ENDS)
    ] = None,
    inject_faults: Annotated[
        str | None, _text("Fail on purpose, e.g. slow-disk:200ms,step-raises@50. Needs --testing.", _ENDS)
    ] = None,
    testing: Annotated[bool, _switch("testing", "This server is for tests: it may fail on purpose.", _ENDS)] = False,
    no_testing: Annotated[bool, _opposite("no-testing")] = False,
    log_format: Annotated[
        str | None, _text("Of the lines on stderr: json, text, or auto: text in a terminal. [default: auto]", _SEEING)
    ] = None,
    log_level: Annotated[
        str | None, _text("debug, info, warning or error; info has a line a request. [default: info]", _SEEING)
    ] = None,
    log_prompts: Annotated[
        bool, _switch("log-prompts", "Put the beginnings of prompts and answers into these lines.", _SEEING)
    ] = False,
    no_log_prompts: Annotated[bool, _opposite("no-log-prompts")] = False,
    metrics_compat: Annotated[
        str | None, _text("vllm: figures in /metrics also under vLLM's names. [default: ours only]", _SEEING)
    ] = None,
    metrics_adapters: Annotated[
        int | None, _text("Adapters with figures of their own in /metrics, the busiest. [default: 50]", _SEEING)
    ] = None,
    otlp_endpoint: Annotated[
        str | None, _text("Send OpenTelemetry spans there, e.g. http://collector:4318. [default: none]", _SEEING)
    ] = None,
    profile: Annotated[
        Path | None, _text("Write where the time of steps went to this JSON file, at the end.", _TRACE)
    ] = None,
    record_trace: Annotated[
        Path | None, _text("Append a line for each request that ends, for lorasrv plan.", _TRACE)
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a base model and its adapters.

    Every option can also be set as LORASRV_NAME in the environment, or in a TOML file: lorasrv config init writes one.
    """
    flags = flags_of(locals())
    from api.config.lora_modules import ModulesRefused
    from api.config.sources import Sources, unknown_variables
    from api.observability.logs import written
    from api.server import CannotListen, run

    for line in unknown_variables():
        note(f"warning: {line}")
    sources = Sources.gather(flags, config)
    settings = sources.settings()
    if settings.inject_faults:
        note(f"WARNING: this server fails on purpose: {settings.inject_faults}")
    try:
        with written(settings.log_format, settings.log_level), progress() as step:
            run(settings, lambda what, share: step(what, share, 1.0), lambda ready: _print_ready(ready, as_json))
    except ConfigError as error:
        raise ConfigError(sources.reworded(str(error))) from None
    except ModulesRefused as error:
        raise CliError(str(error), details=error.reasons) from None
    except CannotListen as error:
        raise CliError(str(error)) from None


def flags_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the flags say about the settings, of all parameters of `serve`. Raises: CliError: a switch both ways."""
    given = {name: value for name, value in options.items() if name not in ("config", "as_json")}
    switches = _switched(given)
    return {name: value for name, value in given.items() if value not in (None, [], ())} | switches


def _switched(given: dict[str, Any]) -> dict[str, bool]:
    """Switches that were given, one way or the other; taken out of what was given. Raises: CliError: both ways."""
    switched = {}
    for name in _SWITCHES:
        on, off = given.pop(name), given.pop(f"no_{name}")
        if on and off:
            flag = name.replace("_", "-")
            raise CliError(f"--{flag} and --no-{flag} exclude each other", code=ExitCode.USAGE)
        if on or off:
            switched[name] = bool(on)
    return switched


def _print_ready(ready: "Ready", as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        print_json({"event": "ready", **asdict(ready)})
        return
    pool = f"pool {ready.pool_bytes / 2**20:.0f} MiB ({ready.pages} pages)"
    say(f"ready: {ready.url}  model {ready.model} ({ready.quantization})  {pool}  in {ready.seconds:.1f} s")
