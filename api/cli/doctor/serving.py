"""Check the inputs of serve for doctor: settings, model, memory, store, disk, port."""

import errno
import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from adapter_store.errors import AdapterError
from adapter_store.registry.database import check_index
from adapter_store.storage.blobs import PROBE_BYTES
from adapter_store.storage.root_lock import opening_errors
from api.cli.common.formatting import counted
from api.cli.doctor.machine import Check
from api.config.device_defaults import fitted
from api.config.settings import ServerSettings
from lorasrv.config import PAGE_SIZE_TOKENS, size
from lorasrv.errors import ConfigError, LorasrvError, ModelNotFound, UnsupportedFormat

if TYPE_CHECKING:
    from api.config.sources import Sources
    from lorasrv.models.loader import Checkpoint
    from lorasrv.models.loader.locate import ModelShape
    from lorasrv.models.spec import ModelSpec

ASK_S = 2.0
LITTLE_DISK = 1 << 30
_OTHER_PORT = "another --port; 0 selects a free one"
_OF_KEYS = frozenset({"missing_api_key", "invalid_api_key", "forbidden"})


def configuration(sources: "Sources") -> Check:
    """Report where options come from. Invalid options have failed before this check."""
    from api.config.file import default_path
    from api.config.sources import FIELDS, unknown_variables

    given = [name for name in FIELDS if sources.origin(name).kind != "default"]
    where = str(sources.file.path) if sources.file is not None else f"no file ({default_path()} does not exist)"
    text = f"{where}; {counted(len(given), 'option')} set: {', '.join(given)}" if given else f"{where}; all defaults"
    if unknown := unknown_variables():
        return Check("warn", f"{text}; {'; '.join(unknown)}", "rename or unset the unknown variables")
    file = sources.file
    if file is not None and "api_key" in (*file.client, *file.serve) and _others_may_read(file.path):
        return Check("warn", f"{text}; other users may read the key in it", f"chmod 600 {file.path}")
    return Check("ok", f"{text} (lorasrv config show --origin)")


def model(settings: ServerSettings) -> Check:
    """Check, from the headers of its files, that the base exists, is of a known family and has the needed tensors."""
    try:
        shape = _base(settings)
    except LorasrvError as error:
        text = str(error)
        install = text.rpartition(": ")[2] if "pip install" in text else ""
        return Check("fail", text, install or "give another --model, or repair the file")
    spec = shape.spec
    weights = spec.linear_weights + spec.table_weights
    text = f"{shape.name}: {spec.family}, {weights / 1e6:.0f} M weights, {spec.num_layers} layers"
    return Check("ok", f"{text}, context {spec.max_position}")


def memory(settings: ServerSettings, rank: int) -> Check:
    """Compare the memory that serve plans to use with the free memory, and count the adapters of a rank that fit."""
    from lorasrv.engine.memory_plan import MemoryPlan, pool_too_small
    from lorasrv.worker.device import resolve_device
    from lorasrv.worker.host_memory import free_bytes

    try:
        shape = _base(settings)
    except LorasrvError:
        return Check("warn", f"{size(free_bytes())} free on the host", "no memory plan without a base: see model")
    try:
        config, device = fitted(settings).engine_config(), resolve_device(settings.device)
        quantization = _quantization(settings)
    except UnsupportedFormat as error:
        return Check("fail", f"{size(free_bytes())} free on the host", str(error))
    draft_model = config.speculation.draft_model
    try:
        draft = None if draft_model is None else _shape(draft_model).spec
    except LorasrvError as error:
        return Check("fail", f"{size(free_bytes())} free on the host", f"--draft-model: {error}")
    try:
        plan = MemoryPlan.of(config, shape.spec, quantization, device, draft=draft)
        pages, packed = _adapter(settings, shape.spec, rank)
    except ConfigError as error:
        return Check("fail", f"{size(free_bytes())} free on the host", str(error))
    fit = plan.pool // plan.block // pages
    graphs = f", CUDA graphs and workspaces {size(plan.beside)}" if plan.on_gpu else ""
    text = (
        f"{size(plan.free)} free: base about {size(plan.base)}, pool {size(plan.pool)} ({plan.pool // plan.block} "
        f"pages of {size(plan.block)}), steps {size(plan.step)}{graphs}, host cache {size(plan.host_cache)}, "
        f"swap {size(plan.swap)}; adapters of rank {rank} "
        f"({size(packed)}): {fit} in an empty pool, {plan.host_cache // packed} on the host"
    )
    if problem := plan.too_large() or pool_too_small(plan.pool, plan.block):
        return Check("fail", text, problem)
    if warning := plan.warning():
        return Check("warn", text, warning)
    if fit < 1:
        return Check("warn", text, f"not even one adapter of rank {rank} fits in the pool: a larger --pool-bytes")
    return Check("ok", text)


def needed_bytes(settings: ServerSettings) -> int:
    """Return the bytes that a server needs at least: base, pool and steps.

    Raises:
        LorasrvError: the base does not exist or is not supported.
    """
    from lorasrv.engine.memory_plan import MemoryPlan
    from lorasrv.worker.device import resolve_device

    config, device = fitted(settings).engine_config(), resolve_device(settings.device)
    return MemoryPlan.of(config, _shape(settings.model).spec, _quantization(settings), device).needed


def store(settings: ServerSettings) -> Check:
    """Check that the store's folder and index are usable and private, and whether a server uses the store."""
    root = settings.store.expanduser()
    if not root.exists():
        above = next(path for path in root.absolute().parents if path.exists())
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
            return Check("ok", f"{root} does not exist yet; serve creates it")
        return Check("fail", f"{root} cannot be created: {above} is not writable", "another --store")
    if not root.is_dir() or not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return Check("fail", f"{root} is not a writable folder", "chown it, or another --store")
    if _is_locked(root):
        answers = _describe_server(settings)
        who = f"the server at {_url(settings)}" if answers else "a server or a command"
        fix = "" if answers else "stop it before serve starts, or give another --store"
        return Check("ok" if answers else "warn", f"{root} is in use by {who}", fix)
    try:
        with opening_errors(root):
            check_index(root / "index.sqlite3")
    except AdapterError as error:
        return Check("fail", str(error), "another --store, or put back a copy of this one")
    if _others_may_read(root):
        return Check("warn", f"{root} is readable by other users", f"chmod 700 {root}")
    return Check("ok", f"{root}, private and not in use")


def disk(settings: ServerSettings, rank: int) -> Check:
    """Check the disk space for adapters."""
    root = settings.store.expanduser().absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(there).free
    quota = None if settings.store_bytes is None else int(settings.store_bytes)
    text = f"{size(free)} free for the store"
    try:
        file_bytes = _adapter_weights(_shape(settings.model), rank) * 4
        room = min(free, quota) if quota is not None else free
        text += f": {room // file_bytes} adapters of rank {rank} in float32 ({size(file_bytes)})"
    except LorasrvError:
        pass
    text += f", {size(quota)} allowed by --store-bytes" if quota is not None else ""
    if free < PROBE_BYTES:
        return Check("fail", text, "free some space: uploads would be refused")
    return Check("warn", text, "make room") if free < LITTLE_DISK else Check("ok", text)


def port(settings: ServerSettings) -> Check:
    """Check that the address is free, or report its user, and that serve would not refuse it for lack of an API key."""
    from api.server import check_guarded, key_command

    place = f"{settings.host}:{settings.port}"
    try:
        check_guarded(settings)
    except ConfigError as error:
        return Check("fail", str(error), f"{key_command(settings)} --scope admin")
    except AdapterError as error:
        return Check("fail", str(error), "another --store")
    try:
        _try_address(settings)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return Check("fail", f"{place}: {error.strerror or error}", "another --host or --port")
        if (about := _describe_server(settings)) is not None:
            if _is_locked(settings.store.expanduser()):
                return Check("ok", f"{place}: {about}")
            return Check("fail", f"{place} is in use by another lorasrv: {about}", _OTHER_PORT)
        return Check("fail", f"{place} is in use by another program", _OTHER_PORT)
    return Check("ok", f"{place} is free")


# Shared helpers.
@cache
def _shape(name: str) -> "ModelShape":
    from lorasrv.models.loader.locate import read_model_shape

    return read_model_shape(name)


def _base(settings: ServerSettings) -> "ModelShape":
    """Return the base's shape; if its files are here, check that the checkpoint can be opened and has a tokenizer.

    Raises:
        LorasrvError: the base does not exist or is not supported.
    """
    from lorasrv.text.tokenizer import Tokenizer

    shape = _shape(settings.model)
    with _checkpoint(settings) as checkpoint:
        if checkpoint is not None:
            Tokenizer.from_source(checkpoint.tokenizer_source())
    return shape


@contextmanager
def _checkpoint(settings: ServerSettings) -> "Iterator[Checkpoint | None]":
    """Open the base's checkpoint; None if its files are not here yet.

    Raises:
        CorruptModel, UnsupportedFormat: the weights cannot be served.
    """
    from lorasrv.models.loader import open_checkpoint
    from lorasrv.models.loader.locate import locate

    try:
        path, _ = locate(settings.model, download=False)
    except ModelNotFound:
        yield None
        return
    with closing(open_checkpoint(str(path), settings.load_format, settings.quantized_weights)) as checkpoint:
        yield checkpoint


def _quantization(settings: ServerSettings) -> str:
    """Return the weight format that serve will choose; int8 if the weights are not here yet.

    Raises:
        CorruptModel, UnsupportedFormat: the weights cannot be served, or the format or group is unknown; the error
            names the choices.
    """
    from lorasrv.models.quantization import StoredWeights, find_format, select_format

    if settings.quantization != "auto":
        return find_format(settings.quantization, settings.quantization_group).name
    with _checkpoint(settings) as checkpoint:
        return "int8" if checkpoint is None else select_format(StoredWeights.of(checkpoint))[0]


def _adapter(settings: ServerSettings, whole: "ModelSpec", rank: int) -> tuple[int, int]:
    """Return the pages and packed bytes of an adapter of this rank on every linear, in the default form."""
    from adapter_store.spec import INT8
    from lorasrv.distributed.partition import Partition
    from lorasrv.distributed.rank_spec import RankSpec, pool_widths
    from lorasrv.models.lora_sites import full_layout
    from sgmv_kernels.formats.adapter_panels import CODE_BYTES
    from sgmv_kernels.formats.kv_format import get_kv_format

    spec = pool_widths(RankSpec.all_of(whole, Partition.of(settings.engine_config().partition)))
    plain = 4 if settings.dtype == "float32" else 2
    itemsize = CODE_BYTES if settings.adapter_storage == INT8 else plain
    kv_format = get_kv_format(settings.kv_cache_dtype, settings.dtype)
    page = kv_format.page_bytes(spec.num_kv_heads, spec.head_dim, PAGE_SIZE_TOKENS)
    layout = full_layout(spec, rank, itemsize)
    return layout.num_pages(page), layout.nbytes


def _adapter_weights(shape: "ModelShape", rank: int) -> int:
    """Count the weights of an adapter of this rank on every linear."""
    spec = shape.spec
    sites = (site for layer in range(spec.num_layers) for site in spec.sites_of(layer))
    return rank * sum(site.in_features + out for site in sites for out in site.out_features)


def _is_locked(root: Path) -> bool:
    """Return whether a server uses the store: try its lock, without creating anything."""
    try:
        fd = os.open(root / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _others_may_read(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def _url(settings: ServerSettings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _try_address(settings: ServerSettings) -> None:
    """Bind the address as serve would, and release it.

    Raises: OSError.
    """
    found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)


def _describe_server(settings: ServerSettings) -> str | None:
    """Describe the lorasrv server that responds at the address, if there is one."""
    from api.cli.common.options import client_key
    from api.client import Client, Refused, ServerUnreachable

    url = _url(settings)
    try:
        with Client(url, settings.secret_key or client_key(url), wait_s=ASK_S) as client:
            about = client.get("/info")
    except Refused as error:
        return "a lorasrv server that requires another key" if error.error.get("code") in _OF_KEYS else None
    except ServerUnreachable:
        return None
    return f"lorasrv {about['version']} answers, with {about['model_id']}" if about.get("router") == "lorasrv" else None
