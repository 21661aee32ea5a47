"""Start the server to benchmark, with adapters of random weights."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from api.cli.common.child_server import running_server
from api.cli.common.terminal import CliError, ExitCode, progress

OWN_FLAGS = ("--store", "--host", "--port", "--json")


def check_flags(flags: Sequence[str]) -> None:
    """Check the options for `serve` after `--`.

    Raises: CliError.
    """
    if flags and not flags[0].startswith("-"):
        raise CliError(f"unexpected argument {flags[0]!r}; options of serve go after --", code=ExitCode.USAGE)
    for flag in flags:
        if flag.partition("=")[0] in OWN_FLAGS:
            name = flag.partition("=")[0]
            raise CliError(f"-- {name}: the started server has its own; give --url for another", code=ExitCode.USAGE)


def adapter_names(count: int) -> tuple[str, ...]:
    """Return the names of generated adapters."""
    return tuple(f"a{number:04d}" for number in range(count))


@contextmanager
def started(flags: Sequence[str], names: Sequence[str], rank: int, seed: int) -> Iterator[str]:
    """Start a server on a free port with a temporary store of these adapters, and yield its URL."""
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder:
        store = Path(folder) / "store"
        if names:
            fill(store, flags, names, rank, seed)
        with running_server([*flags, "--store", str(store)]) as url:
            yield url


def fill(folder: Path, flags: Sequence[str], names: Sequence[str], rank: int, seed: int) -> None:
    """Create a store of adapters with random weights for the base of a server with these flags."""
    from adapter_store.store import AdapterStore
    from lorasrv.config import BUILTIN_MODEL
    from lorasrv.models.loader import open_checkpoint
    from lorasrv.models.lora_sites import base_shapes
    from lorasrv.offline.planner.random_adapters import write_random_adapter

    model, load_format = _value(flags, "model", BUILTIN_MODEL), _value(flags, "load-format", "auto")
    with closing(open_checkpoint(model, load_format)) as checkpoint:
        shapes = base_shapes(checkpoint.spec, checkpoint.name)
    with progress() as step, AdapterStore(folder, shapes) as store:
        for number, name in enumerate(names):
            step("making adapters", number, len(names))
            write_random_adapter(store, name, rank, seed + number)
        step("making adapters", len(names), len(names))


def _value(flags: Sequence[str], name: str, default: str) -> str:
    """Return the value that `serve` will use for an option: from its last flag, else its variable, else its default."""
    found = os.environ.get(f"LORASRV_{name.replace('-', '_').upper()}") or default
    for flag, after in zip(flags, [*flags[1:], ""], strict=False):
        if flag == f"--{name}":
            found = after
        elif flag.startswith(f"--{name}="):
            found = flag.partition("=")[2]
    return found
