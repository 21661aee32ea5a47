"""Compare what an engine on a GPU answers with what PEFT answers: tiny models of all families, adapters side by side.

    python tests/benchmarks/gpu_answers.py --make     # here: models, PEFT's adapters and answers, to build/gpu/answers
    python tests/benchmarks/gpu_answers.py            # on the machine: rows as lines of JSON; docs/gpu.md

In float32 every token must be PEFT's, whatever shares the batch: other adapters, the base, drafts, preempted requests.
With bf16 activations and quantized bases the next token is asked for behind every prefix of PEFT's answers, and must be
PEFT's where the likeliest token leads clearly, for most of them, and for four tenths in int4. Exit code 1: it was not.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gpu_cases import DRY_RUN, emit, need_gpu

from lorasrv.models.families import SPEC_DIR

HELD = Path(__file__).resolve().parents[2] / "build" / "gpu" / "answers"
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    # Only positions before the scaling begins are served: as many as the prompts have with their answers.
    "ministral3": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
}
"""Changes of the configuration of a family's tiny model."""
FAMILIES = sorted((path.stem for path in SPEC_DIR.glob("*.toml")), key=lambda name: (name != "llama", name))
"""All families; llama, the first, has more adapters and engines."""
ADAPTERS: dict[str, dict[str, Any]] = {"plain": {}, "dora": {"use_dora": True, "r": 7}}
MORE_ADAPTERS = ADAPTERS | {
    "large": {"r": 40, "use_rslora": True},
    "some": {"target_modules": ["q_proj", "down_proj"], "r": 16},
    "head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [40, 41, 42, 43]},
    "bias": {"bias": "lora_only", "lora_bias": True},
}
PROMPTS = ([1, *range(40, 63)], [9, 300, 77], [5, *range(350, 280, -1)], [200])
COUNT = 24
TIE = 1e-3
"""A lead of the likeliest token below which float32 may choose either."""
EXACT: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, drafts": {"speculation": "auto"},
    "float32, preempted": {"pages": 64},
}
"""Options of engines by what they are; the pages of one whose requests do not fit at once."""
MOVED: dict[str, tuple[dict[str, Any], float, float]] = {
    "bf16": ({"dtype": "bfloat16"}, 0.25, 0.95),
    "int8": ({"dtype": "bfloat16", "quantization": "int8"}, 0.5, 0.95),
    "int4": ({"dtype": "bfloat16", "quantization": "int4"}, 0.75, 0.4),
    "bf16, k8v4 pages": ({"dtype": "bfloat16", "kv_cache_dtype": "k8v4"}, 0.5, 0.75),
}
"""(options, least lead of a token that is asked for in standard deviations of logits, least share that is the same).

Random weights suffer from rounding to 4 bits far more than trained ones; by chance 1 in 384 is the same.
"""
OF_ALL = ("float32", "bf16")
"""The engines of every model; the first one has all."""
PROCESSES = 2 if DRY_RUN else 16
"""What takes time is compiling kernels."""


def make() -> None:
    """Write the models, their adapters and what PEFT answers, with the lead of each token."""
    from peft_oracles import PeftOracles
    from served_logits import last_logits
    from tiny_checkpoints import write_tiny

    for name in FAMILIES:
        folder = HELD / name
        write_tiny(folder / "model", name, **CHANGES.get(name, {}))
        oracles = PeftOracles(folder / "model", folder, MORE_ADAPTERS if name == "llama" else ADAPTERS)
        answers = []
        for adapter, prompt in ((adapter, prompt) for adapter in oracles.models for prompt in PROMPTS):
            ids, leads = list(prompt), []
            for _ in range(COUNT):
                logits = last_logits(oracles.models[adapter], ids)
                first, second = logits.topk(2).values.tolist()
                leads.append([first - second, float(logits.std())])
                ids.append(int(logits.argmax()))
            answers.append({"adapter": adapter, "prompt": prompt, "tokens": ids[len(prompt) :], "leads": leads})
        (folder / "answers.json").write_text(json.dumps(answers), "utf-8")
        print(f"{name}: {len(answers)} answers", flush=True)


def engine(folder: Path, options: dict[str, Any]) -> Any:
    from tiny_engine import BLOCK, offline_engine

    from lorasrv.models.loader.locate import read_model_shape

    options = {"device": "cpu" if DRY_RUN else "cuda", **options}
    if "pages" in options:
        spec = read_model_shape(str(folder / "model")).spec
        page_bytes = 2 * 16 * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        options["pages"] = -(-options["pages"] * page_bytes // BLOCK)
    return offline_engine(folder / "model", adapters_of(folder), **options)


def adapters_of(folder: Path) -> dict[str, Path]:
    """Return the adapters of a model, by name."""
    return {path.name: path for path in sorted(folder.iterdir()) if (path / "adapter_config.json").exists()}


def exact(folder: Path, options: dict[str, Any]) -> tuple[int, int]:
    """Return (answers that are PEFT's up to the first tie, all answers)."""
    from lorasrv.sampling_params import SamplingParams

    answers = json.loads((folder / "answers.json").read_text("utf-8"))
    greedy = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    with engine(folder, options) as llm:
        got = llm.generate([one["prompt"] for one in answers], greedy, [one["adapter"] for one in answers])
    return sum(is_same(one, told.token_ids) for one, told in zip(answers, got, strict=True)), len(answers)


def is_same(answer: dict[str, Any], tokens: Sequence[int]) -> bool:
    """Return whether tokens are those of PEFT's answer, up to its first tie."""
    sure = next((at for at, (lead, _) in enumerate(answer["leads"]) if lead < TIE), COUNT)
    wanted: list[int] = answer["tokens"][:sure]
    return list(tokens[:sure]) == wanted


def moved(folder: Path, options: dict[str, Any], least: float) -> tuple[int, int]:
    """Return (next tokens that are PEFT's, all whose lead is large enough)."""
    from lorasrv.sampling_params import SamplingParams

    answers = json.loads((folder / "answers.json").read_text("utf-8"))
    asked = [
        (one["adapter"], [*one["prompt"], *one["tokens"][:at]], token)
        for one in answers
        for at, (token, (lead, spread)) in enumerate(zip(one["tokens"], one["leads"], strict=True))
        if lead >= least * spread
    ]
    with engine(folder, options) as llm:
        one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        got = llm.generate([prompt for _, prompt, _ in asked], one_token, [adapter for adapter, _, _ in asked])
    return sum(list(told.token_ids) == [want] for told, (*_, want) in zip(got, asked, strict=True)), len(asked)


def checked(folder: Path, what: str) -> dict[str, Any]:
    """Return a row: how many answers of an engine are PEFT's."""
    row: dict[str, Any] = {"model": folder.name, "engine": what}
    try:
        if what in EXACT:
            same, count = exact(folder, EXACT[what])
            return row | {"of": "answers", "count": count, "same": same, "ok": 0 < count == same}
        options, lead, share = MOVED[what]
        same, count = moved(folder, options, lead)
        return row | {"of": "next tokens", "count": count, "same": same, "ok": count > 0 and same >= share * count}
    except Exception as problem:
        return row | {"ok": False, "why": f"{problem!r:.200}", "trace": traceback.format_exc()[-1500:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", action="store_true", help="write the models and PEFT's answers")
    if parser.parse_args().make:
        make()
        return 0
    need_gpu()
    folders = [folder for name in FAMILIES if (folder := HELD / name).is_dir()]
    if not folders:
        emit("skipped", why="no build/gpu/answers: gpu_fetch.py")
        return 0 if DRY_RUN else 1
    work = [(folder, what) for folder in folders for what in (*EXACT, *MOVED) if folder is folders[0] or what in OF_ALL]
    failed = 0
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(checked, *one) for one in work]):
            row = done.result()
            failed += not row["ok"]
            emit("answers", **row)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
