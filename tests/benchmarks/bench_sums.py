"""Time steps and loads of sums of two adapters of rank 16, beside adapters of rank 32.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_sums.py [--rounds 5] [--tokens 48]

The built-in base, all linears; as many adapters, or sums of different pairs, as rows, named term by term or stored as
one adapter each. Kinds take turns, round by round; a ratio is of the adapters of rank 32 of the same round. A load is
from the page cache to host memory.
"""

import statistics
import tempfile
import time
from pathlib import Path

import bench_adapter_kinds
from harness import arguments, environment, shapes_of, table
from adapter_keys import key_of
from bench_adapter_kinds import write_adapter

from adapter_store.composition import Composition
from lorasrv.config import BUILTIN_MODEL, EngineConfig, ModelOptions
from lorasrv.llm import LLM
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation_params import SpeculationParams
from lorasrv.worker.adapter_source import HostAdapterStore

ROWS = (1, 16)
KINDS = ("rank 32", "rank 16", "0.5 x rank 16 + rank 16", "the same, stored")


def named(llm: LLM, kind: str, number: int) -> Composition:
    """What row `number` asks for."""
    if kind in KINDS[:2]:
        parts = [(f"r{kind[5:]}-{number}", 1.0)]
    else:
        parts = [(f"r16-{number}", 0.5), (f"r16-{(number + 1) % max(ROWS)}", 1.0)]
    weighted = ((key_of(llm.store.resolve(name)), weight) for name, weight in parts)
    return llm.store.compositions.add(Composition.of(weighted, is_stored=kind == KINDS[-1]))


def step_seconds(llm: LLM, asked: list[Composition], tokens: int) -> float:
    """Median seconds of a step of one answer of each."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i, one in enumerate(asked):
        request = llm.input_processor.process(
            RequestId(f"r{i}"),
            list(range(100, 148)),
            sampling,
            RequestOptions(adapter_key=one.key, speculation=SpeculationParams(max_draft=0)),
        )
        llm.engine.add_request(request)
    seconds = []
    while llm.engine.has_requests:
        begun = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[len(asked) + 4 : -1])


def main() -> None:
    a = arguments(__doc__, rounds=(5, "rounds"), tokens=(48, "tokens of an answer"))
    environment()
    base, rows = shapes_of(), []
    with tempfile.TemporaryDirectory() as name, LLM(BUILTIN_MODEL, EngineConfig(model=ModelOptions())) as llm:
        for rank in (16, 32):
            bench_adapter_kinds.RANK = rank
            for seed in range(max(ROWS)):
                folder = Path(name) / f"r{rank}-{seed}"
                write_adapter(folder, base, llm.tokenizer, seed, "plain")
                llm.add_adapter(folder.name, folder)
        source, loads, sizes = llm.input_processor._source, {}, {}
        assert isinstance(source, HostAdapterStore)
        for kind in KINDS:
            times, nbytes = [], 0
            for number in range(max(ROWS)):
                asked = named(llm, kind, number)
                begun, nbytes = time.perf_counter(), 0
                for key, _ in asked.terms:
                    nbytes += source.fetch_pinned(key)[0].nbytes
                    source.unpin(key)
                times.append(time.perf_counter() - begun)
            loads[kind], sizes[kind] = statistics.median(times), nbytes
        for count in ROWS:
            taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(a.rounds + 1):
                for kind in KINDS:
                    taken[kind].append(step_seconds(llm, [named(llm, kind, i) for i in range(count)], a.tokens))
            for kind, found in taken.items():
                ratios = [own / other for own, other in zip(found[1:], taken[KINDS[0]][1:], strict=True)]
                step = 1e3 * statistics.median(found[1:])
                rows.append((count, kind, step, statistics.median(ratios), 1e3 * loads[kind], sizes[kind] / 1e6))
    table(("rows", "adapters", "step ms", "to rank 32", "load ms", "MB"), rows)


if __name__ == "__main__":
    main()
