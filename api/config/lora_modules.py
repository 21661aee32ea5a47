"""Register adapters from folders on the server's machine: `--lora-modules`, and imports below `--lora-import-root`.

Folders are registered like uploads: weights by digest, full validation, a new version of the id unless a version has
the same content. For imports, links are resolved before paths are compared, so a link out of the root counts as
outside. Responses do not reveal whether a path outside exists, and contain no paths.
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
from adapter_store.registry.references import RESERVED_IDS, check_adapter_id
from adapter_store.spec import AdapterId, AdapterRef
from adapter_store.storage.pending_uploads import Uploader
from adapter_store.store import AdapterStore
from adapter_store.validation.validate import validate_adapter
from api.config.lora_module_path import LoraModulePath, ModulesRefused
from api.errors import ApiError
from lorasrv.text.own_tokenizers import with_own_tokens
from lorasrv.text.tokenizer import Tokenizer

ReadTokenizer = Callable[[], Tokenizer]
_LOG = logging.getLogger(__name__)


def register_modules(
    store: AdapterStore,
    modules: Sequence[LoraModulePath],
    progress: Callable[[str, float], None],
    tokenizer: ReadTokenizer | None = None,
) -> None:
    """Register all modules, and collect the problems of all before raising.

    Args:
        tokenizer: as for `add_folder`.

    Raises:
        ModulesRefused: some modules are refused, for the given reasons; the others are registered.
    """
    reasons: dict[str, list[str]] = {}
    for number, module in enumerate(modules):
        progress("registering adapters", number / len(modules))
        try:
            done = add_folder(store, module.path.expanduser(), module.name, moves=False, tokenizer=tokenizer)
        except (AdapterError, OSError) as error:
            # Show the absolute path: the working directory may not be the one that the user expects.
            is_there = module.path.expanduser().is_dir()
            reasons[module.name] = _reasons(error) if is_there else [f"{module.path.absolute()} is not a folder"]
            continue
        for warning in (*_other_base(module, store.base.name), *_not_current(store, done), *_warnings(done)):
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
    tokenizer: ReadTokenizer | None = None,
    **owner: Any,
) -> Registration:
    """Register the adapter in a folder, as `lorasrv upload` would.

    If an older version of the id has this content, it becomes the current one if `moves`; otherwise the current version
    stays. Weights that are already stored are not copied again, unless the stored ones are damaged.

    Args:
        if_not_exists: refuse an existing id.
        moves: whether the current version may change to an older one.
        opener: function that opens the folder's files.
        tokenizer: returns the base's tokenizer, to compare the folder's own with; None: the folder's is not read.
        owner: owner of the version, for `AdapterStore.register`.
    Raises:
        OSError: the folder cannot be read.
        AdapterError: as for `open_adapter_dir`, `AdapterStore.open_blob` and `AdapterStore.register`.
    """
    name = check_adapter_id(adapter_id, RESERVED_IDS)
    with open_adapter_dir(folder, opener) as found, found.open_weights() as weights:
        peft = found if tokenizer is None else with_own_tokens(found, tokenizer)
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
        if not moves and (older := _older_version(store, name, peft.config, weights, digest)):
            return Registration(older, created=False, report=store.version_history.report(older))
        with contextlib.suppress(BlobNotFound, AdapterCorrupt, AdapterInvalid):
            return store.register(name, peft.config, digest, if_not_exists=if_not_exists, **owner)
        # The weights are not stored, or are damaged on disk: copy them.
        _copy(store, weights, digest, Uploader(owner.get("principal", ANONYMOUS)))
        return store.register(name, peft.config, digest, if_not_exists=if_not_exists, **owner)


def _older_version(
    store: AdapterStore, name: AdapterId, config: Mapping[str, object], weights: BufferedReader, digest: str
) -> AdapterRef | None:
    """Return the id's version with this content, if it is an older one, or the current one and has defaults."""
    record = store.records().get(name)
    if record is None or digest not in {version.weights_digest for version in record.versions}:
        return None
    # Stored weights were fully validated, so config, header and digest identify the content.
    weights.seek(0)
    header = read_header(weights, os.fstat(weights.fileno()).st_size, header_cap_bytes(store.base))
    spec = validate_adapter(config, header, store.base, store.max_lora_rank, weights_digest=digest, stored=store.form)
    found = [version.version for version in record.versions if version.key == spec.key]
    current = record.ref(record.current_version)
    if current.version in found:
        # Registering it again without its defaults would lose them.
        return current if current.persona else None
    return record.ref(found[-1]) if found else None


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
        f"the folder is {name}@{version}; {name}@{current}, which is newer or was selected, stays the current version"
    ]


def _warnings(done: Registration) -> tuple[str, ...]:
    return () if done.report is None else done.report.warnings


def _other_base(module: LoraModulePath, served: str) -> list[str]:
    if module.base_model_name is None or module.base_model_name == served:
        return []
    return [f"base_model_name {show(module.base_model_name)} is not the served base model, {show(served)}"]


class ImportRoot:
    """Resolve requested folders below a root. `root` must exist."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def folder(self, path: str) -> Path:
        """Resolve the adapter's folder that a request names, absolute or relative to the root.

        Raises:
            ApiError: 403, the folder or a file of an adapter in it is outside; 404, the folder does not exist.
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
        """Open a file and check its location afterwards, so that a link changed in between has no effect.

        Raises:
            ApiError: 403, the opened file is outside, or is not a regular file.
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
        except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, a cycle of links
            raise _not_there() from None
        if not found.is_relative_to(self._root):
            raise _outside()
        return found


def _outside() -> ApiError:
    message = "lora_path must be below the folder of --lora-import-root after resolving links"
    return ApiError(403, message, code="path_not_allowed", param="lora_path")


def _not_there() -> ApiError:
    message = "lora_path does not exist below the server's import root (names of a model hub are not downloaded)"
    return ApiError(404, message, code="adapter_not_found", param="lora_path")
