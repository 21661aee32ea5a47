"""The built-in base and the three trained personas, offline and behind a real server process."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

PERSONA_BOTS = Path(__file__).parents[2] / "examples" / "persona_bots"
LORASRV = Path(sys.executable).parent / "lorasrv"


@pytest.fixture(scope="session")
def personas() -> dict[str, Path]:
    """Id -> PEFT directory of each committed persona."""
    listed = tomllib.loads((PERSONA_BOTS / "personas.toml").read_text("utf-8"))["persona"]
    return {p["id"]: PERSONA_BOTS / p["adapter"] for p in listed}


@pytest.fixture(scope="session")
def heldout() -> list[str]:
    """Questions that no persona was trained on."""
    lines = (PERSONA_BOTS / "data" / "heldout.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def run_cli(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """The `lorasrv` command in a process of its own, output as lines without colours."""
    return subprocess.run(
        [str(LORASRV), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
    )


@pytest.fixture(scope="session")
def cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    return run_cli
