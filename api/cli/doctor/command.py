"""Check whether lorasrv can serve on this machine, and what to do if not (doctor). Loads no weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapter_store.errors import AdapterError
from adapter_store.spec import MAX_LORA_RANK
from api.cli.common.options import ConfigOption, JsonOption
from api.cli.common.settings_options import given_settings
from api.cli.common.terminal import CliError, out, print_json, say
from lorasrv.errors import ConfigError, LorasrvError

if TYPE_CHECKING:
    from api.cli.doctor.machine import Check
    from api.config.settings import ServerSettings

SERVER_SETTINGS = (
    *("model", "store", "host", "port", "device", "max_num_batched_tokens"),
    *("pool_bytes", "gpu_memory_utilization", "host_cache_bytes", "swap_bytes"),
    *("replicas", "max_replicas"),
)
"""Options of `serve` that `doctor` takes."""
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Report:
    """Hold the printed result of one check."""

    name: str
    status: str
    text: str
    # What to do about it; "" if nothing.
    fix: str


def doctor(
    ctx: typer.Context,
    rank: Annotated[int, typer.Option(min=1, max=MAX_LORA_RANK, help="Rank of the adapters in the memory plan.")] = 16,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check what several replicas need, too.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine for serve with its options: device, memory, store, port, libraries, model.

    Exit code 1 if a problem would prevent serving.
    """
    reports = []
    for report in _reports(given_settings(ctx), config, rank, cluster):
        reports.append(report)
        if not as_json:
            _print(report)
    failed = [report.name for report in reports if report.status == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(report) for report in reports]})
    if failed:
        raise CliError(f"{len(failed)} of {len(reports)} checks failed: {', '.join(failed)}")


def _reports(flags: Mapping[str, Any], config: Path | None, rank: int, cluster: bool) -> Iterator[Report]:
    from api.cli.doctor import machine as doctor_machine
    from api.cli.doctor import serving as doctor_serving
    from api.config.sources import Sources

    yield _run("libraries", doctor_machine.libraries)
    try:
        sources = Sources.gather(flags, config)
        settings = sources.settings()
    except ConfigError as error:
        yield Report("settings", "fail", str(error), "the other checks need valid settings: correct this first")
        return
    yield _run("settings", lambda: doctor_serving.configuration(sources))
    yield _run("processor", doctor_machine.processor)
    yield _run("threads", doctor_machine.threads)
    yield _run("huge pages", doctor_machine.huge_pages)
    yield _run("device", lambda: doctor_machine.device(settings))
    yield _run("kernels", lambda: doctor_machine.kernels(settings))
    yield _run("model", lambda: doctor_serving.model(settings))
    yield _run("memory", lambda: doctor_serving.memory(settings, rank))
    yield _run("store", lambda: doctor_serving.store(settings))
    yield _run("disk", lambda: doctor_serving.disk(settings, rank))
    yield _run("port", lambda: doctor_serving.port(settings))
    if cluster or settings.replicas is not None:
        yield from _cluster_reports(settings, rank)


def _cluster_reports(settings: "ServerSettings", rank: int) -> Iterator[Report]:
    from api.cli.doctor import cluster as doctor_cluster

    yield _run("ray", doctor_cluster.versions)
    yield _run("shared memory", doctor_cluster.shared_memory)
    yield _run("ray's ports", doctor_cluster.ports)
    yield _run("ray's files", lambda: doctor_cluster.folders(settings))
    yield _run("all replicas", lambda: doctor_cluster.memory(settings, rank))


def _run(name: str, check: "Callable[[], Check]") -> Report:
    """Run a check; an error becomes its result."""
    try:
        done = check()
    except (LorasrvError, AdapterError) as error:
        return Report(name, "fail", str(error), "see what failed before, or give another option")
    except Exception as error:
        return Report(name, "fail", f"cannot be checked: {type(error).__name__}: {error}", "please report it")
    return Report(name, done.status, done.text, done.fix)


def _print(report: Report) -> None:
    console = out()
    if not console.is_terminal:
        say("\t".join((report.status, report.name, report.text, *([report.fix] if report.fix else []))))
        return
    from rich.padding import Padding
    from rich.text import Text

    line = Text.assemble((f"{report.status:5}", f"bold {COLOURS[report.status]}"), (f"{report.name:14}", "bold"))
    console.print(line, end="")
    console.print(Text(report.text, overflow="fold"))
    if report.fix:
        console.print(Padding(Text(f"-> {report.fix}", overflow="fold"), (0, 0, 0, 19)))
