"""Time steps of adapters that hold more than LoRA of layers: DoRA's magnitudes, norms and biases of their own, LoRA of
the head and of the embedding, rows of the vocabulary of their own; loads, and bytes in the pool.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_adapter_kinds.py [--rounds 5] [--tokens 48] [--kinds plain,head]
        [--rows 1,16] [--cpu-time]

The built-in base; rank 16 on all linears; as many adapters as rows. Kinds take turns, round by round; a ratio is of the
plain adapters of the same round.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import arguments, environment, shapes_of, table
from adapter_keys import key_of
from safetensors.torch import save_file

from adapter_store.spec import AddedToken, BaseShapes
from lorasrv.config import BUILTIN_MODEL, EngineConfig, ModelOptions
from lorasrv.llm import LLM
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation_params import SpeculationParams
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.adapter_source import HostAdapterStore

RANK = 16
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADDED = [*range(49152, 49156)]
"""Ids behind those of the built-in base."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"modules_to_save": ["norm"]},
    "DoRA": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "DoRA and norms": {"use_dora": True, "modules_to_save": ["norm"]},
    "head": {"target_modules": [*LINEARS, "lm_head"]},
    "embedding": {"target_modules": [*LINEARS, "embed_tokens"]},
    "12 tokens": {"trainable_token_indices": {"embed_tokens": [*range(90, 102)], "lm_head": [*range(91, 103)]}},
    "4 tokens": {"trainable_token_indices": {"embed_tokens": [*range(90, 94)], "lm_head": [*range(90, 94)]}},
    "4 added tokens": {"trainable_token_indices": {"embed_tokens": ADDED, "lm_head": ADDED}},
    "embedding's copy": {"modules_to_save": ["embed_tokens"]},
    "head's copy": {"modules_to_save": ["lm_head"]},
}


def slug(kind: str) -> str:
    return kind.lower().replace(" ", "-").replace("'", "")


def matrices(stem: str, n_in: int, n_out: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Random A and B of one module."""
    a, b = torch.randn(RANK, n_in, generator=random), torch.randn(n_out, RANK, generator=random)
    return {f"{stem}.lora_A.weight": a.mul_(0.05).bfloat16(), f"{stem}.lora_B.weight": b.mul_(0.01).bfloat16()}


def own_rows(kind: str, base: BaseShapes, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Random rows of the vocabulary: copies of tables, and rows of some tokens."""
    vocab, hidden = base.ends[base.embedding]
    saved, tokens = KINDS[kind].get("modules_to_save", ()), KINDS[kind].get("trainable_token_indices", {})
    sizes = {f"{end}.weight": vocab for end in base.ends if end.endswith(tuple(saved))}
    for name, ids in tokens.items():
        end = next(end for end in base.ends if end.endswith(name))
        sizes[f"{end}.token_adapter.trainable_tokens_delta"] = len(ids)
    return {
        f"base_model.model.{name}": torch.randn(count, hidden, generator=random).mul_(0.05).bfloat16()
        for name, count in sizes.items()
    }


def write_adapter(folder: Path, base: BaseShapes, tokenizer: Tokenizer, seed: int, kind: str) -> None:
    """A PEFT folder of random weights."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(base.num_layers):
        for module, (n_in, n_out) in base.modules.items():
            stem = f"base_model.model.{base.layer_prefix}{layer}.{module}"
            tensors |= matrices(stem, n_in, n_out, random)
            if "use_dora" in KINDS[kind]:
                tensors[f"{stem}.lora_magnitude_vector"] = torch.rand(n_out, generator=random) + 1
            if "lora_bias" in KINDS[kind]:
                tensors[f"{stem}.lora_B.bias"] = torch.randn(n_out, generator=random).mul_(0.01)
        if KINDS[kind].get("modules_to_save") == ["norm"]:
            for norm, width in base.norms.items():
                stem = f"base_model.model.{base.layer_prefix}{layer}.{norm}"
                tensors[f"{stem}.weight"] = torch.rand(width, generator=random) + 0.5
    if KINDS[kind].get("modules_to_save") == ["norm"]:
        tensors[f"base_model.model.{base.final_norm}.weight"] = torch.rand(base.hidden_size, generator=random) + 0.5
    for end in [end for end in base.ends if end.endswith(tuple(KINDS[kind].get("target_modules", ())))]:
        halves = matrices(f"base_model.model.{end}", *base.ends[end], random)
        if end == base.embedding:
            halves = {name.replace("lora_", "lora_embedding_").removesuffix(".weight"): t for name, t in halves.items()}
        tensors |= halves
    tensors |= own_rows(kind, base, random)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": LINEARS}
    (folder / "adapter_config.json").write_text(json.dumps(config | KINDS[kind]))
    if ADDED in KINDS[kind].get("trainable_token_indices", {}).values():
        own = tokenizer.extended([AddedToken(token, f"<added {token}>") for token in ADDED])
        own._backend.save(str(folder / "tokenizer.json"))


def step_seconds(llm: LLM, names: list[str], tokens: int, clock: Callable[[], float]) -> float:
    """Median seconds of a step of one answer of each adapter."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i, name in enumerate(names):
        key = llm.store.resolve(name).key
        request = llm.input_processor.process(
            RequestId(f"r{i}"),
            list(range(100, 148)),
            sampling,
            RequestOptions(adapter_key=key, speculation=SpeculationParams(max_draft=0)),
        )
        llm.engine.add_request(request)
    seconds = []
    while llm.engine.has_requests:
        begun = clock()
        llm.engine.step()
        seconds.append(clock() - begun)
    return statistics.median(seconds[len(names) + 4 : -1])


def main() -> None:
    a = arguments(
        __doc__,
        rounds=(5, "rounds"),
        tokens=(48, "tokens of an answer"),
        kinds=(tuple(KINDS), "kinds, plain among them"),
        rows=((1, 16), "answers in a step, each with its own adapter"),
        cpu_time=(False, "time of all threads on processors, for a machine that others use"),
    )
    clock = time.process_time if a.cpu_time else time.perf_counter
    environment()
    base, rows = shapes_of(), []
    with tempfile.TemporaryDirectory() as name, LLM(BUILTIN_MODEL, EngineConfig(model=ModelOptions())) as llm:
        loads, sizes = {}, {}
        for kind in a.kinds:
            for seed in range(max(a.rows)):
                folder = Path(name) / f"{slug(kind)}-{seed}"
                write_adapter(folder, base, llm.tokenizer, seed, kind)
                llm.add_adapter(folder.name, folder)
            source, times, nbytes = llm.input_processor._source, [], 0
            assert isinstance(source, HostAdapterStore)
            for seed in range(max(a.rows)):
                begun = clock()
                nbytes = source.fetch_pinned(key_of(llm.store.resolve(f"{slug(kind)}-{seed}")))[0].nbytes
                times.append(clock() - begun)
            loads[kind], sizes[kind] = statistics.median(times), nbytes
        for count in a.rows:
            taken: dict[str, list[float]] = {kind: [] for kind in a.kinds}
            for _ in range(a.rounds + 1):
                for kind in a.kinds:
                    names = [f"{slug(kind)}-{i}" for i in range(count)]
                    taken[kind].append(step_seconds(llm, names, a.tokens, clock))
            for kind, found in taken.items():
                ratios = [own / plain for own, plain in zip(found[1:], taken["plain"][1:], strict=True)]
                step = 1e3 * statistics.median(found[1:])
                rows.append((count, kind, step, statistics.median(ratios), 1e3 * loads[kind], sizes[kind] / 1e6))
    table(("rows", "adapters", "step ms", "to plain", "load ms", "MB"), rows)


if __name__ == "__main__":
    main()
