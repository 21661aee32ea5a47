"""Exact or refused: whatever PEFT makes of random options and damaged files, in one batch with others and the base."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_adapters import RandomAdapters, loaded_whole, plain_model, quietly
from served_logits import ServedLogits, last_logits

from adapter_store.errors import AdapterInvalid

COUNT = 24
UNSERVED = "unsupported_embedding"
"""Why an adapter may be refused that PEFT loads whole: DoRA of the head or of the embedding."""
FAMILIES = ["qwen2", *(pytest.param(f, marks=pytest.mark.long) for f in ("llama", "gemma3", "granite", "olmo2", "mpt"))]


def refusal(served: ServedLogits, name: str, folder: Path) -> dict[str, str]:
    """Register an adapter; return the codes and messages of the problems, none if it was accepted."""
    try:
        served.llm.add_adapter(name, folder)
    except AdapterInvalid as error:
        return {problem.code: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_or_refused(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Callable[..., ServedLogits], family: str
) -> None:
    directory = tiny_hf_checkpoints[family]()
    served, made, base = serve(directory), RandomAdapters.of(directory), plain_model(directory)
    asked: list[tuple[str | None, Any, list[int]]] = [(None, base, list(range(5, 25)))]
    codes = set[str]()
    for number in range(COUNT):
        rng, name = random.Random(f"{family} {number}"), f"a{number}"
        if not quietly(made.save, rng, tmp_path / name):
            continue
        if number % 2:
            quietly(made.damage, rng, tmp_path / name)
        model, refused = quietly(loaded_whole, directory, tmp_path / name), refusal(served, name, tmp_path / name)
        assert bool(refused) == (model is None) or UNSERVED in refused, f"{name}: {refused}"
        codes |= refused.keys()
        if not refused:
            asked.append((name, model, [rng.randrange(3, 384) for _ in range(rng.randint(2, 40))]))
    found = served.first_logits([prompt for _, _, prompt in asked], [name for name, _, _ in asked])
    changed = 0
    for (name, model, prompt), got in zip(asked, found, strict=True):
        want = last_logits(model, prompt)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
        changed += bool((want - last_logits(base, prompt)).abs().max() > 0.02)
    assert changed > COUNT / 3
    assert len(codes) > 2
