"""aLoRA: an adapter that acts from its invocation tokens on, against PEFT, beside plain adapters and the base."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mispredict import expect_short_answers
from random_adapters import plain_model, quietly
from served_logits import ServedLogits, last_logits
from tiny_engine import checked_engine

from adapter_store.errors import AdapterInvalid, NotComposable
from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import SamplingParams

INVOCATION = [7, 301, 7]
TEXT = [10 + (7 * i) % 300 for i in range(70)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tiny_hf_checkpoints: Any) -> Path:
    made: Path = tiny_hf_checkpoints["llama"]()
    return made


@pytest.fixture(scope="module")
def folders(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return adapters by name: aLoRA with LoRA on the head, another with biases, and a plain LoRA."""
    from peft import LoraConfig, get_peft_model

    fields: dict[str, dict[str, Any]] = {
        "head": {"alora_invocation_tokens": INVOCATION, "target_modules": ["q_proj", "lm_head"]},
        "alora": {"alora_invocation_tokens": INVOCATION, "lora_bias": True, "target_modules": "all-linear"},
        "plain": {"target_modules": "all-linear"},
    }
    made = {}
    for seed, (name, own) in enumerate(fields.items()):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **own)
        model = quietly(get_peft_model, plain_model(directory), config)
        for parameter in (own for own in model.parameters() if own.requires_grad):
            parameter.data.normal_(0, 0.2)
        made[name] = tmp_path_factory.mktemp(name)
        quietly(partial(model.save_pretrained, made[name], save_embedding_layers=False))
    return made


@pytest.fixture(scope="module")
def models(directory: Path, folders: dict[str, Path]) -> dict[str | None, Any]:
    from peft import PeftModel

    found: dict[str | None, Any] = {None: plain_model(directory)}
    for name, folder in folders.items():
        found[name] = quietly(PeftModel.from_pretrained, plain_model(directory), folder).eval()
    return found


def answer(model: Any, prompt: list[int], count: int = 12) -> list[int]:
    """PEFT's own `generate`; the place of the invocation tokens is that in the prompt."""
    ids = torch.tensor([prompt])
    fields = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    done = quietly(partial(model.generate, input_ids=ids, **fields))
    tokens: list[int] = done[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("step_tokens", [512, 16, 5])
def test_rows_before_the_invocation_are_the_bases(
    serve: Callable[..., ServedLogits],
    directory: Path,
    folders: dict[str, Path],
    models: dict[str | None, Any],
    step_tokens: int,
) -> None:
    served = serve(directory, max_num_seqs=4, max_num_batched_tokens=step_tokens)
    for name, folder in folders.items():
        served.llm.add_adapter(name, folder)
    twice = [*TEXT[:20], *INVOCATION, *TEXT[20:40], *INVOCATION, *TEXT[40:44]]
    prompts = [
        INVOCATION,
        [*INVOCATION, *TEXT[:20]],
        [*TEXT[:33], *INVOCATION],
        twice,
        twice[:40],
        [*TEXT[:31], 7, 301, 7, 301, 7],
    ]
    asked: list[tuple[str | None, list[int]]] = [
        (name, prompt) for prompt in prompts for name in ("alora", "head", "plain", None)
    ]
    found = served.first_logits([prompt for _, prompt in asked], [name for name, _ in asked])
    for (name, prompt), got in zip(asked, found, strict=True):
        want = last_logits(models[name], prompt)
        torch.testing.assert_close(
            got, want, rtol=1e-3, atol=1e-3, msg=lambda text, own=(name, prompt): f"{own}: {text}"
        )
        if name is not None:
            assert (want - last_logits(models[None], prompt)).abs().max() > 0.1


def test_answers_are_those_of_peft_and_share_the_bases_pages(
    directory: Path, folders: dict[str, Path], models: dict[str | None, Any]
) -> None:
    prompt = [*TEXT[:50], *INVOCATION]
    with checked_engine(directory, folders, kernels="numba") as llm:
        for name in ("plain", None, "alora", "head", "alora"):
            [done] = llm.generate([prompt], GREEDY, [name])
            assert list(done.token_ids) == answer(models[name], prompt), name
            # The base's three full pages hold 48 tokens; the fourth has the first row of an adapter.
            assert done.timing.num_cached_tokens == {"plain": 0, None: 0}.get(name, 48), name
        # A later place in the same tokens: the pages between are the base's then, not those of the request before.
        longer = [*prompt, *answer(models["alora"], prompt), *TEXT[:9], *INVOCATION]
        both = llm.generate([longer, longer], GREEDY, ["alora", "head"])
        assert [list(done.token_ids) for done in both] == [answer(models[name], longer) for name in ("alora", "head")]
        assert [done.timing.num_cached_tokens for done in both] == [48, 48]
        # Two prompts with the same first three pages, in the third of which the adapter begins to act at two places.
        pages = [*TEXT[:42], *INVOCATION, TEXT[1], *INVOCATION[:2]]
        for ending in ([TEXT[2]], [INVOCATION[2], TEXT[2]]):
            [done] = llm.generate([[*pages, *ending]], GREEDY, ["alora"])
            assert list(done.token_ids) == answer(models["alora"], [*pages, *ending])
            assert done.timing.num_cached_tokens == 32
        [done] = llm.generate([longer], GREEDY, [None])
        assert list(done.token_ids) == answer(models[None], longer)
        assert done.timing.num_cached_tokens == len(longer[: -len(INVOCATION)]) // 16 * 16


def test_requests_that_are_preempted(directory: Path, folders: dict[str, Path], models: dict[str | None, Any]) -> None:
    prompts = [[*TEXT[i : 30 + 3 * i], *INVOCATION, *TEXT[:i]] for i in range(8)]
    names, options = ["alora", "head", "plain", "alora"] * 2, {"max_num_seqs": 8, "max_num_batched_tokens": 24}
    with checked_engine(directory, folders, 30, kernels="numba", **options) as llm:
        expect_short_answers(llm.engine._scheduler.predictor)
        done = llm.generate(prompts, replace(GREEDY, max_tokens=48), names)
        for name, prompt, got in zip(names, prompts, done, strict=True):
            assert list(got.token_ids) == answer(models[name], prompt, 48)
        assert llm.engine.metrics.stats().preemptions_total > 0


def test_a_prompt_without_the_invocation_is_refused(directory: Path, folders: dict[str, Path]) -> None:
    with checked_engine(directory, folders, kernels="numba") as llm:
        # The bytes of the tokens are there, but across tokens.
        for prompt in (TEXT, INVOCATION[:2], [7 << 8, 301, 7]):
            with pytest.raises(InvalidRequest, match=r"invocation tokens \[7, 301, 7\]") as error:
                llm.generate([[token % 384 for token in prompt]], GREEDY, ["alora"])
            assert error.value.param == "prompt"


CHANGES: dict[str, dict[str, Any]] = {
    "token 384; this base has 384 tokens": {"alora_invocation_tokens": [3, 384]},
    "must be a list of token ids": {"alora_invocation_tokens": [7, -1]},
    "must be a list of token ids ": {"alora_invocation_tokens": "assistant"},
    "task_type: = None: PEFT looks for alora_invocation_tokens only with CAUSAL_LM": {"task_type": None},
    "has 257 tokens, and 256 are the most": {"alora_invocation_tokens": [7] * 257},
    "use_dora: does not go with alora_invocation_tokens": {"use_dora": True},
    "does not go with init_lora_weights, in PEFT neither": {"init_lora_weights": "mica", "lora_bias": False},
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_peft_would_not_load_is_refused(
    directory: Path, folders: dict[str, Path], tmp_path: Path, reason: str
) -> None:
    shutil.copytree(folders["alora"], tmp_path / "changed")
    file = tmp_path / "changed" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CHANGES[reason]))
    with checked_engine(directory, kernels="numba") as llm, pytest.raises(AdapterInvalid, match=reason.strip()):
        llm.add_adapter("changed", tmp_path / "changed")


@pytest.mark.parametrize("own", [{"modules_to_save": ["norm"]}, {"trainable_token_indices": [3]}], ids=str)
def test_parts_that_peft_applies_everywhere_are_refused(directory: Path, tmp_path: Path, own: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", alora_invocation_tokens=INVOCATION, **own)
    quietly(quietly(get_peft_model, plain_model(directory), config).save_pretrained, tmp_path)
    with (
        checked_engine(directory, kernels="numba") as llm,
        pytest.raises(AdapterInvalid, match="PEFT applies these before the invocation tokens, too"),
    ):
        llm.add_adapter("everywhere", tmp_path)


@pytest.mark.parametrize("own", [{"alora_invocation_tokens": INVOCATION}, {"velora_config": {}}], ids=str)
def test_the_embedding_has_no_variant_for_linears(directory: Path, tmp_path: Path, own: dict[str, Any]) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "embed_tokens"])
    model = quietly(get_peft_model, plain_model(directory), config)
    quietly(partial(model.save_pretrained, tmp_path, save_embedding_layers=False))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    with pytest.raises(ValueError, match="Invalid or unsupported variant combination"):
        quietly(PeftModel.from_pretrained, plain_model(directory), tmp_path)
    with (
        checked_engine(directory, kernels="numba") as llm,
        pytest.raises(AdapterInvalid, match=f"PEFT has no {next(iter(own))} for embeddings"),
    ):
        llm.add_adapter("embedding", tmp_path)


def test_without_tokens_it_is_a_plain_lora_and_with_them_no_part_of_a_sum(
    directory: Path, folders: dict[str, Path], tmp_path: Path, models: dict[str | None, Any]
) -> None:
    shutil.copytree(folders["alora"], tmp_path / "none")
    file = tmp_path / "none" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alora_invocation_tokens": []}))
    with checked_engine(directory, folders | {"none": tmp_path / "none"}, kernels="numba") as llm:
        assert llm.store.resolve("none").key != llm.store.resolve("alora").key
        # At the beginning of the prompt, the tokens activate all of it.
        prompt = [*INVOCATION, *TEXT[:30]]
        both = llm.generate([prompt, prompt], GREEDY, ["none", "alora"])
        assert [list(done.token_ids) for done in both] == [answer(models["alora"], prompt)] * 2
        with pytest.raises(NotComposable, match="acts only after its invocation tokens"):
            llm.generate([prompt], GREEDY, ["plain+0.5*alora"])
