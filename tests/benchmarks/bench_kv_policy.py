"""Measure what `kv_policy` costs in quality, and what it saves in time and pages, on the built-in base.

    python tests/benchmarks/bench_kv_policy.py perplexity    # of windows, far from a text's beginning
    python tests/benchmarks/bench_kv_policy.py retrieval     # how often a number in a prompt is found again
    python tests/benchmarks/bench_kv_policy.py steps         # of long answers, beside those of full attention

Perplexity: a public-domain text in pieces of 1,536 tokens, of which those behind the first 768 count; linears in
floats, pages in float32. Retrieval: five digits in a prompt of some `--prompt` tokens of filler, at five depths; found
if the greedy answer begins with them; int4. Steps: `--rows` answers behind `--prompt` tokens of random words, medians.
"""

import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from harness import arguments, environment, machine_line, table, unique_prompt

from lorasrv.config import BUILTIN_MODEL, EngineConfig, ModelOptions
from lorasrv.kv_policy import KvPolicy, SelectPolicy, WindowPolicy
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.speculation_params import SpeculationParams
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.base_format import choose_format
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.weights import load_weights
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops

TEXT = Path(__file__).parents[1] / "lorasrv" / "data" / "devils_dictionary.txt"
PIECE, PAGE = 1536, 16
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
POLICIES: dict[str, KvPolicy | None] = {
    "full": None,
    "window 128": WindowPolicy(recent=128),
    "window 256": WindowPolicy(recent=256),
    "window 512": WindowPolicy(recent=512),
    "select 256": SelectPolicy(budget=256),
    "select 512": SelectPolicy(budget=512),
}


def losses(policy: KvPolicy | None, pieces: int) -> Iterator[float]:
    """Yield the negative log likelihood of each token of the second halves."""
    cpu = torch.device("cpu")
    with closing(open_checkpoint(BUILTIN_MODEL)) as checkpoint:
        ops, options = Ops(cpu), ModelOptions(quantization="none")
        weights = load_weights(checkpoint, choose_format(options, checkpoint, ops), torch.float32)
        ids = Tokenizer.from_source(checkpoint.tokenizer_source()).encode(TEXT.read_text(), add_special_tokens=False)
    memory = DevicePool(weights.spec, PIECE // PAGE, PAGE, KV_FORMATS["float32"], cpu)
    decoder = Decoder(weights, memory, DecoderLimits(PIECE, PIECE, PIECE, torch.float32), ops)
    placed = policy and policy.placed(PAGE, PIECE)
    for number in range(pieces):
        piece = ids[number * PIECE : (number + 1) * PIECE]
        scheduled = ScheduledRequest(
            *(RequestId("p"), tuple(piece), 0, tuple(range(PIECE // PAGE)), None, True, SamplingParams(), 0),
            kv_policy=placed,
        )
        batch = build_batch(SchedulerOutput((scheduled,), {}, (), AdapterOrders(), 0), memory, torch.float32, ops)
        rows = torch.arange(PIECE // 2, PIECE - 1)
        logits = decoder.forward(replace(batch, tables=replace(batch.tables, sample_rows=rows)))
        yield from torch.nn.functional.cross_entropy(
            logits, torch.tensor(piece[PIECE // 2 + 1 :]), reduction="none"
        ).tolist()


def perplexity(pieces: int) -> None:
    exact = 0.0
    table(("policy", "perplexity", "to full"))
    for name in ("full", "window 128", "window 256", "window 512"):
        found = math.exp(statistics.fmean(losses(POLICIES[name], pieces)))
        exact = exact or found
        print(f"| {name} | {found:.2f} | {found / exact - 1:+.1%} |", flush=True)


def retrieval(llm: LLM, prompt_tokens: int, trials: int) -> None:
    """Print the share of numbers that are found, by policy and depth."""
    fillers = prompt_tokens // len(llm.tokenizer.encode(FILLER, add_special_tokens=False))
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    table(("policy", *(f"at {depth:.0%}" for depth in DEPTHS), "all"))
    for name, policy in POLICIES.items():
        rng, found = random.Random(7), []
        for depth in DEPTHS:
            keys = [str(rng.randrange(10_000, 100_000)) for _ in range(trials)]
            before = round(depth * fillers)
            prompts = [
                f"{FILLER * before}The pass key is {key}. Remember it. {key} is the pass key. "
                f"{FILLER * (fillers - before)}What is the pass key? The pass key is"
                for key in keys
            ]
            answers = llm.generate(prompts, greedy, kv_policy=policy)
            found.append(sum(one.text.strip().startswith(key) for one, key in zip(answers, keys, strict=True)))
        shares = (f"{count / trials:.0%}" for count in found)
        print(f"| {name} | {' | '.join(shares)} | {sum(found) / (trials * len(DEPTHS)):.0%} |", flush=True)


def steps(llm: LLM, prompt_tokens: int, rows: int, count: int) -> None:
    """Print medians of `count` steps in which all answers grow, and the pages that they hold at the end."""
    sampling = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)
    exact = 0.0
    table(("policy", "step ms", "to full", "pages"))
    for name, policy in POLICIES.items():
        rng = random.Random(3)
        taken: list[float] = []
        ids = [RequestId(f"{name}-{number}") for number in range(rows)]
        for rid in ids:
            prompt = llm.tokenizer.encode(unique_prompt(rng, prompt_tokens), add_special_tokens=False)[:prompt_tokens]
            drafts = SpeculationParams(max_draft=0)
            request = llm.input_processor.process(
                rid, prompt, sampling, RequestOptions(kv_policy=policy, speculation=drafts)
            )
            llm.engine.add_request(request)
        while len(taken) < count:
            begun = time.perf_counter()
            if len(llm.engine.step()) == rows:
                taken.append(1e3 * (time.perf_counter() - begun))
        held = llm.engine.metrics.stats().pages_kv
        for rid in ids:
            llm.engine.abort(rid)
        llm.engine.step()
        exact = exact or statistics.median(taken)
        print(
            f"| {name} | {statistics.median(taken):.1f} | {statistics.median(taken) / exact:.2f} | {held} |", flush=True
        )


def main() -> None:
    a = arguments(
        __doc__,
        ("perplexity", "retrieval", "steps"),
        pieces=(8, "of text"),
        prompt=(1400, "tokens of a prompt"),
        trials=(8, "numbers at each depth"),
        rows=(8, "answers at a time"),
        count=(60, "steps"),
    )
    environment()
    print(machine_line(), flush=True)
    if a.measure == "perplexity":
        perplexity(a.pieces)
        return
    with LLM(BUILTIN_MODEL, EngineConfig()) as llm:
        if a.measure == "retrieval":
            retrieval(llm, a.prompt, a.trials)
        else:
            steps(llm, a.prompt, a.rows, a.count)


if __name__ == "__main__":
    main()
