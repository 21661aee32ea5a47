"""Predict recorded traffic on a simulated server (plan)."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapter_store.spec import MAX_LORA_RANK
from api.cli.common.options import JsonOption, ReplicaOption, check_one_server, check_png, connected
from api.cli.common.settings_options import given_settings
from api.cli.common.terminal import CliError, ExitCode, note, print_json, progress
from api.cli.plan.machines import MachineOptions, plan_machines
from api.cli.plan.traffic import TrafficOptions

if TYPE_CHECKING:
    from api.cli.plan.machines import ClusterPlan
    from api.cli.plan.report import Plan
    from lorasrv.config import EngineConfig, MemoryOptions
    from lorasrv.metrics.trace import TraceRequest
    from lorasrv.models.spec import ModelSpec
    from lorasrv.offline.cluster.options import ClusterOptions
    from lorasrv.offline.planner.machine_profile import MachineProfile
    from lorasrv.offline.planner.sim_replica import SimServer

DEFAULT_RANK = 16
LIMIT_TIMES = 2.0
"""Default limit of the p99 TTFT for the number of adapters that fit, as a multiple of the trace's own."""
SERVER_PANEL = "Server"
_COSTS, _OUTPUT = "Costs", "Output"
# Options of `serve` that apply to the simulated server.
SERVER_SETTINGS = (
    *("model", "quantization", "quantization_group", "quantized_weights", "dtype", "device", "kernels", "pool_bytes"),
    *(
        "kv_cache_dtype",
        "max_model_len",
        "host_cache_bytes",
        "scheduling_policy",
        "max_num_seqs",
        "max_num_batched_tokens",
        "target_itl_ms",
        "target_itl_ratio",
    ),
)


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text.replace("[", r"\["), rich_help_panel=panel, show_default=False, **more)


@dataclass(frozen=True)
class _PlanOptions:
    """Hold the validated command line."""

    config: "EngineConfig"
    rank: int
    store: Path | None
    costs: Path | None
    server: str | None
    replica: str | None
    recalibrate: bool


def plan(
    ctx: typer.Context,
    traffic: TrafficOptions,
    several: MachineOptions,
    rank: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_LORA_RANK,
            metavar="R",
            help="Rank of adapters of unknown size.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = DEFAULT_RANK,
    store: Annotated[Path | None, _option("Adapter store that knows the adapters' sizes.", SERVER_PANEL)] = None,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure this machine again.", rich_help_panel=_COSTS)
    ] = False,
    server: Annotated[
        str | None, _option("Running server to take learnt costs and the pool's size from.", _COSTS, "--server")
    ] = None,
    replica: ReplicaOption = None,
    costs: Annotated[
        Path | None, _option("JSON file to take costs from.", _COSTS, "--costs", exists=True, dir_okay=False)
    ] = None,
    p99_ttft_ms: Annotated[
        float | None, _option("Limit of the p99 TTFT, in milliseconds. [default: twice the present one]", _OUTPUT)
    ] = None,
    predict_only: Annotated[
        bool,
        typer.Option("--predict-only", help="Replay once, without other adapters or options.", rich_help_panel=_OUTPUT),
    ] = False,
    png: Annotated[
        Path | None, _option("File for a plot of TTFT by number of adapters, and over time.", _OUTPUT)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict how a server would handle traffic, how many adapters fit, and which option to change; or how several
    machines would."""
    if sum((recalibrate, server is not None, costs is not None)) > 1:
        raise CliError("--recalibrate, --server and --costs exclude each other", code=ExitCode.USAGE)
    if replica is not None and server is None:
        raise CliError("--replica is of the address that --server gives; give that, too", code=ExitCode.USAGE)
    if p99_ttft_ms is not None and not 0 < p99_ttft_ms < float("inf"):
        raise CliError(f"--p99-ttft-ms must be positive, not {p99_ttft_ms}", code=ExitCode.USAGE)
    if png is not None:
        check_png("--png", png)
    cluster, _ = several.cluster(traffic.seed), several.bounds_ms()
    if cluster is not None:
        for option, value in (("--p99-ttft-ms", p99_ttft_ms), ("--predict-only", predict_only), ("--png", png)):
            if value:
                raise CliError(f"{option} and --machines exclude each other", code=ExitCode.USAGE)
    from api.config.sources import Sources

    requests = traffic.requests()
    settings = Sources.of_flags(given_settings(ctx)).settings()
    options = _PlanOptions(settings.engine_config(), rank, store, costs, server, replica, recalibrate)
    if cluster is not None:
        _print_cluster(_plan_cluster(options, requests, traffic, cluster, several), as_json)
        return
    done = _plan(options, requests, p99_ttft_ms, predict_only)
    if png is not None:
        from api.cli.plan.plot import draw

        draw(png, done)
    _print(done, as_json)


def _print(done: "Plan", as_json: bool) -> None:
    from api.cli.plan.report import print_plan

    if as_json:
        print_json(done.to_dict())
    else:
        print_plan(done)


def _print_cluster(done: "ClusterPlan", as_json: bool) -> None:
    from api.cli.plan.machines_report import print_machines, to_dict

    if as_json:
        print_json(to_dict(done))
    else:
        print_machines(done)


def _plan_cluster(
    options: _PlanOptions,
    requests: tuple["TraceRequest", ...],
    traffic: TrafficOptions,
    cluster: "ClusterOptions",
    several: MachineOptions,
) -> "ClusterPlan":
    with progress() as step:
        sim, source = _server(options, requests, lambda what, share: step(what, share, 1.0))
        return plan_machines(sim, source, requests, traffic.to_dict(), cluster, several, step)


# The plan.
def _plan(
    options: _PlanOptions, trace: tuple["TraceRequest", ...], limit_ms: float | None, predict_only: bool
) -> "Plan":
    from api.cli.plan.report import Plan
    from lorasrv.offline.planner.report import measured, predicted
    from lorasrv.offline.planner.simulator import replay
    from lorasrv.offline.planner.what_if import capacity, changes

    with progress() as step:
        sim, source = _server(options, trace, lambda what, share: step(what, share, 1.0))
        begun = time.perf_counter()
        done = replay(sim, trace, lambda share: step("replaying the trace", share, 1.0))
        wall_s = time.perf_counter() - begun
        step("replaying the trace", 1.0, 1.0)
        now = predicted(done)
        fit, tried = None, []
        if not predict_only:
            has_adapters = any(request.adapter is not None for request in trace)
            allowed_ms = limit_ms or LIMIT_TIMES * now.ttft_p99_ms
            with _progress_of(step, "how many adapters fit") as advance:
                fit = capacity(sim, trace, allowed_ms, advance) if has_adapters and now.requests else None
            with _progress_of(step, "what to change") as advance:
                tried = changes(sim, trace, advance)
    return Plan(
        server=sim,
        source=source,
        done=done,
        wall_s=wall_s,
        predicted=now,
        measured=measured(trace),
        capacity=fit,
        limit_was_given=limit_ms is not None,
        changes=tried,
        trace=trace,
    )


@contextmanager
def _progress_of(step: Callable[[str, float, float], None], what: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that advances a bar of unknown length: each replay advances it by an eighth of the rest."""
    share = 0.0

    def advance(_: str) -> None:
        nonlocal share
        step(what, share, 1.0)
        share += (1.0 - share) / 8

    yield advance
    step(what, 1.0, 1.0)


def _server(
    options: _PlanOptions, trace: tuple["TraceRequest", ...], on_progress: Callable[[str, float], None]
) -> tuple["SimServer", str]:
    """Return the simulated server, and the source of its costs."""
    from lorasrv.config import PAGE_SIZE_TOKENS
    from lorasrv.engine.memory_plan import MemoryPlan, pool_too_small
    from lorasrv.memory.memory_manager import PoolLayout
    from lorasrv.models.loader import open_checkpoint
    from lorasrv.models.quantization import StoredWeights, select_format
    from lorasrv.offline.planner.sim_replica import SimServer
    from lorasrv.worker.device import resolve_device
    from sgmv_kernels.formats.kv_format import get_kv_format

    model = options.config.model
    checkpoint = open_checkpoint(model.model)
    try:
        spec, name, packing = checkpoint.spec, checkpoint.name, checkpoint.packing
        quantization, _ = select_format(StoredWeights.of(checkpoint), model.quantization, model.quantization_group)
    finally:
        checkpoint.close()
    itemsize = 4 if options.config.model.dtype == "float32" else 2
    layout_of = _layouts(options, spec, itemsize, trace)
    samples = _samples(options)
    memory, num_pages = _memory(options, samples)
    kv_format = get_kv_format(memory.kv_cache_dtype, options.config.model.dtype)
    page_bytes = kv_format.page_bytes(spec.num_kv_heads, spec.head_dim, PAGE_SIZE_TOKENS)
    config = replace(options.config, memory=memory)
    pool = MemoryPlan.of(config, spec, quantization, resolve_device(model.device), packing).pool
    layout = PoolLayout.of_bytes(pool, page_bytes, PAGE_SIZE_TOKENS, spec.num_slabs)
    if num_pages is not None and num_pages != layout.num_pages:
        why = f"the server at --server has {num_pages} pages in a pool that would have {layout.num_pages} here"
        raise CliError(
            f"{why}; give --model, --dtype and --kv-cache-dtype as it has them, or --pool-bytes for a server with a "
            "draft model or several ranks",
            code=ExitCode.USAGE,
        )
    if problem := pool_too_small(pool, layout.block_bytes):
        raise CliError(problem, code=ExitCode.USAGE)
    costs, source = _costs(options, name, samples, on_progress)
    has_drafts = options.config.speculation.speculation != "off"
    longest = options.config.model.max_model_len or spec.max_position
    server = SimServer(layout, memory, options.config.scheduler, costs, layout_of, longest, has_drafts)
    return server, source


def _layouts(
    options: _PlanOptions, spec: "ModelSpec", itemsize: int, trace: tuple["TraceRequest", ...]
) -> Callable[[str], Any]:
    from adapter_store.store import AdapterStore
    from lorasrv.models.lora_sites import base_shapes
    from lorasrv.offline.planner.adapter_sizes import AdapterSizes

    if options.store is None:
        sizes = AdapterSizes.of(spec, itemsize, options.rank, trace)
    else:
        if not options.store.is_dir():
            raise CliError(f"--store: the folder {options.store} does not exist", code=ExitCode.USAGE)
        if not (options.store / "index.sqlite3").is_file():
            raise CliError(f"--store: there is no adapter store in {options.store}", code=ExitCode.USAGE)
        with AdapterStore(options.store, base_shapes(spec)) as store:
            sizes = AdapterSizes.of(spec, itemsize, options.rank, trace, store)
    names = {request.adapter for request in trace if request.adapter is not None}
    if assumed := sizes.assumed(sorted(names)):
        note(f"the size of {len(assumed)} of {len(names)} adapters is unknown; assuming rank {options.rank} (--rank)")
    return sizes.maker()


def _samples(options: _PlanOptions) -> dict[str, float]:
    """Return the metrics of the server of `--server`; none without it."""
    if options.server is None:
        return {}
    with connected(options.server) as client:
        samples = client.metrics(options.replica)
        check_one_server(client.url, samples)
        return samples


def _memory(options: _PlanOptions, samples: dict[str, float]) -> tuple["MemoryOptions", int | None]:
    """Return the memory options to plan with, and the number of pages that the server of `--server` reports; None if
    there is no such server or `--pool-bytes` is given."""
    memory = options.config.memory
    if memory.pool_bytes is not None:
        return memory, None
    pool, pages = (int(samples.get(name, 0)) or None for name in ("lorasrv_pool_bytes", "lorasrv_pages_total"))
    return replace(memory, pool_bytes=pool), pages


def _costs(
    options: _PlanOptions, model_name: str, samples: dict[str, float], on_progress: Callable[[str, float], None]
) -> tuple["MachineProfile", str]:
    """Return the costs, and a description of their source."""
    from lorasrv.offline.planner.machine_profile import MachineProfile, cache_file, read_cached, write_cached

    if options.costs is not None:
        return MachineProfile.read(options.costs), f"costs from {options.costs.name}"
    file = cache_file(model_name, options.config.model)
    cached = None if options.recalibrate else read_cached(file)
    if options.server is not None:
        named = "" if options.replica is None else f", replica {options.replica}"
        return _learnt(samples, cached), f"costs learnt by {options.server}{named}"
    if cached is None:
        # Set before torch is imported, as in `serve`.
        import os

        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
        from lorasrv.offline.planner.calibrate import calibrate

        done = calibrate(options.config, options.rank, on_progress)
        if not done.problem:
            write_cached(file, done.costs)
            return done.costs, "costs measured now on this machine"
        note(f"{done.problem}: these costs are too high, and not saved")
        note("measure again on an idle machine, or take the costs that a server has learnt (--server)")
        return done.costs, "costs measured now on this machine, which was busy"
    return cached, "costs measured earlier on this machine (--recalibrate measures anew)"


def _learnt(samples: dict[str, float], cached: "MachineProfile | None") -> "MachineProfile":
    """Return the costs that a server has learnt, completed with costs measured on this machine."""
    from lorasrv.memory.cost_model import PARTS
    from lorasrv.offline.planner.machine_profile import MachineProfile

    try:
        step = {part: samples[f'lorasrv_step_cost_seconds{{part="{part}"}}'] for part in PARTS}
        load, copy = (samples[f'lorasrv_load_cost_seconds{{part="{part}"}}'] for part in ("load_byte", "copy_byte"))
    except KeyError:
        raise CliError(
            "the server at --server does not report learnt costs; is it lorasrv?", code=ExitCode.UNREACHABLE
        ) from None
    base = cached or MachineProfile(step)
    return replace(base, step=step, load_s=0.0, load_byte_s=load, copy_s=0.0, copy_byte_s=copy)
