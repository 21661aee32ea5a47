"""The first start on a machine: kernels are compiled by other processes and kept, by two servers at the same time."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served import LORASRV, ROOT

from sgmv_kernels.cpu_runtime.kernel_names import common_kernels, further_kernels

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@contextmanager
def _started(model: Path, folder: Path, name: str) -> Iterator["subprocess.Popen[str]"]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}
    flags = ("--model", model, "--pool-bytes", "16MiB", "--port", 0, "--store", folder / name)
    with (folder / f"{name}.log").open("w") as log:
        command = [*LORASRV, "serve", *map(str, flags)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def test_two_first_starts_at_once(model: Path, tmp_path: Path) -> None:
    with _started(model, tmp_path, "one") as one, _started(model, tmp_path, "two") as two:
        for process in (one, two):
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready: ")
            # Numba's own libraries are mapped for good in a process that has imported it.
            assert "/numba/" not in Path(f"/proc/{process.pid}/maps").read_text()
            if process is one:
                # Others are compiled when one is needed, or in the background, half a minute later.
                [kept] = (tmp_path / "lorasrv" / "kernels").iterdir()
                files = sorted(path.name for path in kept.iterdir() if path.suffix != ".json")
        assert files == sorted(".".join(kernel) for kernel in common_kernels("bfloat16", "bfloat16"))
    logs = [(tmp_path / f"{name}.log").read_text() for name in ("one", "two")]
    # How many are left when torch is imported depends on the machine.
    assert all(re.search(r"compiling \d+ kernels, once on this machine done", log) for log in logs), logs
    assert not any("in this process" in log or "plain torch" in log for log in logs), logs


@pytest.mark.exhaustive
def test_a_running_server_compiles_what_few_models_need(model: Path, tmp_path: Path) -> None:
    """Half a minute after its start."""
    with _started(model, tmp_path, "one") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready: ")
        [kept] = (tmp_path / "lorasrv" / "kernels").iterdir()
        wanted = set(map(".".join, further_kernels("bfloat16", "bfloat16")))
        deadline = time.monotonic() + 300
        while not wanted <= {path.name for path in kept.iterdir()}:
            assert time.monotonic() < deadline, "they are not compiled"
            time.sleep(0.1)
