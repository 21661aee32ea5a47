"""Time of one decode step, in this process: personas and base mixed, int8, a number of threads.

GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_step.py --rows 1,8,32 --threads 2
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from lorasrv.llm import LLM
from lorasrv.request import RequestId, SamplingParams

ADAPTERS = Path(__file__).parents[2] / "examples" / "persona_bots" / "adapters"
NEW_TOKENS = 40
QUESTION = [{"role": "user", "content": "What should I eat for breakfast?"}]


def median_step_ms(llm: LLM, names: list[str | None]) -> float:
    """All rows decode together; the steps that hold prefill are few, and the median leaves them out."""
    assert llm.chat_template is not None
    prompt = llm.chat_template.encode(QUESTION, llm.tokenizer)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for i, name in enumerate(names):
        key = llm.store.resolve(name).key if name else None
        llm.engine.add_request(llm.engine.admit(RequestId(f"row{i}"), prompt, sampling, key))
    seconds = []
    while llm.engine.has_requests:
        begin = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    with LLM() as llm:
        ids = sorted(folder.name for folder in ADAPTERS.iterdir())
        for name in ids:
            llm.add_adapter(name, ADAPTERS / name)
        for rows in map(int, a.rows.split(",")):
            names = ([None, *ids] * rows)[:rows]
            print(f"{rows} rows, {a.threads} threads: {median_step_ms(llm, names):.0f} ms", flush=True)


if __name__ == "__main__":
    main()
