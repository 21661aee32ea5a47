"""Processes of ranks: none is left behind."""

import os
import signal
import subprocess
import sys

import pytest

from lorasrv.distributed import rank0
from lorasrv.distributed.rank0 import ProcessLauncher


def test_a_stopped_rank_is_killed_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(rank0, "end_process", ended.append)
    launcher = ProcessLauncher()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        launcher._processes.append(process)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            launcher._end("rank 1 has not answered")
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()
    assert ended == ["rank 1 has not answered"]
    launcher.stop()
