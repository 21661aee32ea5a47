"""Start a rank other than 0: load its part of the weights, make its part of the pool, serve."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from lorasrv.config import PAGE_SIZE_TOKENS, ModelOptions, PartitionOptions
from lorasrv.distributed.comm import Comm
from lorasrv.distributed.frames import Frame, Link, LinkClosed
from lorasrv.distributed.part_checkpoint import PartCheckpoint
from lorasrv.distributed.partition import Partition
from lorasrv.distributed.rank_exchange import make_exchange
from lorasrv.distributed.rank_links import DONE, LOADED, MEMORY, PROGRESS, STOP, RankSockets, failure
from lorasrv.distributed.rank_spec import RankSpec
from lorasrv.distributed.rank_worker import RankModel, RankWorker
from lorasrv.distributed.torch_comm import TorchComm
from lorasrv.errors import LorasrvError, ModelError, NotEnoughMemory
from lorasrv.models.loader import open_checkpoint
from lorasrv.worker.base_format import choose_format, make_ops
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device import DeviceMemory, activation_dtype, resolve_device
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.weights import ModelWeights, load_weights
from sgmv_kernels.formats.kv_format import KVFormat, get_kv_format
from sgmv_kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Hold what rank 0 tells a rank before it loads."""

    rank: int
    specs: tuple[RankSpec, ...]
    model: ModelOptions
    device: torch.device
    kv_format: KVFormat

    @property
    def spec(self) -> RankSpec:
        """Return the spec of the rank's part."""
        return self.specs[self.rank]


MakeComm = Callable[[RankSetup, str], Comm]
"""Make a rank's comm; the text is the path at which the ranks meet."""


def torch_comm(setup: RankSetup, meeting: str) -> Comm:
    """Return the comm of a process."""
    parts = [spec.part for spec in setup.specs]
    groups = sorted({ranks for part in parts for ranks in (part.stage_ranks, part.row_ranks) if len(ranks) > 1})
    return TorchComm(setup.rank, len(setup.specs), setup.device, Path(meeting), groups)


def run_rank(sockets: RankSockets, make_comm: MakeComm) -> bool:
    """Execute rank 0's orders until it stops the rank; return whether the rank could start.

    Raises:
        Exception: a step failed, or rank 0 has ended.
    """
    orders, bulk = Link(sockets.orders), Link(sockets.bulk)
    try:
        setup, weights, ops = _load(orders)
        pool = orders.receive()
        if pool.kind == STOP:
            return False
        comm = make_comm(setup, pool.fields["meeting"])
        worker = RankWorker(_make_model(setup, weights, ops, comm, pool.fields))
    except (LorasrvError, MemoryError, torch.OutOfMemoryError) as error:
        _report(orders, error)
        return False
    loader = threading.Thread(target=worker.serve_bulk, args=(bulk,), name=f"rank-{setup.rank}-bulk", daemon=True)
    loader.start()
    orders.send(Frame(DONE))
    try:
        worker.serve(orders)
    finally:
        bulk.close()
        loader.join()
        comm.close()
    return True


def start_fields(rank: int, partition: PartitionOptions, model: ModelOptions, kv: str, threads: int) -> dict[str, Any]:
    """Return the contents of a `RankSetup` as plain data."""
    options = {name: getattr(model, name) for name in ModelOptions.__dataclass_fields__}
    file = model.quantized_weights
    return {
        "rank": rank,
        "partition": {name: getattr(partition, name) for name in PartitionOptions.__dataclass_fields__},
        "model": options | {"quantized_weights": None if file is None else str(file)},
        "kv_cache_dtype": kv,
        "threads": threads,
    }


def _report(orders: Link, error: Exception) -> None:
    """Tell rank 0 why this rank cannot start, and wait until it has read the reason. Rank 0 may be listening to another
    rank now, and would notice the end of this one first."""
    kinds = {ModelError: "model", NotEnoughMemory: MEMORY, MemoryError: MEMORY, torch.OutOfMemoryError: MEMORY}
    kind = next((name for type_, name in kinds.items() if isinstance(error, type_)), "config")
    with contextlib.suppress(LinkClosed):
        orders.send(failure(error, kind))
        while orders.receive().kind != STOP:
            pass


def _load(orders: Link) -> tuple[RankSetup, ModelWeights, Ops]:
    """Load the rank's part, and report the progress to rank 0.

    Raises:
        LorasrvError, MemoryError: it cannot be loaded.
    """
    fields = orders.receive().fields
    torch.set_num_threads(fields["threads"])
    file = fields["model"]["quantized_weights"]
    options = ModelOptions(**fields["model"] | {"quantized_weights": None if file is None else Path(file)})
    device = resolve_device(options.device)
    checkpoint = open_checkpoint(options.model, options.load_format, options.quantized_weights)
    try:
        whole, dtype = checkpoint.spec, getattr(torch, options.dtype)
        specs = RankSpec.all_of(whole, Partition.of(PartitionOptions(**fields["partition"])))
        kv_format = get_kv_format(fields["kv_cache_dtype"], options.dtype)
        setup = RankSetup(fields["rank"], specs, options, device, kv_format)
        ops = make_ops(options, whole, device)
        ops.warm_up(dtype, kv_format, lambda what, done: None)
        fmt = choose_format(options, checkpoint, ops)

        def progress(what: str, done: float) -> None:
            orders.send(Frame(PROGRESS, {"what": what, "done": done}))

        part = PartCheckpoint(checkpoint, setup.spec)
        weights = load_weights(part, fmt, dtype, progress=progress, device=device)
    finally:
        checkpoint.close()
    facts = {"weight_bytes": weights.nbytes, "fingerprint": weights.fingerprint}
    facts |= {"codes": [weights.kept_codes, weights.remade_codes], "memory": astuple(DeviceMemory.of(device))}
    orders.send(Frame(LOADED, facts))
    return setup, weights, ops


def _make_model(setup: RankSetup, weights: ModelWeights, ops: Ops, comm: Comm, pool: Mapping[str, Any]) -> RankModel:
    """Make the rank's pool and decoder."""
    dtype = getattr(torch, setup.model.dtype)
    activation = activation_dtype(setup.device, dtype)
    memory = DevicePool(
        setup.spec,
        pool["num_pages"],
        PAGE_SIZE_TOKENS,
        setup.kv_format,
        setup.device,
        page_bytes=pool["page_bytes"],
    )
    limits = DecoderLimits(pool["max_model_len"], pool["max_rows"], pool["max_samples"], dtype, activation)
    exchange = make_exchange(comm, setup.specs, activation, memory, ops)
    decoder = Decoder(weights, memory, limits, ops, exchange=exchange)
    return RankModel(setup.spec, weights, memory, decoder, limits, ops, exchange)
