"""Upload a tree of adapter folders, several at a time (upload --all).

Weights that the server already has are not sent, so the same command resumes where it was stopped. If adapters are
refused, the others are still registered, and the refused ones are reported at the end.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapter_store.errors import AdapterInvalid, InvalidAdapterId, show
from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.formats.peft_dir import CONFIG_NAME, MLX_WEIGHTS_NAME, PICKLES, WEIGHTS_NAME
from adapter_store.registry.references import RESERVED_IDS, check_adapter_id, suggest_id
from adapter_store.spec import MAX_LORA_RANK, BaseShapes, Form
from adapter_store.validation.validate import check_files
from api.cli.commands import check
from api.cli.common.options import connected
from api.cli.common.terminal import CliError, ExitCode, Steps, note, print_json, progress, say, short_digest
from api.client import Client, Refused, ServerUnreachable, problem_line

if TYPE_CHECKING:
    from lorasrv.text.tokenizer import Tokenizer

PARALLEL = 4
MAX_PATIENCE_S = 120.0
MIN_PAUSE_S = 0.5
MAX_DEPTH = 8
SHOWN_NAMES = 20
MARKS = (CONFIG_NAME, WEIGHTS_NAME, MLX_WEIGHTS_NAME, PICKLES[0])
"""A folder with one of these files counts as an adapter, even if it is refused. Folders below it are ignored."""


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """Describe an adapter of the tree: its folder and id."""

    folder: Path
    # Path below the tree's root.
    place: str
    adapter_id: str


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """Hold the result for one adapter."""

    found: FoundAdapter
    # The server's response, or the local report.
    done: dict[str, Any]
    # Why the adapter was refused; empty if it was not.
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        ok = {"ok": not self.reasons, "id": self.found.adapter_id, "folder": self.found.place}
        return {**ok, "reasons": list(self.reasons)} if self.reasons else {**ok, **self.done}


def adapter_id_of(named: str | Path, slugify: bool) -> str:
    """Return the id as given; with `slugify`, or if `named` is a folder, the valid id nearest to the name.

    Raises:
        CliError: the id is not allowed (the message suggests one), or has no valid characters.
    """
    wanted = Path(os.path.abspath(named)).name if isinstance(named, Path) else named
    if not (slugify or isinstance(named, Path)):
        try:
            return check_adapter_id(wanted, RESERVED_IDS)
        except InvalidAdapterId as error:
            raise CliError(f"{error}, or --slugify", code=ExitCode.USAGE) from error
    slug = suggest_id(wanted, RESERVED_IDS)
    if slug is None:
        raise CliError(f"no id can be derived from {show(wanted)}; give one with --id", code=ExitCode.USAGE)
    if slug != wanted:
        note(f"{show(wanted)} becomes {slug!r}")
    return slug


@dataclass(frozen=True, slots=True)
class Tree:
    """Define a folder of adapter folders, and how their paths become ids."""

    root: Path
    prefix: str = ""
    slugify: bool = False

    def adapters(self) -> list[FoundAdapter]:
        """Return the adapters sorted by path.

        Raises:
            CliError: there are no adapters, an id is not allowed (the message suggests one), or two adapters would have
            the same id.
        """
        folders = list(_folders(self.root))
        if folders == [self.root]:
            message = f"{self.root} is an adapter itself; send it with: lorasrv upload DIR --id ID"
            raise CliError(message, code=ExitCode.USAGE)
        if not folders:
            raise CliError(f"no folder below {self.root} holds {CONFIG_NAME}")
        places = {folder: folder.relative_to(self.root).as_posix() for folder in folders}
        wanted = {folder: self.prefix + place for folder, place in places.items()}
        ids = {folder: self._adapter_id(name) for folder, name in wanted.items()}
        _check_ids(ids, wanted)
        return [FoundAdapter(folder, place, ids[folder]) for folder, place in places.items()]

    def _adapter_id(self, wanted: str) -> str:
        return suggest_id(wanted, RESERVED_IDS) or wanted if self.slugify else wanted


@dataclass(frozen=True, slots=True)
class How:
    """Hold the options that apply to each upload; they are those of a single upload."""

    if_not_exists: bool = False
    alias: str | None = None
    allow_partial: bool = False
    stored: Form | None = None
    allow_drift: bool = False
    no_tokenizer: bool = False


def upload_all(tree: Tree, server: str, how: How, as_json: bool) -> None:
    """Upload all adapters of a tree.

    Raises:
        CliError: some are refused, or the server stopped responding.
    """
    found = tree.adapters()
    outcomes = []
    with connected(server) as client, progress(in_bytes=True) as step:
        client.base_name()  # fails early if the server does not respond
        meter = _Meter(step, found)
        for outcome in _each(found, lambda one, ended: _send(client, one, how, meter, ended), client.close):
            outcomes.append(outcome)
            _print_sent(outcome, as_json)
    _end(outcomes, "are in the server")


def check_all(tree: Tree, model: str, terms: Mapping[str, Any], as_json: bool, no_tokenizer: bool) -> None:
    """Validate each adapter locally like a server with this base, and list its id; `terms` are those of `check_files`.

    Raises:
        CliError: some would be refused.
    """
    # Imported here, so that other commands do not wait for the tokenizers library.
    from lorasrv.models.loader.locate import read_tokenizer

    found = tree.adapters()
    base = check.shapes_of(model)
    tokenizer = None if no_tokenizer else cache(partial(read_tokenizer, model))
    outcomes = []
    for one in found:
        outcomes.append(_checked(one, base, tokenizer, terms))
        if as_json:
            print_json(outcomes[-1].to_dict())
        elif not outcomes[-1].reasons:
            say(f"ok {one.adapter_id}{_from(one)}")
    _end(outcomes, "would be accepted; nothing was sent")


def _folders(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield adapter folders, following links but not cycles."""
    resolved = folder.resolve()
    if not folder.is_dir() or resolved in above or len(above) > MAX_DEPTH:
        return
    if any((folder / mark).is_file() for mark in MARKS):
        yield folder
        return
    for child in sorted(folder.iterdir()):
        yield from _folders(child, above | {resolved})


def _check_ids(ids: Mapping[Path, str], wanted: Mapping[Path, str]) -> None:
    bad = []
    for name in ids.values():
        try:
            check_adapter_id(name, RESERVED_IDS)
        except InvalidAdapterId as error:
            bad.append(str(error))
    if bad:
        message = "some ids are not allowed: rename the folders, or convert the ids with --slugify"
        raise CliError(message, details=_few(bad), code=ExitCode.USAGE)
    owners: dict[str, list[str]] = {}
    for folder, name in ids.items():
        owners.setdefault(name, []).append(show(wanted[folder]))
    if double := [f"{name}: {', '.join(names)}" for name, names in owners.items() if len(names) > 1]:
        message = "several folders would have the same id: rename all but one of each"
        raise CliError(message, details=_few(double), code=ExitCode.USAGE)


def _few(lines: Sequence[str]) -> list[str]:
    rest = [f"and {len(lines) - SHOWN_NAMES} more"] if len(lines) > SHOWN_NAMES else []
    return [*lines[:SHOWN_NAMES], *rest]


class _Meter:
    """Show the progress of all threads as one number of bytes."""

    def __init__(self, step: Steps, found: Sequence[FoundAdapter]) -> None:
        self._step = step
        self._lock = threading.Lock()
        self._sizes = {one.adapter_id: _weights_bytes(one.folder) for one in found}
        self._sent = dict.fromkeys(self._sizes, 0)
        self._total = sum(self._sizes.values())
        self._total_sent = 0

    def on_sent(self, one: FoundAdapter, share: float = 1.0) -> None:
        """Report the share of an adapter that is done. At the end it is 1, even if the adapter was not sent."""
        with self._lock:
            now = int(share * self._sizes[one.adapter_id])
            self._total_sent += now - self._sent[one.adapter_id]
            self._sent[one.adapter_id] = now
            self._step("uploading", self._total_sent, self._total)


def _weights_bytes(folder: Path) -> int:
    """Return the size of the weights in bytes, at least 1, so that a folder without weights counts in the progress."""
    files = (folder / name for name in (WEIGHTS_NAME, MLX_WEIGHTS_NAME))
    return max([1, *(file.stat().st_size for file in files if file.is_file())])


def _each(
    found: Sequence[FoundAdapter],
    work: Callable[[FoundAdapter, threading.Event], UploadOutcome],
    cut: Callable[[], None],
) -> Iterator[UploadOutcome]:
    """Yield results as they complete. An unexpected error, or Ctrl-C, cancels pending and running uploads.

    Args:
        work: uploads one adapter; must stop when its event is set.
        cut: aborts everything that is being sent.
    """
    ended = threading.Event()
    with ThreadPoolExecutor(PARALLEL) as pool:
        futures = list[Future[UploadOutcome]]()
        try:
            futures += [pool.submit(work, one, ended) for one in found]
            for future in as_completed(futures):
                yield future.result()
        except ServerUnreachable as error:
            done = sum(f.done() and not f.cancelled() and f.exception() is None for f in futures)
            message = f"{error}; {done} of {len(found)} are done; run the same command to resume"
            raise ServerUnreachable(message) from None
        except BaseException:
            ended.set()
            cut()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _send(client: Client, one: FoundAdapter, how: How, meter: _Meter, ended: threading.Event) -> UploadOutcome:
    def tell(what: str, done: int, total: int) -> None:
        if what == "sending" and total:
            meter.on_sent(one, done / total)

    try:
        with open_adapter_dir(one.folder) as found:
            options = asdict(how)
            peft = found if options.pop("no_tokenizer") else client.with_tokenizer(found)
            upload = partial(client.upload, peft, one.adapter_id, **options, send_always=False, progress=tell)
            done = _patiently(upload, ended)
    except (AdapterInvalid, Refused, OSError) as error:
        return UploadOutcome(one, {}, _reasons(error))
    finally:
        meter.on_sent(one)
    return UploadOutcome(one, done)


def _patiently(work: Callable[[], dict[str, Any]], ended: threading.Event) -> dict[str, Any]:
    """Call `work`, and retry while the server is busy and asks to retry later.

    Stops after delays of `MAX_PATIENCE_S` in total, or when `ended` is set.

    Raises: Refused.
    """
    waited = 0.0
    while True:
        try:
            return work()
        except Refused as error:
            # A minimum delay, so that a server that asks for a delay of 0 is not called in a tight loop.
            pause = max(MIN_PAUSE_S, error.retry_after_s or 0.0)
            if error.retry_after_s is None or waited + pause > MAX_PATIENCE_S or _ends_within(pause, ended):
                raise
            waited += pause


def _ends_within(seconds: float, ended: threading.Event) -> bool:
    return ended.wait(seconds)


def _checked(
    one: FoundAdapter, base: BaseShapes, tokenizer: "Callable[[], Tokenizer] | None", terms: Mapping[str, Any]
) -> UploadOutcome:
    from lorasrv.text.own_tokenizers import with_own_tokens

    try:
        with open_adapter_dir(one.folder) as found:
            peft = found if tokenizer is None else with_own_tokens(found, tokenizer)
            report = check_files(peft.config, peft.weights_path, base, MAX_LORA_RANK, **terms).report
    except (AdapterInvalid, OSError) as error:
        return UploadOutcome(one, {}, _reasons(error))
    return UploadOutcome(one, {"report": report.to_dict()})


def _reasons(error: AdapterInvalid | Refused | OSError) -> tuple[str, ...]:
    if isinstance(error, AdapterInvalid):
        return tuple(problem_line(problem.to_dict()) for problem in error.problems)
    if isinstance(error, Refused):
        return tuple(error.problems) or (str(error),)
    return (f"cannot be read: {error.strerror or type(error).__name__}",)


def _print_sent(outcome: UploadOutcome, as_json: bool) -> None:
    if as_json:
        print_json(outcome.to_dict())
        return
    if outcome.reasons:
        return
    done = outcome.done
    state = "registered" if done["created"] else "unchanged:"
    say(f"{state} {done['id']}@{done['version']}  {short_digest(done['digest'])}{_from(outcome.found)}")
    for warning in done["report"]["warnings"]:
        note(f"{done['id']}: warning: {warning}")


def _from(one: FoundAdapter) -> str:
    return "" if one.place == one.adapter_id else f"  (from {show(one.place)})"


def _end(outcomes: Sequence[UploadOutcome], done: str) -> None:
    refused = [outcome for outcome in outcomes if outcome.reasons]
    summary = f"{len(outcomes) - len(refused)} of {len(outcomes)} adapters {done}"
    if not refused:
        note(summary)
        return
    lines = [f"{outcome.found.adapter_id}{_from(outcome.found)}: {'; '.join(outcome.reasons)}" for outcome in refused]
    raise CliError(f"{summary}; refused:", details=lines)
