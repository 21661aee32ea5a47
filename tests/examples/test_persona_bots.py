"""The persona example: its data, its training step and its fake quantization. The adapters themselves: tests/e2e."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

PERSONA_BOTS = Path(__file__).parents[2] / "examples" / "persona_bots"
PERSONAS = ("blackbeard", "basho", "wrench")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """example("score") -> that script as a module, and no trace of it afterwards."""
    monkeypatch.syspath_prepend(str(PERSONA_BOTS))
    for name in ("base", "fake_quant", "score", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in ("base", "fake_quant", "score", "train"):
        sys.modules.pop(name, None)


def pairs(name: str) -> list[tuple[str, str]]:
    lines = (PERSONA_BOTS / "data" / f"{name}.jsonl").read_text("utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return [(chat[0]["content"], chat[-1]["content"]) for chat in chats]


@pytest.mark.parametrize("name", PERSONAS)
def test_a_persona_is_trained_on_its_own_style_only(example, name: str) -> None:
    score = example("score")
    assert [answer for _, answer in pairs(name) if not score.style_score(name, answer)] == []


@pytest.mark.parametrize("name", PERSONAS)
def test_no_scored_prompt_was_trained_on(example, name: str) -> None:
    score = example("score")
    trained = [prompt.casefold() for prompt, _ in pairs(name)]
    assert len(set(trained)) == len(trained)
    for prompt_set in score.PROMPT_SETS:
        assert not {prompt.casefold() for prompt in score.read_prompts(prompt_set)}.intersection(trained)


def test_prompt_sets_share_nothing(example) -> None:
    score = example("score")
    asked = [prompt for prompt_set in score.PROMPT_SETS for prompt in score.read_prompts(prompt_set)]
    assert len(set(asked)) == len(asked) == 80


def test_base_needs_local(example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["score.py", "answers.jsonl", "--base", "int8"])
    with pytest.raises(SystemExit) as caught:
        example("score").main()
    assert caught.value.code == 2
    assert "--base needs --local" in capsys.readouterr().err


def test_round_groups_against_a_loop(example) -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 96)
    x[1, 32:64] = 0
    expected = x.clone()
    for row in expected:
        for start in range(0, 96, 32):
            group = row[start : start + 32]
            scale = max(float(group.abs().max()), 1e-12) / 127
            row[start : start + 32] = torch.tensor([round(float(v) / scale) * scale for v in group])
    rounded = example("fake_quant").round_groups(x)
    torch.testing.assert_close(rounded, expected, rtol=1e-5, atol=0)
    assert not torch.equal(rounded, x)


def tiny_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.long
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_quantize_rounds_what_it_says(example, base: str) -> None:
    fake_quant = example("fake_quant")
    exact, model = tiny_model(), tiny_model()
    fake_quant.quantize(model, base)
    for (name, before), after in zip(exact.named_parameters(), model.parameters(), strict=True):
        rounds = base == "int8" and not name.endswith("norm.weight")
        assert torch.equal(after, fake_quant.round_groups(before) if rounds else before), name
    x = torch.randn(5, 64)
    linear = model.model.layers[0].self_attn.q_proj
    assert torch.equal(linear(x), torch.nn.functional.linear(fake_quant.round_groups(x), linear.weight))


def tiny_batch() -> dict[str, torch.Tensor]:
    """Two rows of 7 tokens, the second padded by two; labels on the last three tokens of each."""
    ids = torch.arange(14).reshape(2, 7) + 5
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = torch.full_like(ids, -100)
    labels[0, 4:], labels[1, 2:5] = ids[0, 4:], ids[1, 2:5]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.long
def test_answer_loss_is_the_models_own(example) -> None:
    train = example("train")
    model = train.get_peft_model(tiny_model(), train.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    batch = tiny_batch()
    torch.testing.assert_close(train.answer_loss(model, batch), model(**batch).loss)


def test_noise_is_anew_at_each_pass_and_as_large_as_asked(example) -> None:
    train = example("train")
    model = train.get_peft_model(tiny_model(), train.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    batch = tiny_batch()
    norm = model.get_base_model().model.layers[1].input_layernorm
    norm.weight.data.fill_(5.0)
    x = torch.randn(400, 64)
    clean = norm(x)
    train.add_noise(model, 0.0)
    assert torch.equal(norm(x), clean)
    train.add_noise(model, 0.03)
    error = norm(x) - clean
    relative = error.square().mean(-1).sqrt() / clean.square().mean(-1).sqrt()
    assert 0.028 < float(relative.mean()) < 0.032
    assert train.answer_loss(model, batch) != train.answer_loss(model, batch)
