"""A load point as one line of JSON, and the same read back: what is printed, drawn and written into documents."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from api.bench.figures import Figures

FORMAT = 1
Result = dict[str, Any]
"""Keys: bench (the format), label, time, settings, server, machine, client, commit, command, figures, interrupted."""


class NoResults(Exception):
    """A file that does not hold lines of `lorasrv bench --json`."""


def result(label: str, figures: Figures, interrupted: bool, **surroundings: Any) -> Result:
    """`surroundings`: settings, server, machine, client, commit, command, time."""
    return {
        "bench": FORMAT,
        "label": label,
        **surroundings,
        "figures": figures.to_dict(),
        **({"interrupted": True} if interrupted else {}),
    }


def read_results(paths: Iterable[Path]) -> list[Result]:
    """All lines of all files, in order.

    Raises:
        NoResults: with file, line and what is wrong.
        OSError: a file cannot be read.
    """
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if line.strip():
                found.append(_parse(line, f"{path.name}:{number}"))
    return found


def _parse(line: str, where: str) -> Result:
    try:
        value = json.loads(line)
    except ValueError:
        raise NoResults(f"{where}: not a line of JSON") from None
    if not isinstance(value, dict) or value.get("bench") != FORMAT:
        raise NoResults(f"{where}: not a result of `lorasrv bench --json` (bench: {FORMAT})")
    missing = {"settings", "server", "machine", "figures"} - value.keys()
    if missing:
        raise NoResults(f"{where}: {', '.join(sorted(missing))} is missing")
    return value
