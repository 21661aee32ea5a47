"""Measure how long the weights of the built-in model take to load from files of other tools.

    python tests/benchmarks/bench_loading.py --runs 5

A load before the first that counts brings the file into the page cache and compiles kernels. Seconds are the least and
the most of the runs, from an open checkpoint to weights as they are served; s/GB has the least, and the loaded bytes.
"""

import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from harness import arguments, machine_line, row, table
from whole_files import FILES, GGUF_FILES, write_file, write_gguf_file

from lorasrv.config import BUILTIN_MODEL, ModelOptions
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import builtin_file
from lorasrv.worker.base_format import choose_format
from lorasrv.worker.weights import load_weights
from sgmv_kernels.ops import Ops

OPS = Ops(torch.device("cpu"))
BUILTIN = "GGUF, Q4_1 (built in)"


def written(kind: str, target: Path) -> str:
    """Write the built-in model as `kind`, a name of `whole_files`, and return where it is."""
    if kind == BUILTIN:
        return BUILTIN_MODEL
    if kind in GGUF_FILES:
        return str(write_gguf_file(builtin_file(), target.with_suffix(".gguf"), kind))
    with closing(open_checkpoint(BUILTIN_MODEL)) as checkpoint:
        return str(write_file(checkpoint, target, kind))


def load(model: str) -> tuple[float, int]:
    """Return the seconds of one load, and the bytes of the weights."""
    with closing(open_checkpoint(model)) as checkpoint:
        begun = time.perf_counter()
        fmt = choose_format(ModelOptions(model=model), checkpoint, OPS)
        weights = load_weights(checkpoint, fmt, torch.bfloat16)
        return time.perf_counter() - begun, weights.nbytes


def main() -> None:
    a = arguments(__doc__, runs=(5, "loads of each file that count"))
    print(machine_line(), flush=True)
    table(("file", "MB", "least, s", "most, s", "s/GB"))
    for kind in (BUILTIN, *FILES, *GGUF_FILES):
        with tempfile.TemporaryDirectory() as folder:
            model = written(kind, Path(folder) / "model")
            _, nbytes = load(model)
            taken = [load(model)[0] for _ in range(a.runs)]
        row(kind, f"{nbytes / 1e6:.0f}", f"{min(taken):.2f}", f"{max(taken):.2f}", f"{min(taken) / nbytes * 1e9:.1f}")


if __name__ == "__main__":
    main()
