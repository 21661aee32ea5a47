"""Run the server (serve)."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from api.cli.common.options import ConfigOption, JsonOption
from api.cli.common.settings_options import given_settings
from api.cli.common.terminal import CliError, note, print_json, progress_of_start, say
from lorasrv.errors import ConfigError, NotEnoughMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from api.config.settings import ServerSettings
    from api.server import Progress, Ready


@dataclass(frozen=True)
class NotNeeded:
    """Accept options of vLLM's serve that have no meaning here. The help of each is the reason."""

    enable_lora: Annotated[bool, typer.Option("--enable-lora", hidden=True, help="adapters are always served")] = False
    max_loras: Annotated[int | None, typer.Option(hidden=True, help="a batch may hold any number of adapters")] = None
    max_cpu_loras: Annotated[
        int | None, typer.Option(hidden=True, help="--host-cache-bytes bounds the adapters in host memory")
    ] = None
    lora_dtype: Annotated[str | None, typer.Option(hidden=True, help="--dtype sets the data type of adapters")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", hidden=True, help="no code of a checkpoint is ever run")
    ] = False
    enable_chunked_prefill: Annotated[
        bool, typer.Option("--enable-chunked-prefill", hidden=True, help="prompts are always computed in chunks")
    ] = False
    enforce_eager: Annotated[
        bool,
        typer.Option(
            "--enforce-eager",
            hidden=True,
            help="CUDA graphs are captured only for shapes that occur; no memory is reserved for others",
        ),
    ] = False
    disable_log_requests: Annotated[
        bool,
        typer.Option(
            "--disable-log-requests", hidden=True, help="texts of requests are logged with --log-prompts only"
        ),
    ] = False
    no_enable_log_requests: Annotated[
        bool,
        typer.Option(
            "--no-enable-log-requests", hidden=True, help="texts of requests are logged with --log-prompts only"
        ),
    ] = False
    disable_log_stats: Annotated[
        bool, typer.Option("--disable-log-stats", hidden=True, help="statistics are at /metrics and are never logged")
    ] = False
    fully_sharded_loras: Annotated[
        bool, typer.Option("--fully-sharded-loras", hidden=True, help="adapters are sharded like the linear layers")
    ] = False
    block_size: Annotated[int | None, typer.Option(hidden=True, help="a page of the KV cache has 16 tokens")] = None
    swap_space: Annotated[
        float | None, typer.Option(hidden=True, help="--swap-bytes bounds the memory of preempted requests")
    ] = None
    seed: Annotated[int | None, typer.Option(hidden=True, help="requests have seeds of their own")] = None
    download_dir: Annotated[
        str | None, typer.Option(hidden=True, help="models of hf:org/name are stored under HF_HOME")
    ] = None
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice", hidden=True, help="tools are served if the model's chat template has them"
        ),
    ] = False
    tool_call_parser: Annotated[
        str | None, typer.Option(hidden=True, help="the format of tool calls is read from the chat template")
    ] = None
    reasoning_parser: Annotated[
        str | None, typer.Option(hidden=True, help="the markers of reasoning are read from the chat template")
    ] = None
    uvicorn_log_level: Annotated[str | None, typer.Option(hidden=True, help="--log-level applies to all logs")] = None

    def notes(self) -> list[str]:
        """Return a line with the reason for each option that is given."""
        declared = get_type_hints(NotNeeded, include_extras=True)
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        # 0 counts as given.
        given = [name for name, value in values if value is not None and value is not False]
        return [f"--{name.replace('_', '-')} is not needed: {declared[name].__metadata__[0].help}" for name in given]


def serve(
    ctx: typer.Context,
    not_needed: NotNeeded,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a base model and its adapters.

    Every option can also be set as LORASRV_NAME in the environment, or in a TOML file: lorasrv config init writes one.
    """
    flags = given_settings(ctx)
    from api.config.lora_module_path import ModulesRefused
    from api.config.sources import Sources, unknown_variables
    from api.observability.logs import written
    from api.server import CannotStart

    for line in [*(f"warning: {line}" for line in unknown_variables()), *not_needed.notes()]:
        note(line)
    sources = Sources.gather(flags, config)
    settings = sources.settings()
    if settings.inject_faults:
        note(f"WARNING: --inject-faults makes this server fail on purpose: {settings.inject_faults}")
    try:
        with (
            written(settings.log_format, settings.log_level),
            progress_of_start(lambda ready: _print_ready(ready, as_json)) as (step, on_ready),
        ):
            _run(settings, step, on_ready)
    except (ConfigError, NotEnoughMemory) as error:
        raise type(error)(sources.reworded(str(error))) from None
    except ModulesRefused as error:
        raise CliError(str(error), details=error.reasons) from None
    except CannotStart as error:
        raise CliError(str(error)) from None


def _run(settings: "ServerSettings", progress: "Progress", on_ready: "Callable[[Ready], None]") -> None:
    """Run a server, or several replicas behind one address."""
    if settings.replicas is None:
        from api.server import run

        run(settings, progress, on_ready)
    else:
        from api.cluster import local

        local.run(settings, progress, on_ready)


def _print_ready(ready: "Ready", as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        print_json({"event": "ready", **asdict(ready)})
        return
    several = f"{ready.replicas} replicas, each with a " if ready.replicas > 1 else ""
    pool = f"{several}pool {ready.pool_bytes / 2**20:.0f} MiB ({ready.pages} pages)"
    say(f"ready: {ready.url}  model {ready.model} ({ready.quantization})  {pool}  in {ready.seconds:.1f} s")
    say(f"console: {ready.url}/console")
