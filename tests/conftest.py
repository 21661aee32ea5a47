"""Seeds, tolerances and signals for every test; Triton's interpreter where there is no GPU."""

import os
import signal
import threading

import pytest
from hypothesis import HealthCheck, settings

# Tests share processors with each other and with the servers that they start: a thread of a parallel region that waits
# spinning takes time from all. OpenMP reads this when torch loads it. Two test processes on two cores: half the time.
# A server that finds it unset lets its threads spin, whatever OMP_WAIT_POLICY says: up to three times the CPU time.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from quick_interpreter import install_where_imported

# How fast an example runs says nothing about the code where others use the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if not torch.cuda.is_available():
    # Triton reads it once, when it is imported: by peft, if not by the kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    # Started in the background by a shell: what is interrupted in tests, and what they start, would never hear of it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Of what `make test-published` downloads; collected only if named.
collect_ignore = ["published"]

TOLERANCES = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _quick_interpreter() -> None:
    install_where_imported()


@pytest.fixture
def codes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears have no bf16 copy, as on processors that do not multiply bf16."""
    from sgmv_kernels.cpu_ops import backend as backend_numba

    monkeypatch.setattr(backend_numba, "wide_rows", lambda: None)


@pytest.fixture(scope="session")
def tolerances() -> dict[torch.dtype, dict[str, float]]:
    """The one table: how far a result may be from its fp32 reference, by the dtype that weights are stored in."""
    return TOLERANCES
