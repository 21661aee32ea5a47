"""A store that no server uses, for the work that needs none: garbage collection and checks. No base is asked for."""

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adapter_store.errors import AdapterError, StoreUnusable, show
from adapter_store.registry.index import Index
from adapter_store.storage.blobs import UNREFERENCED_BLOB_AGE_S, BlobDirectory, disk_errors
from adapter_store.storage.root_lock import lock_root, opening

_DIGEST = re.compile(r"[0-9a-f]{64}")
Progress = Callable[[int, int], None]
"""Told how many bytes are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a garbage collection removed: contents that no version named, blobs and their bytes, unfinished uploads."""

    contents: int
    blobs: int
    bytes: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong: `kind` is damaged, missing, orphaned, foreign or index. `adapters` need what it is about."""

    kind: str
    what: str
    adapters: tuple[str, ...]
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "adapters": list(self.adapters)}


class OfflineStore:
    """A store's folder, locked for as long as this is open.

    Args:
        create: make a store where there is none.

    Raises:
        StoreLocked: a server uses it.
        StoreUnusable: it cannot be read or written, or is no store.
    """

    def __init__(self, root: Path, *, create: bool = False) -> None:
        with ExitStack() as undo, opening(root):
            if not create and not (root / "index.sqlite3").is_file():
                raise StoreUnusable("there is no adapter store in it")
            undo.callback(os.close, lock_root(root))
            self.blobs = BlobDirectory(root)
            self.index = Index(root / "index.sqlite3")
            undo.callback(self.index.close)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with disk_errors("closing"):
            self._undo.close()

    def collect(self, age_s: float = UNREFERENCED_BLOB_AGE_S) -> Collected:
        """Remove what nothing names: contents and their weights at once, weights that were never registered when they
        are older than `age_s`, unfinished uploads.
        """
        before = self.blobs.sizes()
        unnamed = self.index.unnamed()
        self.blobs.remove(sorted(self.index.drop(unnamed)))
        swept = self.blobs.sweep(self.index.referenced_digests(), age_s)
        gone = before.keys() - self.blobs.sizes().keys()
        return Collected(len(unnamed), len(gone), sum(before[name] for name in gone), swept.num_unfinished)

    def check(self, progress: Progress = lambda done, total: None) -> list[Finding]:
        """Read every blob again and compare it with its digest; look for what is missing and for what nobody names."""
        users, sizes = self.index.users(), self.blobs.sizes()
        findings = [Finding("index", "index", (), line) for line in self.index.problems()]
        for path in self.blobs.strangers():
            what = f"{path.parent.name}/{path.name}"
            findings.append(Finding("foreign", show(what), (), "it is no plain file; nobody needs it, or touches it"))
        for digest in sorted(users.keys() - sizes.keys()):
            findings.append(_finding("missing", digest, users, "the weights are gone; upload the same file again"))
        done, total = 0, sum(sizes.values())
        progress(0, total)
        for name, num_bytes in sizes.items():
            findings += self._check_blob(name, users)
            done += num_bytes
            progress(done, total)
        return findings

    def _check_blob(self, name: str, users: dict[str, list[str]]) -> list[Finding]:
        if not _DIGEST.fullmatch(name):
            return [Finding("foreign", show(name), (), "no blob is called that; nobody needs this file")]
        found = []
        try:
            with self.blobs.open(name) as file, disk_errors("reading weights"):
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if actual != name:
                found.append(_finding("damaged", name, users, "other bytes than were uploaded; upload the file again"))
        except AdapterError as error:
            found.append(_finding("damaged", name, users, str(error)))
        if name not in users:
            found.append(_finding("orphaned", name, users, "no version names these weights; lorasrv store gc"))
        return found


def _finding(kind: str, digest: str, users: dict[str, list[str]], message: str) -> Finding:
    return Finding(kind, f"sha256:{digest}", tuple(users.get(digest, ())), message)
