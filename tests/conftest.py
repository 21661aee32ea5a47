"""Seeds and tolerances for every test."""

import pytest
import torch

TOLERANCES = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tolerances() -> dict[torch.dtype, dict[str, float]]:
    """The one table: how far a result may be from its fp32 reference, by the dtype that weights are stored in."""
    return TOLERANCES
