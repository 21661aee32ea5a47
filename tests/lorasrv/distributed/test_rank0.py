"""Processes of ranks: none is left behind, and their end is told by name."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from partitions import SHORT, ranks, replica
from process_tree import descendants
from rank_threads import ThreadLauncher
from tiny_engine import GREEDY, LONG, engine_config

from lorasrv.distributed import pulse, rank_start
from lorasrv.distributed import torch_comm as torch_comm_module
from lorasrv.distributed.comm import Comm
from lorasrv.distributed.frames import Frame, LinkClosed
from lorasrv.distributed.pulse import PulseMonitor
from lorasrv.distributed.rank0 import ProcessLauncher
from lorasrv.distributed.rank_links import RankSockets
from lorasrv.distributed.rank_start import RankSetup, torch_comm
from lorasrv.distributed.rank_worker import RankWorker
from lorasrv.errors import ConfigError, EngineDead, NotEnoughMemory
from lorasrv.llm import LLM

PATIENCE_S = 40.0
"""What would be waited for in vain."""


def test_a_rank_beats_before_torch_is_imported() -> None:
    code = "import sys; sys.modules['torch'] = None; import lorasrv.distributed.rank_process"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rank_is_in_no_terminals_group() -> None:
    """A terminal that is closed, or Ctrl-C, is for rank 0, which lets its requests end first."""
    launcher = ProcessLauncher()
    with patch("lorasrv.distributed.rank0.subprocess.Popen") as popen:
        launcher.start(1, RankSockets(*(socket.socket() for _ in range(3))))
    assert popen.call_args.kwargs["start_new_session"] is True


@pytest.mark.parametrize(("visible", "own"), [(None, "2"), ("4,5,GPU-7", "GPU-7"), ("", "")])
def test_a_rank_sees_its_own_gpu_alone(visible: str | None, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread of a process has a current device, the first one unless it chooses another."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with patch("lorasrv.distributed.rank0.subprocess.Popen") as popen:
        ProcessLauncher().start(2, RankSockets(*(socket.socket() for _ in range(3))))
    assert popen.call_args.kwargs["env"]["CUDA_VISIBLE_DEVICES"] == own


def test_ranks_listen_on_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever carries the tensors: it has no key."""
    found: dict[str, str] = {}
    for name, fake in (
        ("init_process_group", lambda *_, **__: found.update(os.environ)),
        ("new_group", lambda *_: None),
    ):
        monkeypatch.setattr(dist, name, fake)
    with patch.dict(os.environ):
        for transport in ("GLOO", "NCCL"):
            os.environ.pop(f"{transport}_SOCKET_IFNAME", None)
        for device in ("cpu", "cuda"):
            torch_comm_module.TorchComm(0, 1, torch.device(device), tmp_path / device, [])
            assert found[{"cpu": "GLOO", "cuda": "NCCL"}[device] + "_SOCKET_IFNAME"].startswith("lo")


def test_a_stopped_rank_is_killed() -> None:
    launcher = ProcessLauncher()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        launcher._processes.append(process)
        os.kill(process.pid, signal.SIGSTOP)
        folder = Path(launcher.meeting).parent
        assert folder.exists()
        try:
            launcher._kill()
            assert process.wait(10) == -signal.SIGKILL
            assert not folder.exists()
        finally:
            process.kill()
    launcher.stop()


@pytest.mark.parametrize("serves", [True, False])
def test_a_process_ends_with_a_rank_only_if_it_serves(serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its last words; the program of an `LLM` goes on."""
    monkeypatch.setattr(pulse, "LAST_WORDS_S", 0.0)
    events: list[str] = []
    own, other = socket.socketpair()
    monitor = PulseMonitor({1: own}, lambda: events.append("killed"), lambda why: events.append(f"exit: {why}"))
    if serves:
        monitor.exit_when_lost(lambda why: events.append(f"told: {why}"))
    other.close()
    assert monitor.wait_lost(30) == "rank 1 has ended"
    monitor._thread.join(30)
    own.close()
    assert events == ["killed", *(["told: rank 1 has ended", "exit: rank 1 has ended"] if serves else [])]
    if not serves:
        monitor.exit_when_lost(events.append)
        assert events == ["killed", "exit: rank 1 has ended"], "a server that was still starting"


def test_requests_of_a_program_raise_when_a_rank_has_gone(model: Path) -> None:
    def die(worker: RankWorker, frame: Frame) -> None:
        raise LinkClosed("this rank ends in a step")

    with patch.object(RankWorker, "_compute", die), replica(model, ranks("cp=2")) as llm:
        with pytest.raises(EngineDead):
            llm.generate([LONG[:20]], replace(GREEDY, max_tokens=100))
        with pytest.raises(EngineDead, match="load the model again"):
            llm.generate([LONG[:20]], SHORT)


def test_a_rank_that_ends_while_it_starts(model: Path) -> None:
    """No wrong option: a supervisor may try again."""
    died = patch.object(rank_start, "_load", side_effect=LinkClosed("this rank ends"))
    with died, pytest.raises(EngineDead, match="rank 1 has ended while it was starting"), replica(model, ranks("0;1")):
        pass


@pytest.mark.parametrize("error", [NotEnoughMemory, torch.OutOfMemoryError])
def test_a_rank_that_cannot_meet_the_others_says_why(error: type[Exception], model: Path) -> None:
    """Rank 2 lives and reports, while all others wait for it."""
    given_up = threading.Event()

    def meet(launcher: ThreadLauncher, setup: RankSetup) -> Comm:
        if setup.rank == 2:
            raise error("no memory for the meeting")
        given_up.wait(PATIENCE_S)
        raise LinkClosed("nobody came")

    with (
        patch.object(ThreadLauncher, "comm", meet),
        patch.object(ThreadLauncher, "stop", lambda _: given_up.set()),
        pytest.raises(NotEnoughMemory, match=r"^rank 2: no memory"),
        replica(model, ranks("cp=3")),
    ):
        pass


def test_a_rank_that_is_killed_in_the_meeting(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself would wait for two minutes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    meeting = ProcessLauncher.meeting

    def stop_others(launcher: ProcessLauncher) -> str:
        os.kill(launcher._processes[0].pid, signal.SIGSTOP)
        return str(meeting.fget(launcher))  # type: ignore[attr-defined]

    def meet(launcher: ProcessLauncher, setup: RankSetup) -> Comm:
        launcher._processes[0].kill()
        return torch_comm(setup, str(meeting.fget(launcher)))  # type: ignore[attr-defined]

    monkeypatch.setattr(ProcessLauncher, "meeting", property(stop_others))
    monkeypatch.setattr(ProcessLauncher, "comm", meet)
    config = replace(engine_config(model, quantization="int8", kernels="numba"), partition=ranks("cp=2"))
    with (
        patch.object(torch_comm_module, "TIMEOUT_S", PATIENCE_S),
        pytest.raises(EngineDead, match=r"^rank 1 has ended, killed by SIGKILL"),
    ):
        LLM(str(model), config)
    assert not descendants(os.getpid())
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    with LLM(str(model), config) as llm:
        assert llm.generate([LONG[:20]], SHORT)


def test_a_second_group_of_a_process_is_refused_at_once(model: Path) -> None:
    config = replace(engine_config(model, quantization="int8", kernels="numba"), partition=ranks("0&1"))
    with patch.object(dist, "is_initialized", lambda: True), pytest.raises(ConfigError, match=r"torch\.distributed"):
        LLM(str(model), config)
    assert not descendants(os.getpid())


@pytest.mark.slow
def test_a_killed_process_of_a_program(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program goes on and may load the model again; no process is left, and no folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = replace(engine_config(model, quantization="int8", kernels="numba"), partition=ranks("0&1"))
    for _ in range(2):
        with LLM(str(model), config) as llm:
            said = llm.generate([LONG[:20]], SHORT)[0].token_ids
            with pytest.raises(ConfigError, match="close that"):
                LLM(str(model), config)
            assert not list(tmp_path.glob("lorasrv-ranks-*"))
            (rank,) = descendants(os.getpid())
            os.kill(rank, signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(EngineDead, match="rank 1 has ended"):
                    llm.generate([LONG[:20]], SHORT)
        assert len(said) == SHORT.max_tokens
        assert not descendants(os.getpid())
