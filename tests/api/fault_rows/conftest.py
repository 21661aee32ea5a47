"""Flags of the process that most rows are about."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def flags(model: Path) -> tuple[object, ...]:
    """Of `lorasrv serve` for the tiny llama, which is called `tiny`."""
    return ("--model", model, "--served-model-name", "tiny", "--pool-bytes", "16MiB", "--kernels", "torch")
