"""`serve --profile FILE`: where the time of a server went, as JSON, written when it ends."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorasrv.errors import ConfigError

if TYPE_CHECKING:
    from lorasrv.step_profile import StepProfile

logger = logging.getLogger(__name__)
ENGINE, LOOP = "engine", "event loop"


def check_profile_path(path: Path | None) -> None:
    """Raises: ConfigError: the file cannot be written; to be told before a model is loaded."""
    if path is None:
        return
    try:
        with path.expanduser().open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be written: {error.strerror or error}") from None


@contextmanager
def profile_written(path: Path | None, profile: "StepProfile") -> Iterator[None]:
    """Write the file when what is inside ends; what is inside runs the event loop in this thread."""
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
            logger.error("--profile %s could not be written: %s", path, error.strerror or error)


def describe(profile: "StepProfile", wall_s: float, loop_s: float) -> dict[str, Any]:
    """Seconds by part and thread. `http` is what the event loop's thread computed beside making text of tokens."""
    seconds = profile.seconds()
    loop = {"detokenizing": seconds.pop("detokenizing", 0.0)}
    loop["http"] = max(0.0, loop_s - loop["detokenizing"])
    steps = max(1, profile.steps)
    return {
        "wall_s": round(wall_s, 3),
        "steps": profile.steps,
        "rows": profile.rows,
        "seconds": {
            ENGINE: {part: round(spent, 4) for part, spent in seconds.items()},
            LOOP: {part: round(spent, 4) for part, spent in loop.items()},
        },
        "ms_a_step": {part: round(1e3 * spent / steps, 3) for part, spent in (seconds | loop).items()},
    }
