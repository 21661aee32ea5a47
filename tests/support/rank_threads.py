"""Ranks of a partition as threads of this process, which exchange tensors in memory."""

import threading
from collections.abc import Sequence

from lorasrv.distributed.comm import Comm, MemoryComm
from lorasrv.distributed.frames import LinkClosed
from lorasrv.distributed.pulse import PulseMonitor
from lorasrv.distributed.rank_links import RankSockets
from lorasrv.distributed.rank_start import RankSetup, run_rank

MOST_RANKS = 4


class ThreadLauncher:
    """Start ranks as threads; see `RankLauncher`."""

    meeting = ""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._comms = MemoryComm.between(MOST_RANKS, timeout_s)
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, rank: int, sockets: RankSockets) -> None:
        thread = threading.Thread(target=self._run, args=(sockets,), name=f"rank-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def comm(self, setup: RankSetup) -> Comm:
        return self._comms[setup.rank]

    def forget_meeting(self) -> None:
        """Do nothing: the threads share their comms."""

    def watch(self, sockets: Sequence[RankSockets]) -> PulseMonitor:
        # Threads end with their sockets open.
        return PulseMonitor({}, lambda: None)

    def stop(self) -> None:
        for thread in self._threads:
            thread.join()
        assert self.errors == []

    def _run(self, sockets: RankSockets) -> None:
        try:
            run_rank(sockets, lambda setup, _: self.comm(setup))
        except LinkClosed:
            pass
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            sockets.close()
