"""Markers are certain, or the storm would cry wolf."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markers as m
import pytest
import storm
import torch

from lorasrv.llm import LLM
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.device import compute_alone, compute_in_parallel


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    compute_alone()
    yield
    compute_in_parallel()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_file: Path) -> Path:
    return m.write_model(tmp_path_factory.mktemp("marked"), tiny_tokenizer_file.read_bytes())


@pytest.fixture(scope="module")
def marked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Three adapters of every variety, the first and the last number among them: name -> (PEFT directory, marker)."""
    folder = tmp_path_factory.mktemp("marked")
    rng = random.Random(3)
    adapters = {}
    for i, variety in enumerate(m.VARIETIES):
        for number in (i, rng.randrange(m.NUM_ADAPTERS), m.NUM_ADAPTERS - 1 - i):
            path = m.write_adapter(folder / f"a{number}", number, variety)
            adapters[path.name] = (path, m.marker(number))
    return adapters


def _prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Any tokens, one to sixty: the first and the last length among them."""
    lengths = [1, 60, *(rng.randint(2, 59) for _ in range(count - 2))]
    return [[rng.randrange(3, m.VOCAB) for _ in range(length)] for length in lengths]


def test_every_adapter_says_its_own_token_and_no_other(model: Path, marked: dict[str, tuple[Path, Any]]) -> None:
    greedy = SamplingParams(max_tokens=storm.MAX_NEW, temperature=0.0, ignore_eos=True)
    rng = random.Random(4)
    with storm.small_pages(), LLM(str(model), storm.config(model, pages=1000)) as llm:
        for name, (path, _) in marked.items():
            llm.add_adapter(name, path)
        asked = [(name, prompt) for name in (None, *marked) for prompt in _prompts(rng, 6)]
        rng.shuffle(asked)
        answers = llm.generate([prompt for _, prompt in asked], greedy, [name for name, _ in asked])
    for (name, prompt), answer in zip(asked, answers, strict=True):
        said = [m.said_by(token) for token in answer.token_ids]
        assert len(said) == storm.MAX_NEW
        assert {s.marker for s in said} == {marked[name][1] if name else m.BASE}, name
        assert {s.topic for s in said} <= {m.topic_of(token) for token in prompt}, name


@pytest.mark.parametrize("name", [None, "a0", "a3", "a1017"])
def test_transformers_and_peft_agree(model: Path, marked: dict[str, tuple[Path, Any]], name: str | None) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model)
    if name is not None:
        oracle = PeftModel.from_pretrained(oracle, marked[name][0])
    prompts = _prompts(random.Random(5), 3)
    with storm.small_pages(), LLM(str(model), storm.config(model, pages=200)) as llm:
        if name is not None:
            llm.add_adapter(name, marked[name][0])
        greedy = SamplingParams(max_tokens=storm.MAX_NEW, temperature=0.0, ignore_eos=True)
        answers = llm.generate(prompts, greedy, [name] * len(prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = oracle.eval()(torch.tensor([[*prompt, *answer.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer.token_ids
