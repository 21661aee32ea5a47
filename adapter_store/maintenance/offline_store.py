"""Garbage collection and integrity checks of a store that no server uses. They do not need the base."""

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
from adapter_store.storage.root_lock import lock_root, opening_errors

_DIGEST = re.compile(r"[0-9a-f]{64}")
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""


@dataclass(frozen=True, slots=True)
class CollectSummary:
    """Count what a collection removed: unreferenced contents, blobs and their bytes, unfinished uploads."""

    contents: int
    blobs: int
    bytes: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Describe one problem of a store.

    `kind` is damaged, missing, orphaned, foreign or index; `adapters` are the versions that depend on it.
    """

    kind: str
    what: str
    adapters: tuple[str, ...]
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "adapters": list(self.adapters)}


class OfflineStore:
    """Open a store's folder and hold its lock.

    Args:
        root: the folder.
        create: create a store if there is none.

    Raises:
        StoreLocked: a server uses it.
        StoreUnusable: it cannot be read or written, or is not a store.
    """

    def __init__(self, root: Path, *, create: bool = False) -> None:
        with ExitStack() as undo, opening_errors(root):
            if not create and not (root / "index.sqlite3").is_file():
                raise StoreUnusable("there is no adapter store in it; give the folder that is a server's --store")
            undo.callback(os.close, lock_root(root))
            self.blobs = BlobDirectory(root)
            self.index = Index(root / "index.sqlite3")
            undo.callback(self.index.close)
            self.index.checked_records()
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with disk_errors("closing"):
            self._undo.close()

    def collect(self, age_s: float = UNREFERENCED_BLOB_AGE_S) -> CollectSummary:
        """Remove contents and weights that nothing refers to.

        Unreferenced contents, with their weights, and unfinished uploads are always removed; weights that were never
        registered are removed if they are older than `age_s`.
        """
        before = self.blobs.sizes()
        unnamed = self.index.unreferenced_contents()
        self.blobs.remove(sorted(self.index.delete_contents(unnamed)))
        swept = self.blobs.sweep(self.index.referenced_digests(), age_s)
        gone = before.keys() - self.blobs.sizes().keys()
        return CollectSummary(len(unnamed), len(gone), sum(before[name] for name in gone), swept.num_unfinished)

    def check(self, progress: Progress = lambda done, total: None) -> list[Finding]:
        """Read every blob and compare it with its digest; report missing, orphaned and foreign files too."""
        users, sizes = self.index.versions_by_digest(), self.blobs.sizes()
        findings = [Finding("index", "index", (), line) for line in self.index.problems()]
        for path in self.blobs.foreign_paths():
            what = f"{path.parent.name}/{path.name}"
            findings.append(Finding("foreign", show(what), (), "not a regular file; it is ignored"))
        for digest in sorted(users.keys() - sizes.keys()):
            findings.append(_finding("missing", digest, users, "the weights are missing; upload the same file again"))
        done, total = 0, sum(sizes.values())
        progress(0, total)
        for name, num_bytes in sizes.items():
            findings += self._check_blob(name, users)
            done += num_bytes
            progress(done, total)
        return findings

    def _check_blob(self, name: str, users: dict[str, list[str]]) -> list[Finding]:
        if not _DIGEST.fullmatch(name):
            return [Finding("foreign", show(name), (), "not named like a blob; it is ignored")]
        found = []
        try:
            with self.blobs.open(name) as file, disk_errors("reading weights"):
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            if actual != name:
                found.append(
                    _finding("damaged", name, users, "the bytes do not match the digest; upload the same file again")
                )
        except AdapterError as error:
            found.append(_finding("damaged", name, users, str(error)))
        if name not in users:
            found.append(
                _finding("orphaned", name, users, "no version uses these weights; remove them with lorasrv store gc")
            )
        return found


def _finding(kind: str, digest: str, users: dict[str, list[str]], message: str) -> Finding:
    return Finding(kind, f"sha256:{digest}", tuple(users.get(digest, ())), message)
