"""At the end of `serve --profile FILE`, write how the server's time was spent, by part and thread, as JSON."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lorasrv.errors import ConfigError
from lorasrv.metrics.step_stats import StepProfile

_LOG = logging.getLogger(__name__)
ENGINE, LOOP = "engine", "event loop"


def check_profile_path(path: Path | None) -> None:
    """Check that the file can be written, before a model is loaded.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    try:
        with path.expanduser().open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be written: {error.strerror or error}") from None


@contextmanager
def profile_written(path: Path | None, profile: StepProfile) -> Iterator[None]:
    """Write the file at the end of the block, which runs the event loop in this thread."""
    if path is None:
        yield
        return
    assert threading.current_thread() is threading.main_thread()
    begun, loop_s = time.monotonic(), time.thread_time()
    try:
        yield
    finally:
        whole = describe(profile, time.monotonic() - begun, time.thread_time() - loop_s)
        try:
            path.expanduser().write_text(json.dumps(whole, indent=1) + "\n")
        except OSError as error:
            _LOG.error("--profile %s could not be written: %s", path, error.strerror or error)


def describe(profile: StepProfile, wall_s: float, loop_s: float) -> dict[str, Any]:
    """Return seconds by part and thread; the time of kernels is what the engine's thread spent on them.

    In the event loop's thread, `outputs` is the time for turning tokens into text and writing it to streams, and `http`
    the rest of its CPU time.
    """
    seconds = profile.seconds()
    loop = {"outputs": seconds.pop("outputs", 0.0)}
    loop["http"] = max(0.0, loop_s - loop["outputs"])
    steps = max(1, profile.steps)
    return {
        "wall_s": round(wall_s, 3),
        "steps": profile.steps,
        "rows": profile.rows,
        "steps_ahead": profile.gaps,
        "ms_between_passes": round(1e3 * profile.gap_s / profile.gaps, 3) if profile.gaps else None,
        "seconds": {
            ENGINE: {part: round(spent, 4) for part, spent in seconds.items()},
            LOOP: {part: round(spent, 4) for part, spent in loop.items()},
        },
        "ms_a_step": {part: round(1e3 * spent / steps, 3) for part, spent in (seconds | loop).items()},
    }
