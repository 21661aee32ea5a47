"""Time of one decode step in this process, by kernels: rows with adapters of rank 16 on all linears, int8 base.

GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_step.py --work 1/0,1/1,16/0,16/16,32/32 --kernels numba,torch

"16/4" are 16 rows over 4 adapters. The median leaves out the few steps that hold prefill. Kernels take turns, and the
better of two rounds counts, so that a busy moment of the machine does not decide.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from lorasrv.config import EngineConfig, ModelOptions
from lorasrv.llm import LLM
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams

ASSETS = Path(__file__).parents[2] / "build" / "bench"
NEW_TOKENS = 24
PROMPT_TOKENS = 64


def median_step_ms(llm: LLM, names: list[str | None]) -> float:
    """All rows decode together."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for i, name in enumerate(names):
        key = llm.store.resolve(name).key if name else None
        prompt = list(range(100, 100 + PROMPT_TOKENS))
        llm.engine.add_request(llm.input_processor.process(RequestId(f"row{i}"), prompt, sampling, key))
    seconds = []
    while llm.engine.has_requests:
        begin = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


def round_of(kernels: str, work: list[tuple[int, int]], folders: list[Path]) -> list[float]:
    """Milliseconds a step for every (rows, adapters)."""
    with LLM(config=EngineConfig(model=ModelOptions(kernels=kernels))) as llm:
        for folder in folders:
            llm.add_adapter(folder.name, folder)
        ids: list[str | None] = [folder.name for folder in folders]
        return [median_step_ms(llm, [ids[i % d] if d else None for i in range(n)]) for n, d in work]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="1/0,1/1,16/0,16/16,32/32")
    parser.add_argument("--kernels", default="numba,torch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    work = [(int(rows), int(adapters)) for rows, adapters in (item.split("/") for item in a.work.split(","))]
    count = max(adapters for _, adapters in work)
    script = Path(__file__).parent / "peers" / "make_assets.py"
    subprocess.run([sys.executable, script, "--out", ASSETS, "--adapters", str(max(1, count))], check=True)
    folders = sorted((ASSETS / "adapters").iterdir())[:count]
    names = a.kernels.split(",")
    rounds: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(2):
        for name in names:
            rounds[name].append(round_of(name, work, folders))
    print(f"\n| rows/adapters | {' | '.join(f'{name} ms | tok/s' for name in names)} |\n|---|{'---|---|' * len(names)}")
    for i, (n, d) in enumerate(work):
        best = [min(r[i] for r in rounds[name]) for name in names]
        print(f"| {n}/{d} | {' | '.join(f'{ms:.1f} | {1e3 * n / ms:.0f}' for ms in best)} |", flush=True)


if __name__ == "__main__":
    main()
