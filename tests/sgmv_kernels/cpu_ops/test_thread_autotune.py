"""How many threads: fewer only for a gain, measured once."""

import json
from pathlib import Path

import pytest

from sgmv_kernels.cpu_ops import thread_autotune as team_probe
from sgmv_kernels.cpu_ops.thread_autotune import best_threads, choose
from sgmv_kernels.cpu_runtime import measurements


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({8: 1.0, 4: 1.0, 2: 1.0, 1: 1.0}, 8),
        ({8: 1.0, 4: 0.9, 2: 0.88, 1: 0.87}, 8),
        ({8: 1.0, 4: 0.7, 2: 0.69, 1: 2.0}, 4),
        ({8: 4.0, 4: 3.0, 2: 2.0, 1: 1.0}, 1),
        ({6: 1.0, 3: 0.5, 1: 0.4}, 1),
    ],
)
def test_fewer_threads_only_for_a_gain(seconds: dict[int, float], chosen: int) -> None:
    assert choose(max(seconds), seconds.__getitem__) == chosen


def test_measured_once_and_not_against_the_users_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(measurements, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(team_probe, "_probe", lambda: lambda count: asked.append(count) or float(count))
    assert [best_threads(8), best_threads(8), asked] == [1, 1, [8, 4, 2, 1] * 2]
    assert best_threads(6) == 1
    assert json.loads((tmp_path / team_probe.FILE).read_text()) == {"8": 1, "6": 1}
    (tmp_path / team_probe.FILE).write_text('{"8": 9}')
    assert best_threads(8) == 1
    count = len(asked)
    assert [best_threads(few) for few in (1, 2, 4)] == [1, 2, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert [best_threads(8), len(asked)] == [8, count]


def test_what_a_busy_machine_says_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 0.5, 0.6, 0.9, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(measurements, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(team_probe, "_probe", lambda: lambda count: next(seconds))
    assert best_threads(8) == 8
    assert not (tmp_path / team_probe.FILE).exists()
