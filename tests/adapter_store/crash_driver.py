"""Kill a store at its k-th operation on the disk, for every k, and look at what is left. Run as a program.

A child is forked for each k (no threads here, so forking is safe) and ends without clean-up at its k-th call of an `os`
function that changes the disk, before or after doing it, or at its k-th SQL statement. The parent then opens the store
and checks: every visible version opens and verifies, each id is as before or as after, nothing unfinished is left.
Prints the number of kills.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapter_store.blobs as blobs_module
from adapter_store.index import Index
from adapter_store.spec import BaseShapes
from adapter_store.store import AdapterStore

OPERATIONS = ("open", "write", "fsync", "replace", "unlink")
MODULES = {"self_attn.q_proj": (4, 4)}
BASE = BaseShapes("llama", 1, MODULES)
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
KILLED = 99


def weights(value: int) -> bytes:
    """A rank 1 adapter of one module, float32, all values alike."""
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    header = {
        f"{stem}A.weight": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]},
        f"{stem}B.weight": {"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + struct.pack("<8f", *[float(value)] * 8)


def put(store: AdapterStore, value: int) -> str:
    data = weights(value)
    digest = hashlib.sha256(data).hexdigest()
    with store.open_blob(digest, len(data)) as upload:
        upload.write(data)
        upload.commit()
    return digest


class Killer:
    """Ends the process at the k-th operation: before it if `k` is even, after it if odd."""

    def __init__(self, k: int) -> None:
        self.left, self.after = divmod(k, 2)

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == -1 and not self.after:
            os._exit(KILLED)
        try:
            return call(*args, **kwargs)
        finally:
            if self.left == -1:
                os._exit(KILLED)


class PatchedOs:
    """`os` with the operations that change the disk counted."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return (lambda *a, **k: self._killer.around(real, *a, **k)) if name in OPERATIONS else real


class PatchedDb:
    """A connection whose statements are counted."""

    def __init__(self, db: Any, killer: Killer) -> None:
        self._db, self._killer = db, killer

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._db, name)
        return (lambda *a: self._killer.around(real, *a)) if name in ("execute", "executemany") else real


def changes(store: AdapterStore) -> None:
    """What is interrupted: a new version, another id, a delete of a version and of an id."""
    store.register("mia", CONFIG, put(store, 3))
    store.register("new", CONFIG, put(store, 4))
    store.delete("mia@1")
    store.delete("gone")


def child(root: Path, k: int) -> None:
    store = AdapterStore(root, BASE)
    killer = Killer(k)
    setattr(blobs_module, "os", PatchedOs(killer))  # noqa: B010 - mypy knows that the module's `os` is a module
    index: Index = store._index
    index._db.execute("PRAGMA synchronous = OFF")
    index._db = PatchedDb(index._db, killer)  # type: ignore[assignment]
    changes(store)
    os._exit(0)


ALLOWED = [
    {"mia": [1, 2], "gone": [1]},
    {"mia": [1, 2, 3], "gone": [1]},
    {"mia": [1, 2, 3], "gone": [1], "new": [1]},
    {"mia": [2, 3], "gone": [1], "new": [1]},
    {"mia": [2, 3], "new": [1]},
]


def check(root: Path) -> int:
    """Which of the allowed states is on the disk; fails if none, or if a version does not load."""
    with AdapterStore(root, BASE) as store:
        state = {str(r.adapter_id): [v.version for v in r.versions] for r in store.list_adapters()}
        named = set()
        for record in store.list_adapters():
            for version in record.versions:
                named.add(store.load(version.key).spec.weights_digest)
            assert store.resolve(record.adapter_id).version == max(v.version for v in record.versions)
        assert not list((root / "tmp").iterdir())
        store._blobs.sweep(named, age_s=-1.0)
        assert {p.name for p in (root / "blobs" / "sha256").iterdir()} == named
        assert state in ALLOWED, state
        put(store, 5)
        return ALLOWED.index(state)


def main(folder: Path) -> None:
    # A killed process, unlike a power loss, loses nothing that was written: fsync is counted but not waited for.
    os.fsync = lambda fd: None
    template = folder / "template"
    with AdapterStore(template, BASE) as store:
        for name, value in (("mia", 1), ("mia", 2), ("gone", 0)):
            store.register(name, CONFIG, put(store, value))
    seen = []
    for k in range(10_000):
        root = folder / str(k)
        shutil.copytree(template, root)
        pid = os.fork()
        if pid == 0:
            child(root, k)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        seen.append(check(root))
        shutil.rmtree(root)
        if code == 0:
            break
        assert code == KILLED, code
    assert seen == sorted(seen), "a later kill showed an earlier state"
    assert set(seen) == set(range(len(ALLOWED)))
    print(len(seen) - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
