"""Adapters that lie in folders of the server's own machine: `--lora-modules`, and what a route may import by path.

Folders are registered as uploads are: weights into the store by their digest, the whole check, a version of the id;
the same content again is the same version.

The one folder of the server from which a request may import adapters by path: `--lora-import-root`.

Paths are taken as the disk has them, links followed, before they are compared: a link that leads out of the folder is
outside, whoever put it there. What is outside is answered alike whether it exists or not, and no answer holds a path.
"""

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from adapter_store.errors import AdapterCorrupt, AdapterError, AdapterInvalid, BlobNotFound, show
from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.formats.peft_dir import CHUNK_BYTES, CONFIG_NAME, MLX_WEIGHTS_NAME, WEIGHTS_NAME, Opener, open_file
from adapter_store.formats.safetensors_file import header_cap_bytes, read_header
from adapter_store.quota import ANONYMOUS
from adapter_store.registry.records import Registration
from adapter_store.registry.references import VERBS, check_adapter_id
from adapter_store.spec import AdapterId, AdapterRef
from adapter_store.storage.pending_uploads import Uploader
from adapter_store.store import AdapterStore
from adapter_store.validation.validate import validate_adapter
from api.config.lora_module_path import LoraModulePath
from api.errors import ApiError

_LOG = logging.getLogger(__name__)


class ModulesRefused(Exception):
    """Some of `--lora-modules` cannot be served; `reasons` has a line for each problem, which begins with the name."""

    def __init__(self, names: Sequence[str], reasons: Sequence[str]) -> None:
        super().__init__(f"--lora-modules: refused: {', '.join(names)}")
        self.reasons = list(reasons)


def register_modules(
    store: AdapterStore, modules: Sequence[LoraModulePath], progress: Callable[[str, float], None]
) -> None:
    """Register each; goes on behind a refused one, so that one start tells of all.

    Raises:
        ModulesRefused: with the names and every reason. Those that are not among them are in the store.
    """
    reasons: dict[str, list[str]] = {}
    for number, module in enumerate(modules):
        progress("registering adapters", number / len(modules))
        try:
            done = add_folder(store, module.path.expanduser(), module.name, moves=False)
        except (AdapterError, OSError) as error:
            reasons[module.name] = _reasons(error)
            continue
        for warning in (*_other_base(module, store.base.name), *_not_current(store, done), *done.report.warnings):
            _LOG.warning("--lora-modules %s: %s", module.name, warning)
    if reasons:
        shown = {name: show(name)[1:-1] for name in reasons}
        lines = [f"{shown[name]}: {line}" for name, found in reasons.items() for line in found]
        raise ModulesRefused(list(shown.values()), lines)
    if modules:
        progress("registering adapters", 1.0)


def add_folder(
    store: AdapterStore,
    folder: Path,
    adapter_id: str,
    *,
    if_not_exists: bool = False,
    moves: bool = True,
    opener: Opener = open_file,
    **owner: Any,
) -> Registration:
    """Register a folder of this machine, whoever saved it, as `lorasrv upload` would. `opener` opens its files; `owner`
    is whose the version becomes, for `AdapterStore.register`.

    An id that has this content as an older version goes back to it; not unless it `moves`, and then nothing is done.
    Weights that the store has already are not copied once more, unless they turn out to be damaged there.

    Raises:
        OSError: the folder cannot be read.
        AdapterError: as `open_adapter_dir`, `AdapterStore.open_blob` and `AdapterStore.register`.
    """
    name = check_adapter_id(adapter_id, VERBS)
    with open_adapter_dir(folder, opener) as peft, peft.open_weights() as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
        if not moves and (older := _older_version(store, name, peft.config, weights, digest)):
            return Registration(older, created=False, report=store.version_history.report(older))
        with contextlib.suppress(BlobNotFound, AdapterCorrupt, AdapterInvalid):
            return store.register(name, peft.config, digest, if_not_exists=if_not_exists, **owner)
        # Not there, or perhaps damaged on the disk: what is here puts that right.
        _copy(store, weights, digest, Uploader(owner.get("principal", ANONYMOUS)))
        return store.register(name, peft.config, digest, if_not_exists=if_not_exists, **owner)


def _older_version(
    store: AdapterStore, name: AdapterId, config: Mapping[str, object], weights: BufferedReader, digest: str
) -> AdapterRef | None:
    """The version that an id has of a content, if it is not the current one."""
    record = store.records().get(name)
    if record is None or digest not in {version.weights_digest for version in record.versions}:
        return None
    # Weights that a version names were checked as a whole; with the config, their header says which content they are.
    weights.seek(0)
    header = read_header(weights, os.fstat(weights.fileno()).st_size, header_cap_bytes(store.base))
    key = validate_adapter(config, header, store.base, store.max_lora_rank, weights_digest=digest).key
    found = [version.version for version in record.versions if version.key == key]
    return record.ref(found[-1]) if found and record.current_version not in found else None


def _copy(store: AdapterStore, weights: BufferedReader, digest: str, sender: Uploader) -> None:
    weights.seek(0)
    with store.open_blob(digest, os.fstat(weights.fileno()).st_size, sender) as upload:
        while chunk := weights.read(CHUNK_BYTES):
            upload.write(chunk)
        upload.commit()


def _reasons(error: AdapterError | OSError) -> list[str]:
    if isinstance(error, AdapterInvalid):
        return [f"{p.field + ': ' if p.field else ''}{p.message} ({p.code})" for p in error.problems]
    if isinstance(error, OSError):
        return [f"cannot be read: {error.strerror or type(error).__name__}"]
    return [str(error)]


def _not_current(store: AdapterStore, done: Registration) -> list[str]:
    current = store.get(done.ref.adapter_id).current_version
    if current == done.ref.version:
        return []
    name, version = done.ref.adapter_id, done.ref.version
    return [
        f"the folder is {name}@{version}, and {name}@{current} stays the current one, which came later or was chosen"
    ]


def _other_base(module: LoraModulePath, served: str) -> list[str]:
    if module.base_model_name is None or module.base_model_name == served:
        return []
    return [f"base_model_name {show(module.base_model_name)} is not what is served here, {show(served)}"]


class ImportRoot:
    """A folder below which requests may name others. `root` exists, its links resolved."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def folder(self, path: str) -> Path:
        """The adapter's folder that a request names, absolute or below the root, resolved.

        Raises:
            ApiError: 403, it or a file of an adapter in it is outside; 404, there is no such folder.
        """
        found = self._resolved(self._root / path)
        try:
            if not found.is_dir():
                raise _not_there()
            for folder in (found, *(file.parent for file in found.glob(f"*/{CONFIG_NAME}"))):
                for name in (CONFIG_NAME, WEIGHTS_NAME, MLX_WEIGHTS_NAME):
                    self._resolved(folder / name)
        except (OSError, ValueError):
            raise _not_there() from None
        return found

    def open(self, path: Path) -> BufferedReader:
        """Open a file and check where it is afterwards: a link that was changed meanwhile leads nowhere.

        Raises:
            ApiError: 403, what has been opened is outside, or no regular file.
            OSError: it cannot be opened.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            place = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if not place.is_relative_to(self._root) or not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _outside()
            return os.fdopen(fd, "rb")
        except BaseException:
            os.close(fd)
            raise

    def _resolved(self, path: Path) -> Path:
        try:
            found = path.resolve()
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
            raise _not_there() from None
        if not found.is_relative_to(self._root):
            raise _outside()
        return found


def _outside() -> ApiError:
    message = "lora_path must lie below the folder that the server was given as --lora-import-root, links followed"
    return ApiError(403, message, code="path_not_allowed", param="lora_path")


def _not_there() -> ApiError:
    message = "there is no such folder below the server's import root (names of a hub are not fetched)"
    return ApiError(404, message, code="adapter_not_found", param="lora_path")
