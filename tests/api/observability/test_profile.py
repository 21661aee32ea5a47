"""`serve --profile`: parts add up, and a file that cannot be written is told before anything is loaded."""

import json
from pathlib import Path

import pytest

from api.observability.profile import check_profile_path, describe, profile_written
from lorasrv.errors import ConfigError
from lorasrv.metrics.step_stats import StepProfile


def profile() -> StepProfile:
    counted = StepProfile()
    counted.steps, counted.rows = 4, 10
    counted.add("scheduling", 0.5)
    counted.add_kernels(2.0, {"linear": 1.0, "sgmv": 0.75})
    counted.add("outputs", 0.25)
    counted.gaps, counted.gap_s = 2, 0.006
    return counted


def test_parts_add_up() -> None:
    parts = {"linear": 1.0, "sgmv": 0.75, "scheduling": 0.5, "forward": 0.25, "outputs": 0.25}
    assert profile().seconds() == parts
    told = describe(profile(), 9.0, 1.0)
    assert (told["steps"], told["rows"], told["wall_s"]) == (4, 10, 9.0)
    assert told["seconds"]["event loop"] == {"outputs": 0.25, "http": 0.75}
    assert sum(told["seconds"]["engine"].values()) == 2.5
    assert told["ms_a_step"]["linear"] == 250.0
    assert (told["steps_ahead"], told["ms_between_passes"]) == (2, 3.0)


def test_of_a_pass_only_what_the_engines_thread_has_seen_counts() -> None:
    """Others go on with it while that plans the next step."""
    counted = StepProfile()
    counted.add_kernels(1.0, {"linear": 1.5, "sgmv": 0.5})
    assert counted.seconds() == {"linear": 0.75, "sgmv": 0.25, "forward": 0.0}
    assert describe(counted, 9.0, 1.0)["ms_between_passes"] is None


def test_a_span_counts_what_is_done_inside_even_if_it_fails() -> None:
    counted = StepProfile()
    with pytest.raises(RuntimeError), counted.span("pages"):
        raise RuntimeError
    assert counted.seconds()["pages"] > 0


def test_the_file_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(KeyboardInterrupt), profile_written(path, profile()):
        raise KeyboardInterrupt
    assert json.loads(path.read_text())["steps"] == 4
    with profile_written(None, profile()):
        pass


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--profile .* cannot be written"):
        check_profile_path(tmp_path)
    check_profile_path(None)
    with pytest.raises(KeyboardInterrupt), profile_written(tmp_path, profile()):
        raise KeyboardInterrupt
