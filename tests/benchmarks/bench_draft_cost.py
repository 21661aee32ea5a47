"""Time what drafts cost a larger base, one answer at a time: a pass of a draft model, Medusa heads, verified tokens.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_draft_cost.py [--layers 24 --hidden 2048] [--tokens 64]

The base has random weights in int4, of SmolLM2-1.7B's shape unless another is given, and the vocabulary of the default
base, which is its draft model. Random weights say nothing about how often drafts are right: only times are measured.
The last columns are the speed-up of drafts of k tokens, each right with the chance a if those before it are, at the
best k.
"""

import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from harness import arguments, environment, table
from all_drafts import every_draft
from safetensors.torch import save_file

from lorasrv.config import BUILTIN_MODEL, EngineConfig, ModelOptions, SpeculationOptions
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import DrafterOutput
from lorasrv.speculation.model_drafter import ModelDrafter
from lorasrv.speculation_params import SpeculationParams
from lorasrv.text.tokenizer import Tokenizer

NUM_HEADS, MAX_DRAFT = 3, 4
CHANCES = (0.6, 0.8)


def write_base(folder: Path, layers: int, hidden: int) -> None:
    """A folder without weights: the shape, and the tokens of the default base."""
    with closing(open_checkpoint(BUILTIN_MODEL)) as checkpoint:
        backend = Tokenizer.from_source(checkpoint.tokenizer_source())._backend
        vocab, eos = checkpoint.spec.vocab_size, list(checkpoint.spec.eos_token_ids)
    shape = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 130000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").write_text(backend.to_str())
    blocks = {f"{head}.0.linear.weight": torch.randn(hidden, hidden) * 0.02 for head in range(NUM_HEADS)}
    save_file(blocks, folder / "medusa_lm_head.safetensors")


def step_seconds(llm: LLM, tokens: int, max_draft: int) -> float:
    """Median seconds of a step of one answer that verifies up to `max_draft` tokens, without the models' own time."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    speculation = SpeculationParams(max_draft=max_draft, remember=False)
    prompt = list(range(100, 164))
    llm.engine.add_request(
        llm.input_processor.process(RequestId("r"), prompt, sampling, RequestOptions(speculation=speculation))
    )
    seconds, drafting, observe = [], [0.0], ModelDrafter.observe

    def timed(self: ModelDrafter, output: DrafterOutput) -> None:
        drafting[0] += output.seconds
        observe(self, output)

    ModelDrafter.observe = timed  # type: ignore[method-assign]
    try:
        with every_draft():
            while llm.engine.has_requests:
                begun, drafting[0] = time.perf_counter(), 0.0
                llm.engine.step()
                seconds.append(time.perf_counter() - begun - drafting[0])
    finally:
        ModelDrafter.observe = observe  # type: ignore[method-assign]
    return statistics.median(seconds[4:])


def pass_seconds(llm: LLM, name: str) -> float:
    """Seconds of a pass of a model that has drafted; a pass is a token."""
    [newest] = llm.engine._scheduler.speculator._models[name]._pass_s.values()
    return statistics.median(newest)


def best(chance: float, verify: float, draft: float, first: float) -> str:
    """The speed-up of the best draft length, costs in units of a plain step."""
    found = []
    for k in range(1, 13):
        tokens = sum(chance**depth for depth in range(k + 1))
        found.append((tokens / (1 + first + k * (verify + draft)), k))
    speed, k = max(found)
    return f"{speed:.2f} (k={k})"


def main() -> None:
    a = arguments(
        __doc__, layers=(24, "layers of the base"), hidden=(2048, "hidden size"), tokens=(64, "tokens of an answer")
    )
    environment()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_base(folder, a.layers, a.hidden)
        model = ModelOptions(model=str(folder), load_format="dummy", quantization="int4")
        for drafter, options in (
            ("model", SpeculationOptions(drafters=("model",), draft_model=BUILTIN_MODEL)),
            ("medusa", SpeculationOptions(drafters=("medusa",), draft_heads=str(folder))),
        ):
            with LLM(str(folder), EngineConfig(model=model, speculation=options)) as llm:
                step_seconds(llm, 16, MAX_DRAFT)  # compiles
                plain = step_seconds(llm, a.tokens, 0)
                count = NUM_HEADS if drafter == "medusa" else MAX_DRAFT
                one, many = (step_seconds(llm, a.tokens, most) for most in (1, count))
                verify = (many - one) / (count - 1) / plain
                draft, first = pass_seconds(llm, drafter) / plain, (one - plain) / plain - verify
                speeds = [best(chance, verify, draft, max(0.0, first)) for chance in CHANCES]
                rows.append((drafter, 1e3 * plain, first, verify, draft, *speeds))
    table(
        ("drafter", "plain step ms", "first token", "each token", "its draft", *(f"best at a={a}" for a in CHANCES)),
        rows,
    )


if __name__ == "__main__":
    main()
