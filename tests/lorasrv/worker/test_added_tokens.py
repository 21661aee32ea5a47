"""Tokens that adapters have beyond the base's: logits, answers and texts are PEFT's, beside others and the base."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_decoder import HandDecoder
from peft_oracles import PeftOracles
from safetensors.torch import load_file, save_file
from served_logits import ServedLogits, last_logits

from adapter_store.errors import AdapterInvalid
from lorasrv.errors import InvalidRequest
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import BeamOptions, SamplingParams
from sgmv_kernels.ops import Ops

QV = ["q_proj", "v_proj"]
V = 384
MOODS = {"added": ["<mood>", "zyxxy"], "special": ["<|sad|>"]}
KINDS: dict[str, dict[str, Any]] = {
    "untrained": {"target_modules": QV, **MOODS},
    "copies": {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"], **MOODS},
    "embedding": {"target_modules": QV, "modules_to_save": ["embed_tokens"], "added": [f"t{i}" for i in range(9)]},
    "padded": {"target_modules": QV, "spare": 61, **MOODS},
    "tokens": {"target_modules": QV, "trainable_token_indices": [3, 384, 385, 386], **MOODS},
    "tokens-of-both": {
        "target_modules": QV,
        "trainable_token_indices": {"embed_tokens": [384, 386, 385], "lm_head": [384, 385, 386]},
        **MOODS,
    },
    "plain": {"target_modules": QV},
    "rows": {"target_modules": QV, "trainable_token_indices": {"lm_head": [7, 300]}},
    "lora": {"target_modules": [*QV, "lm_head", "embed_tokens"], "save_embedding_layers": False},
}
PROMPT = [3 + (131 * i) % 381 for i in range(20)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
Serve = Callable[..., ServedLogits]


class Oracles(PeftOracles):
    """Of some of `KINDS`."""

    def __init__(self, directory: Path, folder: Path, names: list[str]) -> None:
        super().__init__(directory, folder, {name: KINDS[name] for name in names}, r=3)

    def num_tokens(self, name: str | None) -> int:
        return int(self.models[name].get_input_embeddings().weight.shape[0])

    def prompt(self, name: str | None, at: int) -> list[int]:
        """One with tokens that only this adapter has, if it has some."""
        own = range(V, self.num_tokens(name))
        return [*PROMPT[at:], *own[:5], 9, *own[-1:]]

    def check(self, name: str | None, got: torch.Tensor, prompt: list[int]) -> None:
        super().check(name, got[: self.num_tokens(name)], prompt)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.exhaustive), "gemma2"])
def test_logits_in_one_batch_are_pefts(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve, family: str) -> None:
    """Untied and tied tables, with and without a scale of the embedding and a bound of the logits."""
    directory = tiny_hf_checkpoints[family]()
    oracles, served = Oracles(directory, tmp_path, [*KINDS]), serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    names = [*oracles.models, *reversed(oracles.models)]
    prompts = [oracles.prompt(name, i % 7) for i, name in enumerate(names)]
    logits = served.first_logits(prompts, names)
    for name, prompt, got in zip(names, prompts, logits, strict=True):
        oracles.check(name, got, prompt)
    assert max(served.batches) >= 4, "the batch was not mixed"
    answers = served.llm.generate(prompts, GREEDY, names)
    said = set[str | None]()
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        oracles.check_answer(name, prompt, list(answer.token_ids))
        said |= {name} if max(answer.token_ids) >= V else set()
    assert "padded" in said, "no answer has a token that the base lacks"


@pytest.mark.parametrize("kernels", ["torch", "numba", pytest.param("triton", marks=pytest.mark.long)])
def test_every_set_of_kernels(tiny_hf_checkpoints: Any, tmp_path: Path, kernels: str) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    oracles = Oracles(directory, tmp_path, ["copies", "tokens-of-both", "plain"])
    served = HandDecoder(directory, oracles.folders, tmp_path / "store", kernels, in_runs=2)
    prompts = [oracles.prompt(name, i) for i, name in enumerate(oracles.models)]
    shares = [(name, prompts[i], 0, tuple(range(i * 10, i * 10 + 10))) for i, name in enumerate(oracles.models)]
    for i, got in served.logits(shares).items():
        oracles.check(shares[i][0], got, shares[i][1])


def test_a_row_has_the_same_bits_alone_and_beside_others(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve
) -> None:
    """Probabilities and draws, too: they are sums over as many columns as the row's own adapter has."""
    directory = tiny_hf_checkpoints["llama"]()
    names = ["copies", "padded", "plain", None]
    oracles, served = Oracles(directory, tmp_path, [n for n in names if n]), serve(directory, quantization="int8")
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    sampling = SamplingParams(max_tokens=8, temperature=1.5, seed=3, logprobs=5, prompt_logprobs=2, ignore_eos=True)
    prompts = {name: oracles.prompt(name, 0) for name in names}
    alone = {name: served.llm.generate([prompts[name]], sampling, [name])[0] for name in names}
    together = served.llm.generate([prompts[n] for n in names * 2], sampling, names * 2)
    for name, answer in zip(names * 2, together, strict=True):
        assert answer.token_ids == alone[name].token_ids
        assert answer.logprobs == alone[name].logprobs
        assert answer.prompt_logprobs == alone[name].prompt_logprobs
        assert name in ("copies", "padded") or max(answer.token_ids) < V


def test_the_base_never_says_or_takes_an_adapters_tokens(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve
) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, ["copies", "padded", "plain"]), serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    llm, likely = served.llm, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logit_bias=((386, 100.0),))
    [answer] = llm.generate([PROMPT], likely, ["copies"])
    assert answer.token_ids == [386] * 4
    for name, size in (("plain", 384), (None, 384), ("copies", 387), ("padded", 448)):
        with pytest.raises(InvalidRequest, match=rf"token ids must lie in \[0, {size}\)"):
            llm.generate([[5, size]], GREEDY, [name])
        with pytest.raises(InvalidRequest, match=rf"in \[0, {size}\)"):
            llm.generate([[5]], SamplingParams(max_tokens=1, logit_bias=((size, 1.0),)), [name])


def test_beams_are_transformers(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve) -> None:
    """Candidates are the tokens of the row's own adapter, in steps with others."""
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, ["padded", "plain"]), serve(directory)
    beams, names = BeamOptions(4, length_penalty=0.5), ["padded", "plain"]
    prompts = [oracles.prompt(name, 1) for name in names]
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    found = served.llm.beam_search(prompts, replace(GREEDY, temperature=1.0), beams, names)
    for name, prompt, answers in zip(names, prompts, found, strict=True):
        oracles.models[name].generation_config.eos_token_id = None
        with torch.inference_mode():
            want = oracles.models[name].generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=4,
                num_return_sequences=4,
                length_penalty=0.5,
                max_new_tokens=6,
                do_sample=False,
                pad_token_id=0,
            )
        assert [list(answer.token_ids) for answer in answers] == want[:, len(prompt) :].tolist(), name
    said = [max(token for answer in answers for token in answer.token_ids) for answers in found]
    assert said[0] >= V > said[1]


def test_tables_without_the_bases_spare_rows(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve) -> None:
    """`resize_token_embeddings(len(tokenizer))` adds no token to a base whose tables are padded, and shortens them."""
    directory = tiny_hf_checkpoints["qwen2"](vocab_size=V + 13, eos_token_id=V + 6)
    config = {"target_modules": QV, "r": 3, "spare": 0}
    oracles = PeftOracles(directory, tmp_path, {"short": config, "plain": {"target_modules": QV, "r": 3}})
    served = serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    names = [*oracles.models, *reversed(oracles.models)]
    for name, got in zip(names, served.first_logits([PROMPT] * len(names), names), strict=True):
        oracles.check(name, got[: V if name == "short" else None], PROMPT)
    spoken = replace(GREEDY, logit_bias=((V + 5, 100.0),))
    assert served.llm.generate([PROMPT], spoken, ["plain"])[0].token_ids == [V + 5] * 6
    for refused, sampling in (([5, V], GREEDY), (PROMPT, spoken)):
        with pytest.raises(InvalidRequest, match=rf"in \[0, {V}\)"):
            served.llm.generate([refused], sampling, ["short"])
    # The adapter lacks the token that ends an answer, too.
    [answer] = served.llm.generate([PROMPT], replace(GREEDY, ignore_eos=False, min_tokens=2), ["short"])
    oracles.check_answer("short", PROMPT, list(answer.token_ids))


@pytest.mark.parametrize("case", ["copies", "LoRA"])
def test_padding_is_refused_until_it_is_cut_off(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve, case: str
) -> None:
    """Tables with more rows than there are tokens, and no tokenizer that names any, as the errors say."""
    ends = ["embed_tokens", "lm_head"]
    config = {"copies": {"target_modules": QV, "modules_to_save": ends}, "LoRA": {"target_modules": [*QV, *ends]}}[case]
    directory = tiny_hf_checkpoints["qwen2"]()
    oracles, served = PeftOracles(directory, tmp_path, {"x": {"r": 3, "spare": 16} | config}), serve(directory)
    with pytest.raises(AdapterInvalid, match="has 400 rows or columns to the first 384") as refused:
        served.llm.add_adapter("x", tmp_path / "x")
    assert ("Was the model resized?" in str(refused.value)) == (case == "LoRA")
    file = tmp_path / "x" / "adapter_model.safetensors"
    save_file({name: t[:V, :V].contiguous() if 400 in t.shape else t for name, t in load_file(file).items()}, file)
    served.llm.add_adapter("x", tmp_path / "x")
    got, base = served.first_logits([PROMPT] * 2, ["x", None])
    torch.testing.assert_close(got, last_logits(oracles.models["x"], PROMPT)[:V], rtol=1e-3, atol=1e-3)
    assert (got - base).abs().max() > 0.02


def test_texts_are_written_with_the_adapters_tokens(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve) -> None:
    """As transformers does with the tokenizer that was saved beside the adapter; stop strings see added tokens."""
    from transformers import AutoTokenizer

    directory = tiny_hf_checkpoints["qwen2"]()
    oracles, served = Oracles(directory, tmp_path, ["untrained", "embedding", "plain"]), serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    text = "a <mood> of zyxxy, t3<|sad|>t8"
    for name, folder in (
        ("untrained", tmp_path / "untrained"),
        ("embedding", tmp_path / "embedding"),
        (None, directory),
    ):
        own = served.llm.tokenizer_of(name)
        theirs = AutoTokenizer.from_pretrained(folder)
        assert own.encode(text) == theirs(text)["input_ids"]
        assert own.decode(own.encode(text), skip_special_tokens=False) == text
    assert served.llm.tokenizer_of("plain") is served.llm.tokenizer
    says = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logit_bias=((385, 100.0),))
    told = [AutoTokenizer.from_pretrained(tmp_path / "untrained").decode([385] * 4)]
    [answer] = served.llm.generate([text], says, ["untrained"])
    assert ([answer.text], answer.num_prompt_tokens) == (told, len(served.llm.tokenizer_of("untrained").encode(text)))
    [stopped] = served.llm.generate([text], replace(says, stop=("yxx",)), ["untrained"])
    assert (stopped.text, stopped.stop_reason, stopped.token_ids) == ("z", "yxx", [385])


def test_drafts_are_the_bases_tokens_only(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve) -> None:
    """Answers with drafts are those without; models, which know the base's tokens alone, are not asked."""
    directory = tiny_hf_checkpoints["llama"]()
    oracles = Oracles(directory, tmp_path, ["padded", "plain"])
    prompt, free = oracles.prompt("padded", 0), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    # Loops of an added token, and of others.
    sampling = [replace(free, logit_bias=((385, 100.0),)), free]
    answers = list[list[int]]()
    drafting = {"speculation": "auto", "drafters": ("lookup", "layers"), "draft_layers": 3}
    for options in ({"speculation": "off"}, drafting):
        served = serve(directory, quantization="int8", **options)
        for name, folder in oracles.folders.items():
            served.llm.add_adapter(name, folder)
        for params in sampling:
            answers.append(list(served.llm.generate([prompt], params, ["padded"])[0].token_ids))
    assert answers[:2] == answers[2:]
    assert answers[0] == [385] * 40
    assert max(answers[1]) >= V, "no answer has a token that the base lacks"
    for name in ("padded", "plain"):
        key = served.llm.store.resolve(name).key
        message = served.llm.input_processor.process(RequestId(name), PROMPT, free, RequestOptions(adapter_key=key))
        assert [message.speculation.allows(drafter) for drafter in drafting["drafters"]] == [True, name == "plain"]


def test_steps_without_such_an_adapter_do_nothing_for_it(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, ["plain", "rows", "copies"]), serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    widths: list[int] = []
    known = Ops.own_logits_
    monkeypatch.setattr(
        Ops, "own_logits_", lambda self, logits, *given: (widths.append(logits.shape[1]), known(self, logits, *given))
    )
    served.first_logits([PROMPT] * 2, ["plain", None])
    assert not widths
    served.first_logits([PROMPT] * 3, ["plain", "rows", None])
    assert set(widths) == {384}
    served.first_logits([PROMPT] * 3, ["plain", "copies", None])
    assert set(widths) == {384, 387}


def test_tokens_make_another_content(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve) -> None:
    """The same weights, whose added rows have other names."""
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, ["untrained"]), serve(directory)
    first = served.llm.add_adapter("x", oracles.folders["untrained"])
    again = served.llm.add_adapter("x", oracles.folders["untrained"])
    file = oracles.folders["untrained"] / "tokenizer.json"
    described = json.loads(file.read_text())
    described["added_tokens"][-2]["content"] = "wxyz"
    file.write_text(json.dumps(described))
    second = served.llm.add_adapter("x", oracles.folders["untrained"])
    assert (first.version, again.version, second.version) == (1, 1, 2)
    assert served.llm.tokenizer_of("x@2").token(385) == "wxyz"
