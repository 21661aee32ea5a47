"""Engines of these tests compute in one thread."""

from collections.abc import Iterator

import pytest

from lorasrv.worker.device import compute_alone, compute_in_parallel


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """So small a model gains nothing from a team of threads."""
    compute_alone()
    yield
    compute_in_parallel()
