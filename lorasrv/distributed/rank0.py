"""Rank 0 of a partition: starts the other ranks, and provides what the factory needs from them."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from lorasrv.config import PAGE_SIZE_TOKENS, EngineConfig
from lorasrv.distributed.comm import Comm
from lorasrv.distributed.frames import Frame, LinkClosed
from lorasrv.distributed.partition import MAX_RANKS, Partition
from lorasrv.distributed.pulse import PulseMonitor
from lorasrv.distributed.rank_exchange import RankExchange, make_exchange
from lorasrv.distributed.rank_links import POOL, START, RankFailed, RankLinks, RankOutOfMemory, RankSockets
from lorasrv.distributed.rank_spec import RankSpec, pool_widths
from lorasrv.distributed.rank_start import RankSetup, start_fields, torch_comm
from lorasrv.distributed.rank_worker import WARM_UP
from lorasrv.distributed.step_frames import encode_moves
from lorasrv.errors import ConfigError, EngineDead, NotEnoughMemory
from lorasrv.models.spec import ModelSpec
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device import ENGINE_THREADS, DeviceMemory
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.ops import Ops

STOP_S = 10.0
REAPED_S = 1.0
"""Longest wait, in seconds, for the exit status of a process whose connections have closed."""
T = TypeVar("T")
_DRAFTING = ("draft_model", "draft_layers", "draft_heads")


class RankLauncher(Protocol):
    """Start ranks; `ProcessLauncher`, or threads in tests."""

    def start(self, rank: int, sockets: RankSockets) -> None:
        """Start a rank, which gets these ends of the connections."""

    def comm(self, setup: RankSetup) -> Comm:
        """Return rank 0's comm, once all ranks create theirs."""

    @property
    def meeting(self) -> str:
        """Return the path at which the ranks meet."""

    def forget_meeting(self) -> None:
        """Free the resources of the meeting, once all ranks have met."""

    def watch(self, sockets: Sequence[RankSockets]) -> PulseMonitor:
        """Return the monitor of the ranks' pulses."""

    def stop(self) -> None:
        """Wait until the ranks have ended, and free the resources of their start."""


class ProcessLauncher:
    """Run each rank in a process of this machine.

    Raises:
        ConfigError: this process already has a group of torch.distributed, and it can have only one.
    """

    def __init__(self) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "this process has a default group of torch.distributed already: its own, or that of another model in "
                "several processes; close that, or load this one in a process of its own"
            )
        self._folder: Path | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def meeting(self) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="lorasrv-ranks-"))
        return str(self._folder / "meeting")

    def start(self, rank: int, sockets: RankSockets) -> None:
        fds = [connection.fileno() for connection in (sockets.orders, sockets.bulk, sockets.pulse)]
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "lorasrv.distributed.rank_process", *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                # Only rank 0 gets a terminal's signals: it ends the ranks when its requests are done.
                start_new_session=True,
                env=os.environ
                | {
                    "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "30000"),
                    "CUDA_VISIBLE_DEVICES": gpu_of(rank),
                },
            )
        )
        sockets.close()

    def comm(self, setup: RankSetup) -> Comm:
        return torch_comm(setup, self.meeting)

    def watch(self, sockets: Sequence[RankSockets]) -> PulseMonitor:
        return PulseMonitor({rank: one.pulse for rank, one in enumerate(sockets, 1)}, self._kill, how=self._how)

    def forget_meeting(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _how(self, rank: int) -> str:
        """Return how a rank has ended."""
        try:
            code = self._processes[rank - 1].wait(REAPED_S)
        except subprocess.TimeoutExpired:
            return ""
        if code < 0:
            return f", killed by {signal.Signals(-code).name}"
        return f" with code {code}; its own lines on stderr say why"

    def _kill(self) -> None:
        # A stopped process would not notice that rank 0 has ended.
        for process in self._processes:
            process.kill()
        self.forget_meeting()

    def stop(self) -> None:
        deadline = time.monotonic() + STOP_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.forget_meeting()


def gpu_of(rank: int) -> str:
    """Return a CUDA_VISIBLE_DEVICES with which a rank sees only its own GPU, out of those that this process sees.

    It is then the current device of every thread. Otherwise a thread would begin with the first GPU, and launch the
    kernels of loads there.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(MAX_RANKS))) if visible is None else visible.split(",")
    return "".join(names[rank : rank + 1])


@dataclass(frozen=True, slots=True)
class LoadedRanks:
    """Hold what ranks 1 and up have loaded; empty if there is only rank 0."""

    weight_bytes: tuple[int, ...] = ()
    # What they have now.
    memory: tuple[DeviceMemory, ...] = ()
    fingerprints: tuple[str, ...] = ()
    # Linears kept as the file's codes, and linears made from dequantized ones; each counted once, without rank 0's.
    kept_codes: int = 0
    remade_codes: int = 0

    def join(self, own: ModelWeights) -> ModelWeights:
        """Return rank 0's weights with the fingerprint and the counts of all ranks."""
        if not self.fingerprints:
            return own
        known = hashlib.sha256("".join((repr(own.spec), own.fingerprint, *self.fingerprints)).encode())
        kept, remade = own.kept_codes + self.kept_codes, own.remade_codes + self.remade_codes
        return replace(own, fingerprint=known.hexdigest(), kept_codes=kept, remade_codes=remade)


class Ranks:
    """Hold the ranks of a partition, from their start to their end.

    Args:
        whole: spec of the whole model.
        launch: creates the launcher of the ranks.
    Raises:
        ConfigError: an option is not possible with a partition, or the model cannot be divided this way.
    """

    def __init__(
        self,
        config: EngineConfig,
        whole: ModelSpec,
        device: torch.device,
        kv_format: KVFormat,
        launch: Callable[[], RankLauncher],
    ) -> None:
        self.partition = Partition.of(config.partition)
        check_options(config, self.partition, device)
        self.specs = RankSpec.all_of(whole, self.partition)
        self.pool_spec = pool_widths(self.specs)
        self._setup = RankSetup(0, self.specs, config.model, device, kv_format)
        launcher = self._launcher = launch()
        self._comm: Comm | None = None
        self._exchange: RankExchange | None = None
        ends = [RankSockets.pair() for _ in self.specs[1:]]
        self.links = RankLinks([own for own, _ in ends], launcher.watch([own for own, _ in ends]), launcher.stop)
        try:
            for rank, (_, other) in enumerate(ends, 1):
                launcher.start(rank, other)
            for rank in range(1, len(self.specs)):
                fields = start_fields(rank, config.partition, config.model, config.memory.kv_cache_dtype, self.threads)
                self.links.tell_one(rank, Frame(START, fields))
        except BaseException:
            self.links.close()
            raise

    @property
    def spec(self) -> RankSpec:
        """Return rank 0's part."""
        return self.specs[0]

    @property
    def threads(self) -> int:
        """Return the number of compute threads of each rank: those of the machine, divided among the ranks."""
        return max(1, ENGINE_THREADS // len(self.specs))

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page in one slab: for all ranks, those of the rank with the most key heads."""
        heads = max(spec.num_kv_heads for spec in self.specs)
        return self._setup.kv_format.page_bytes(heads, self.spec.head_dim, PAGE_SIZE_TOKENS)

    def block_bytes(self, rank: int) -> int:
        """Return the bytes of a page in all slabs of a rank."""
        return self.page_bytes * self.specs[rank].num_slabs

    def wait_loaded(self, progress: Callable[[str, float], None]) -> LoadedRanks:
        """Wait until the ranks have their weights.

        Raises:
            ModelError, ConfigError, NotEnoughMemory: a rank reports it.
            EngineDead: a rank has ended.
        """
        found = [frame.fields for frame in self.links.wait_loaded(progress)]
        codes = [
            fields["codes"] for spec, fields in zip(self.specs[1:], found, strict=True) if not spec.part.is_further
        ]
        return LoadedRanks(
            weight_bytes=tuple(fields["weight_bytes"] for fields in found),
            memory=tuple(DeviceMemory(*fields["memory"]) for fields in found),
            fingerprints=tuple(fields["fingerprint"] for fields in found),
            kept_codes=sum(kept for kept, _ in codes),
            remade_codes=sum(remade for _, remade in codes),
        )

    def open(self, memory: DevicePool, limits: DecoderLimits, ops: Ops) -> RankExchange:
        """Have the ranks make their pools like rank 0's, and connect to them.

        Raises:
            ConfigError, NotEnoughMemory: a rank reports it.
            EngineDead: a rank has ended.
        """
        fields = {
            "meeting": self._launcher.meeting,
            "num_pages": memory.num_pages,
            "page_bytes": self.page_bytes,
            "max_model_len": limits.max_model_len,
            "max_rows": limits.max_rows,
            "max_samples": limits.max_samples,
        }
        for rank in range(1, len(self.specs)):
            self.links.tell_one(rank, Frame(POOL, fields))
        self._comm = self.links.wait_ready(in_thread(lambda: self._launcher.comm(self._setup)))
        if not self._comm.meets_later:
            self._launcher.forget_meeting()
        tell = lambda moves: self.links.tell(encode_moves(moves))  # noqa: E731
        self._exchange = make_exchange(self._comm, self.specs, limits.activation, memory, ops, tell)
        return self._exchange

    @contextlib.contextmanager
    def warming_up(self, max_rank: int, *, has_trees: bool) -> Iterator[None]:
        """Have the other ranks warm up, each alone, while the block does the same in this one.

        Raises:
            NotEnoughMemory: a rank reports it.
            EngineDead: a rank cannot warm up, or has ended.
        """
        try:
            with self.links.asking(Frame(WARM_UP, {"max_rank": max_rank, "has_trees": has_trees})):
                yield
        except RankOutOfMemory as error:
            raise NotEnoughMemory(str(error)) from error
        except RankFailed as error:
            raise EngineDead(f"a rank cannot warm up: {error}") from error
        except LinkClosed as error:
            raise EngineDead(self.links.why_lost(error)) from error

    @property
    def exchange(self) -> RankExchange:
        """Return rank 0's exchange, once `open` has made it."""
        assert self._exchange is not None
        return self._exchange

    def close(self) -> None:
        """End the ranks."""
        self.links.close()
        if self._comm is not None:
            self._comm.close()


def in_thread(make: Callable[[], T]) -> "Future[T]":
    """Call `make` in a daemon thread, which need not be joined: torch may wait minutes for a rank that has ended."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="rank-0-meeting", daemon=True).start()
    return made


def check_options(config: EngineConfig, partition: Partition, device: torch.device) -> None:
    """Check that the options are possible with a partition.

    Raises:
        ConfigError: one is not; the message names it.
    """
    for name in _DRAFTING:
        if getattr(config.speculation, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with {partition.text}: a model that drafts runs in one "
                "process; other drafters do go"
            )
    if config.model.bf16_linears != "off":
        raise ConfigError(f"--bf16-linears {config.model.bf16_linears} does not go with {partition.text}; leave it off")
    if device.type == "cuda" and partition.num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"{partition.text} has {partition.num_ranks} ranks, but this machine has {torch.cuda.device_count()} GPUs"
        )
