"""Clean up, check, export and import an adapter store that no server uses (store gc, fsck, export, import)."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from adapter_store.errors import ProblemList
from adapter_store.formats.adapter_config import read_added_tokens
from adapter_store.spec import MAX_LORA_RANK, BaseShapes
from adapter_store.storage.blobs import NEW_FILE, UNREFERENCED_BLOB_AGE_S, fsync_directory
from api.cli.commands.check import shapes_of
from api.cli.common.formatting import counted
from api.cli.common.options import JsonOption, configured_store, duration, existing, existing_folder, expanded
from api.cli.common.terminal import CliError, names_file, note, print_json, print_table, progress, say
from lorasrv.config import BUILTIN_MODEL, Limits, size

if TYPE_CHECKING:
    from adapter_store.maintenance.archive import ArchiveSummary
    from adapter_store.maintenance.archived_sums import ArchivedPart
    from adapter_store.maintenance.offline_store import Finding, OfflineStore

MANY_TOKENS = 2**31
"""Number of tokens assumed for a base whose embedding is unknown."""
ARCHIVE_NAME = "lorasrv-store.tar"
_store_option = partial(
    typer.Option,
    "--store",
    envvar="LORASRV_STORE",
    metavar="DIR",
    help=r"The store. \[default: as for serve]",
    show_default=False,
)
StoreOption = Annotated[Path | None, _store_option(callback=existing_folder)]
NewStoreOption = Annotated[Path | None, _store_option(callback=expanded)]
app = typer.Typer(help="Clean, check and move an adapter store. No server may be using it.", no_args_is_help=True)


def gc(
    store: StoreOption = None,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Keep unused weights that are younger than this, e.g. 90s, 12h, 7d."),
    ] = f"{UNREFERENCED_BLOB_AGE_S / 3600:g}h",
    as_json: JsonOption = False,
) -> None:
    """Remove weights that no version uses, and unfinished uploads."""
    age_s = duration("--older-than", older_than)
    with _opened(store) as closed:
        done = closed.collect(age_s)
    if as_json:
        print_json(asdict(done))
        return
    what = (
        counted(done.blobs, "blob"),
        counted(done.contents, "content"),
        counted(done.unfinished, "unfinished upload"),
    )
    say(f"removed {what[0]} ({size(done.bytes)}), {what[1]}, {what[2]}")


def fsck(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Read all weights and compare them with their digests; exit code 1 if anything is wrong."""
    with _opened(store) as closed, progress(in_bytes=True) as step:
        findings = closed.check(lambda done, total: step("reading weights", done, total))
        count = len(closed.blobs.sizes())
    if as_json:
        print_json({"ok": not findings, "blobs": count, "findings": [finding.to_dict() for finding in findings]})
    elif findings:
        print_table(("finding", "what", "needed by", "why"), [_cells(finding) for finding in findings])
    else:
        say(f"ok: {counted(count, 'blob')}, each as it was uploaded")
    if findings:
        raise CliError(counted(len(findings), "finding"))


def _cells(finding: "Finding") -> tuple[str, ...]:
    return finding.kind, finding.what, ", ".join(finding.adapters) or "-", finding.message


def export(
    target: Annotated[
        Path,
        typer.Argument(metavar="DIR_OR_TAR", callback=expanded, help=f"File to write; in a folder: {ARCHIVE_NAME}."),
    ],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write all ids, versions, aliases and limits with their weights into one tar file."""
    from adapter_store.maintenance.archive import export_store

    path = target / ARCHIVE_NAME if target.is_dir() else target
    if path.exists():
        raise CliError(f"{path} exists already; remove it, or give another name")
    if not (folder := path.absolute().parent).is_dir():
        raise CliError(f"the folder {folder} does not exist; create it, or give another one")
    with _opened(store) as closed, progress(in_bytes=True) as step, _written(path) as file:
        moved = export_store(closed, file, lambda done, total: step("exporting", done, total))
    _print_moved("exported", moved, path, as_json)


def import_(
    source: Annotated[Path, typer.Argument(callback=existing, metavar="DIR_OR_TAR", help="File written by export.")],
    model: Annotated[str, typer.Option(help="Base that its adapters must fit.")] = BUILTIN_MODEL,
    max_lora_rank: Annotated[
        int, typer.Option(min=1, max=MAX_LORA_RANK, help="Highest rank to accept.")
    ] = MAX_LORA_RANK,
    skip_refused: Annotated[
        bool,
        typer.Option("--skip-refused", help="Import the other adapters if some are refused; the exit code is 1 then."),
    ] = False,
    store: NewStoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import an archive into a store, which is created if missing.

    All weights are verified and all adapters validated; everything is imported, or nothing. Each adapter that this
    version refuses is reported with the reason.
    """
    from adapter_store.maintenance.archive import import_store
    from api.serving.persona_checks import check_tokens

    refused: dict[str, str] = {}
    path = source / ARCHIVE_NAME if source.is_dir() else source
    with path.open("rb") as file:
        base = shapes_of(model)
        with _refusals_shown(), _created(store) as closed, progress(in_bytes=True) as step:
            moved = import_store(
                closed,
                file,
                base,
                max_lora_rank,
                lambda done, total: step("reading weights", done, total),
                _check_limits,
                partial(_check_defaults, base),
                check_tokens,
                refused.__setitem__ if skip_refused else None,
            )
    _print_moved("imported", moved, path, as_json, refused=refused)
    if refused:
        raise CliError(_refused(refused), details=list(refused.values()))


@contextmanager
def _refusals_shown() -> Iterator[None]:
    """Report each refused adapter, and how to proceed."""
    from adapter_store.errors import AdaptersRefused

    try:
        yield
    except AdaptersRefused as error:
        how = "nothing was imported; --skip-refused imports the others"
        raise CliError(f"{_refused(error.reasons)}, and {how}", details=list(error.reasons)) from None


def _refused(adapters: Sized) -> str:
    return f"{len(adapters)} adapter{'s are' if len(adapters) != 1 else ' is'} refused"


def _check_limits(limits: Mapping[str, Any]) -> None:
    """Check that `serve` would start with these limits."""
    Limits(**limits)


def _check_defaults(base: BaseShapes, text: str, config: Mapping[str, object]) -> list["ArchivedPart"]:
    """Check defaults as on upload, except for checks that need a tokenizer or a chat template.

    Returns the parts of a sum.

    Raises:
        ValueError: the defaults are invalid.
    """
    from adapter_store.maintenance.archived_sums import ArchivedPart
    from api.serving.field_checks import FieldChecks

    own = read_added_tokens(config, ProblemList())
    checks = FieldChecks(max([base.vocab_size or MANY_TOKENS, *(token.id + 1 for token in own)]))
    defaults = checks.fields(json.loads(text))
    if len(checks.problems):
        raise ValueError("; ".join(f"{problem.field}: {problem.message}" for problem in checks.problems.problems()))
    return [ArchivedPart(part.id, part.digest, part.weight) for part in defaults.adapters or ()]


def _opened(store: Path | None, *, create: bool = False) -> "OfflineStore":
    from adapter_store.maintenance.offline_store import OfflineStore

    return OfflineStore(_root(store), create=create)


def _root(store: Path | None) -> Path:
    return store or configured_store().expanduser()


@contextmanager
def _created(store: Path | None) -> Iterator["OfflineStore"]:
    """Open a store, created if missing. A store created here is removed again if nothing could be imported."""
    root = _root(store)
    is_new = not root.exists()
    with _opened(store, create=True) as closed:
        try:
            yield closed
        except BaseException:
            if is_new:
                # Remove it while its lock is held.
                shutil.rmtree(root, ignore_errors=True)
            raise


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Write a file atomically and durably. Like the store, only its owner can read it."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with names_file(path), os.fdopen(os.open(partial, NEW_FILE, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        fsync_directory(path.absolute().parent)
    except FileExistsError:
        raise CliError(f"{partial} exists: another export is running, or was killed; remove it then") from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _print_moved(what: str, moved: "ArchiveSummary", path: Path, as_json: bool, **more: object) -> None:
    if as_json:
        print_json({"path": str(path), **asdict(moved), **more})
        return
    note(str(path))
    counts = (counted(moved.adapters, "adapter"), counted(moved.versions, "version"), counted(moved.blobs, "blob"))
    say(f"{what} {', '.join(counts)} ({size(moved.bytes)})")
