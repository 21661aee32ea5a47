"""The share of other programs, from a file of the kernel's form."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lorasrv.offline.planner import processors
from lorasrv.offline.planner.processors import ProcessorTimes


def test_what_is_neither_idle_nor_own_is_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3})
    assert ProcessorTimes.now().others(ProcessorTimes(0.0, 0.0, 0.0)) == 0.0, "there is no such file"
    # User, nice, system, idle, waiting for a disk, two kinds of interrupts, stolen, and two that are part of user.
    used = "\n".join(f"cpu{number} 100 20 30 9000 700 2 3 45 50 10" for number in range(4))
    (tmp_path / "stat").write_text(f"cpu 400 80 120 36000 2800 8 12 180 200 40\n{used}\nintr 5 0 0\n")
    now = ProcessorTimes.now()
    assert now.all_s * os.sysconf("SC_CLK_TCK") == pytest.approx(2 * 200)
    assert ProcessorTimes(20.0, 24.0, 9.0).others(ProcessorTimes(10.0, 4.0, 1.0)) == pytest.approx(12 / 20)
    assert ProcessorTimes(20.0, 4.0, 9.0).others(ProcessorTimes(10.0, 4.0, 1.0)) == 0.0


def test_a_program_that_was_started_is_not_another_one() -> None:
    before, ended = ProcessorTimes.now(), os.times()
    while os.times().children_user == ended.children_user:
        subprocess.run([sys.executable, "-c", "sum(range(1_000_000))"], check=True)
    spent = os.times().children_user - ended.children_user
    assert ProcessorTimes.now().own_s - before.own_s > 0.99 * spent
