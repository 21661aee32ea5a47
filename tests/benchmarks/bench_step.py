"""Time a decode step in this process by kernels: rows with adapters of rank 16 on all linears, default base.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_step.py --work 1/0,1/1,16/0,16/16,32/32 --kernels numba,torch
    python tests/benchmarks/bench_step.py --kernels numba --stored bf16,int8 --work 16/16,32/32
    python tests/benchmarks/bench_step.py --kernels numba --versus ../other-checkout --pairs 5
    python tests/benchmarks/bench_step.py --undrafted --work 1/0,4/1,16/16,32/32 --rounds 9

16/4 means 16 rows over 4 adapters. The median leaves out the few steps that hold prefill. Kernels and forms of the
adapters take turns, and the best round counts. --versus runs this script and the one of another checkout
alternately, each in a process of its own, and compares their tables. --undrafted compares two engines whose steps
alternate: one with `--speculation off`, and one that drafts, asked with `speculation: false`.
"""

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import adapter_folders, arguments, environment, row, table, versus

from adapter_store.spec import BF16, Form
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SpeculationOptions
from lorasrv.llm import LLM
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation_params import NO_SPECULATION

NEW_TOKENS, PROMPT_TOKENS = 24, 64


def step_ms(kernels: str, stored: Form, work: list[tuple[int, int]], folders: list[Path]) -> list[float]:
    """Return the median milliseconds of a step for every (rows, adapters)."""
    alone = SpeculationOptions(speculation="off")
    with LLM(config=EngineConfig(model=ModelOptions(kernels=kernels), speculation=alone)) as llm:
        for folder in folders:
            llm.add_adapter(folder.name, folder, stored=stored)
        medians = []
        for rows, adapters in work:
            names = [folders[i % adapters].name if adapters else None for i in range(rows)]
            medians.append(1e3 * statistics.median(decode_seconds(llm, adapters=names)[0]))
        return medians


def decode_seconds(*llms: LLM, adapters: Sequence[str | None]) -> list[list[float]]:
    """Return the seconds of each step of each engine, taken in turns, while all rows decode together without drafts;
    the first few steps hold prefill."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for llm in llms:
        for i, name in enumerate(adapters):
            key = llm.store.resolve(name).key if name else None
            prompt = list(range(100, 100 + PROMPT_TOKENS))
            llm.engine.add_request(
                llm.input_processor.process(
                    RequestId(f"row{i}"), prompt, sampling, RequestOptions(adapter_key=key, speculation=NO_SPECULATION)
                )
            )
    seconds: list[list[float]] = [[] for _ in llms]
    while any(llm.engine.has_requests for llm in llms):
        for llm, own in zip(llms, seconds, strict=True):
            begun = time.perf_counter()
            llm.engine.step()
            own.append(time.perf_counter() - begun)
    return seconds


def compare_undrafted(work: Sequence[tuple[int, int]], folders: Sequence[Path], rounds: int) -> None:
    """Print what drafters cost rows that want none of them: medians of steps, and the median ratio of the rounds."""
    memory = MemoryOptions(pool_bytes=1 << 30)
    off, auto = (
        EngineConfig(memory=memory, speculation=SpeculationOptions(speculation=how)) for how in ("off", "auto")
    )
    with LLM(config=off) as without, LLM(config=auto) as beside:
        for llm in (without, beside):
            for folder in folders:
                llm.add_adapter(folder.name, folder)
        table(("rows/adapters", "off ms", "speculation: false ms", "ratio", "of each round"))
        for rows, adapters in work:
            names = [folders[i % adapters].name if adapters else None for i in range(rows)]
            decode_seconds(without, beside, adapters=names)  # compiles, and loads the adapters
            medians = [
                [1e3 * statistics.median(own) for own in decode_seconds(without, beside, adapters=names)]
                for _ in range(rounds)
            ]
            ratios = [new / old for old, new in medians]
            sides = (f"{statistics.median(side):.2f}" for side in zip(*medians, strict=True))
            shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            row(f"{rows}/{adapters}", *sides, f"{statistics.median(ratios):.3f}", shown)


def figures(root: Path, options: list[str]) -> dict[str, float]:
    """Return the milliseconds that the script of a checkout prints."""
    command = [sys.executable, str(root / "tests" / "benchmarks" / "bench_step.py"), *options]
    done = subprocess.run(command, cwd=root, env=environment(root), stdout=subprocess.PIPE, text=True, check=True)
    return read_table(done.stdout)


def read_table(text: str) -> dict[str, float]:
    """Return the cells of the columns in ms, by work and kernels."""
    titles, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    columns = [k for k, title in enumerate(titles) if re.fullmatch(r"\w+ ms", title)]
    return {f"{cells[0]} {titles[k]}": float(cells[k]) for cells in rows for k in columns}


def main() -> None:
    a = arguments(
        __doc__,
        work=(("1/0", "1/1", "16/0", "16/16", "32/32"), "rows/adapters"),
        kernels=(("numba", "torch"), "to compare"),
        stored=((BF16,), "forms of the adapters, to compare"),
        rounds=(2, "times that each of them has its turn"),
        threads=(torch.get_num_threads(), "that compute"),
        versus=(Path, "another checkout of this project, measured alternately"),
        pairs=(5, "runs of each checkout"),
        undrafted=(False, "compare rows that want no drafts, with drafters and without"),
    )
    if a.versus:
        options = ["--work", ",".join(a.work), "--kernels", ",".join(a.kernels), "--threads", str(a.threads)]
        versus(a.versus.resolve(), a.pairs, lambda root: figures(root, options))
        return
    torch.set_num_threads(a.threads)
    work = [(int(rows), int(adapters)) for rows, adapters in (item.split("/") for item in a.work)]
    folders = adapter_folders(max(adapters for _, adapters in work))
    if a.undrafted:
        compare_undrafted(work, folders, a.rounds)
        return
    ways = {
        kernels if form == BF16 else f"{kernels}_{form}": (kernels, form) for kernels in a.kernels for form in a.stored
    }
    rounds = [{name: step_ms(*way, work, folders) for name, way in ways.items()} for _ in range(a.rounds)]
    best = {name: [min(times) for times in zip(*(done[name] for done in rounds), strict=True)] for name in ways}
    rows = [
        (item, *(cell for name in ways for cell in (f"{best[name][i]:.2f}", f"{1e3 * n / best[name][i]:.0f}")))
        for i, (item, (n, _)) in enumerate(zip(a.work, work, strict=True))
    ]
    table(("rows/adapters", *(title for name in ways for title in (f"{name} ms", "tok/s"))), rows)


if __name__ == "__main__":
    main()
