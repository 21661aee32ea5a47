"""Adapters of the head and of the embedding: logits and answers are PEFT's, beside plain adapters and the base."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_decoder import HandDecoder
from peft_oracles import PeftOracles
from served_logits import last_logits
from tiny_engine import BLOCK

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.int8_codes import CodedTensors
from adapter_store.formats.weights import LoraTensors
from lorasrv.models.lora_sites import VocabBlocks
from lorasrv.sampling_params import BeamOptions, SamplingParams
from lorasrv.scheduler_output import PlannedDrafts
from sgmv_kernels.ops import Ops

QV = ["q_proj", "v_proj"]
HEADS: dict[str, dict[str, Any]] = {
    "head": {"r": 3, "lora_alpha": 5, "target_modules": ["lm_head"]},
    "all": {"r": 20, "lora_alpha": 9, "use_rslora": True, "target_modules": [*QV, "lm_head"]},
    "patterns": {
        "r": 2, "target_modules": ["up_proj", "lm_head"],
        "rank_pattern": {"lm_head": 5}, "alpha_pattern": {"lm_head": 15},
    },
    "embedding": {"r": 18, "lora_alpha": 6, "target_modules": ["embed_tokens"]},
    "both": {"r": 3, "lora_alpha": 5, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "tied": {"r": 4, "lora_alpha": 9, "target_modules": ["lm_head", "v_proj"], "ensure_weight_tying": True},
    "dora": {"r": 4, "target_modules": QV, "use_dora": True},
    "plain": {"r": 4, "target_modules": QV},
}  # fmt: skip
PROMPT = [3 + (131 * i) % 381 for i in range(25)]
"""Tokens of all blocks."""
Oracles = partial(PeftOracles, save_embedding_layers=False)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", pytest.param("mpt", marks=pytest.mark.long)])
def test_heads_in_one_batch_are_pefts(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any, family: str) -> None:
    """Untied and tied bases, with and without a bound of the logits."""
    directory = tiny_hf_checkpoints[family]()
    targets = {"q_proj": "Wqkv", "v_proj": "out_proj", "embed_tokens": "wte"} if family == "mpt" else {}
    adapters = {
        name: config | {"target_modules": [targets.get(own, own) for own in config["target_modules"]]}
        for name, config in HEADS.items()
        if (family, name) != ("mpt", "tied")
    }
    oracles, served = Oracles(directory, tmp_path, adapters), serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    names = [*oracles.models, *reversed(oracles.models)]
    logits = served.first_logits([PROMPT[i:] for i in range(len(names))], names)
    for i, (name, got) in enumerate(zip(names, logits, strict=True)):
        oracles.check(name, got, PROMPT[i:])
    assert max(served.batches) >= len(adapters), "the batch was not mixed"
    bare = [last_logits(oracles.models[None], PROMPT), *(last_logits(oracles.models[n], PROMPT) for n in adapters)]
    assert all((own - bare[0]).abs().max() > 0.02 for own in bare[1:]), "an adapter changes nothing"
    answers = served.llm.generate([PROMPT] * len(names), GREEDY, names)
    for name, answer in zip(names, answers, strict=True):
        assert list(answer.token_ids) == oracles.answer(name, PROMPT, GREEDY.max_tokens), name


def test_prompt_logprobs_of_more_rows_than_answers(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any) -> None:
    """Rows that the decoder keeps no room for, either."""
    directory = tiny_hf_checkpoints["gemma2"]()
    oracles = Oracles(directory, tmp_path, {"head": HEADS["head"]})
    served = serve(directory, max_num_seqs=2)
    served.llm.add_adapter("head", oracles.folders["head"])
    prompts = [[3 + (5 * i) % 300 for i in range(n)] for n in (100, 40)]
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    names = ["head", None]
    for name, prompt, answer in zip(names, prompts, served.llm.generate(prompts, asked, names), strict=True):
        with torch.no_grad():
            logits = oracles.models[name](torch.tensor([prompt])).logits[0]
        want = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        got = [one.logprob for one in answer.prompt_logprobs[1:]]
        torch.testing.assert_close(torch.tensor(got), want, rtol=1e-3, atol=2e-3)


def test_int8_heads_are_pefts_with_the_matrices_of_the_codes(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any
) -> None:
    oracles, served = Oracles(tiny_hf_checkpoints["llama"](), tmp_path, HEADS), serve(tiny_hf_checkpoints["llama"]())
    names = ["head", "all", "both"]
    for name in names:
        served.llm.add_adapter(name, oracles.folders[name], stored="int8", allow_drift=True)
        for module in oracles.models[name].modules():
            pairs = [
                (getattr(module, f"lora_{kind}A", {}), getattr(module, f"lora_{kind}B", {}))
                for kind in ("", "embedding_")
            ]
            for a, b in ((a["default"], b["default"]) for a, b in pairs if "default" in a):
                a, b = (getattr(own, "weight", own).data for own in (a, b))
                codes = CodedTensors(LoraTensors(len(a), 1.0, a.numpy(), b.numpy()), "F32").dequantized()
                for weight, replaced in zip((a, b), codes, strict=True):
                    weight.copy_(torch.from_numpy(replaced))
    for name, got in zip(names, served.first_logits([PROMPT] * 3, names), strict=True):
        oracles.check(name, got, PROMPT)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_recorded_pass_is_the_pass(tiny_hf_checkpoints: Any, tmp_path: Path, family: str) -> None:
    """Bit for bit, whichever of its ends an adapter changes; with a bound of the logits and without."""
    directory = tiny_hf_checkpoints[family]()
    oracles = Oracles(directory, tmp_path, {name: HEADS[name] for name in ("head", "embedding", "both", "plain")})
    recorded, called = (HandDecoder(directory, oracles.folders, tmp_path / n, "numba", weights="int4") for n in "rc")
    assert recorded.decoder._program is not None
    called.decoder._program = None
    table, shown = tuple(range(10)), {}
    for names in ((None, "plain"), ("embedding", None), ("head", "plain"), ("both", "embedding")):
        requests = [(name, PROMPT, 0, tuple(10 * i + page for page in table)) for i, name in enumerate(names)]
        got, want = recorded.logits(requests), called.logits(requests)
        assert all(torch.equal(got[i], want[i]) for i in range(len(requests)))
        best, changes_head = recorded.decoder.likeliest, {"head", "both"} & {*names}
        assert (best is None) == bool(changes_head)
        assert best is None or sorted(best.tolist()) == sorted(got[i].argmax().item() for i in range(len(requests)))
        shown |= {name: got[i] for i, name in enumerate(names)}
    assert all((shown[None] - own).abs().max() > 1e-3 for name, own in shown.items() if name), "nothing changed"


@pytest.mark.parametrize("kernels", ["torch", "numba", pytest.param("triton", marks=pytest.mark.long)])
def test_every_set_of_kernels(tiny_hf_checkpoints: Any, tmp_path: Path, kernels: str) -> None:
    """A vocabulary that no block divides; panels in several runs of pages."""
    directory = tiny_hf_checkpoints["llama"](vocab_size=397)
    oracles = Oracles(directory, tmp_path, HEADS)
    served = HandDecoder(directory, oracles.folders, tmp_path / "store", kernels, in_runs=2)
    prompts = [[*PROMPT[i:], 396, 200] for i in range(len(oracles.models))]
    requests = [(name, prompts[i], 0, tuple(range(i * 10, i * 10 + 10))) for i, name in enumerate(oracles.models)]
    for i, got in served.logits(requests).items():
        oracles.check(requests[i][0], got, requests[i][1])


def test_drafts_are_verified_with_the_adapters_own_head(tiny_hf_checkpoints: Any, tmp_path: Path) -> None:
    """Logits of every row that a draft ends in, and of the base's beside them."""
    directory = tiny_hf_checkpoints["llama"]()
    oracles = Oracles(directory, tmp_path, {"head": HEADS["head"]})
    served = HandDecoder(directory, oracles.folders, tmp_path / "store", "numba", weights="none")
    drafts = (7, 300, 12)
    requests = []
    for i, name in enumerate(oracles.models):
        scheduled = served.scheduled(name, PROMPT, 0, tuple(range(i * 10, i * 10 + 10)))
        requests.append(replace(scheduled, token_ids=(*PROMPT, *drafts), drafts=PlannedDrafts(drafts)))
    for name, rows in zip(oracles.models, served.run(requests), strict=True):
        assert len(rows) == len(drafts) + 1
        for i, got in enumerate(rows):
            oracles.check(name, got, [*PROMPT, *drafts[:i]])


def test_beams_see_the_head(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, {"head": HEADS["head"]}), serve(directory)
    served.llm.add_adapter("head", oracles.folders["head"])
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(GREEDY.max_tokens):
        longer = []
        for score, ids in beams:
            best = last_logits(oracles.models["head"], PROMPT + ids).log_softmax(-1).topk(2)
            longer += [(score + s, [*ids, token]) for s, token in zip(*map(torch.Tensor.tolist, best), strict=True)]
        beams = sorted(longer, reverse=True)[:2]
    [found] = served.llm.beam_search([PROMPT], GREEDY, BeamOptions(2), ["head"])
    assert [list(answer.token_ids) for answer in found] == [ids for _, ids in beams]


def test_heads_come_back_after_eviction(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, HEADS), serve(directory, pool_bytes=12 * BLOCK)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    for name in [*HEADS, *HEADS]:
        [got] = served.first_logits([PROMPT], [name])
        oracles.check(name, got, PROMPT)
    assert served.llm.engine.metrics.stats().adapter_evictions_total > len(HEADS)


def test_steps_without_such_an_adapter_do_nothing_for_it(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, HEADS), serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    calls: list[int] = []
    expand = Ops.expand_
    monkeypatch.setattr(Ops, "expand_", lambda self, y, *rest: (calls.append(len(y)), expand(self, y, *rest)))
    served.first_logits([PROMPT] * 3, ["plain", "dora", None])
    assert not calls
    for name in ("head", "embedding"):
        served.first_logits([PROMPT] * 3, ["plain", name, None])
        assert calls
        calls.clear()


@pytest.mark.parametrize(("vocab", "count"), [(49152, 30), (128256, 32), (397, 3), (384, 4), (64, 5), (7, 3)])
def test_blocks_hold_every_token_once(vocab: int, count: int) -> None:
    blocks = VocabBlocks(vocab, count)
    owned = [token for block in range(count) for token in blocks.owned(block)]
    assert owned == list(range(vocab))
    for block in range(count):
        first = blocks.start(block)
        assert first >= 0
        assert first + blocks.width <= vocab
        assert all(first <= token < first + blocks.width for token in blocks.owned(block))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "DoRA": ({"use_dora": True}, "unsupported_embedding", "has a lora_magnitude_vector; outside the layers"),
    "lora_bias": ({"lora_bias": True, "init_lora_weights": True}, "unsupported_embedding", "has a lora_B.bias"),
    "DoRA of the embedding": (
        {"use_dora": True, "target_modules": ["embed_tokens"]},
        "unsupported_embedding",
        "Train again without model.embed_tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any, case: str) -> None:
    config, code, says = REFUSED[case]
    directory = tiny_hf_checkpoints["llama"]()
    Oracles(directory, tmp_path, {"x": {"r": 3, "target_modules": ["q_proj", "lm_head"]} | config})
    with pytest.raises(AdapterInvalid, match=says) as refused:
        serve(directory).llm.add_adapter("x", tmp_path / "x")
    assert {problem.code for problem in refused.value.problems} == {code}


def test_a_head_that_peft_ties_to_the_embedding_is_refused_unless_untied(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any
) -> None:
    directory = tiny_hf_checkpoints["qwen2"]()
    oracles, served = Oracles(directory, tmp_path, {"x": {"r": 3, "target_modules": ["lm_head"]}}), serve(directory)
    config = tmp_path / "x" / "adapter_config.json"
    saved = config.read_text()
    config.write_text(json.dumps(json.loads(saved) | {"ensure_weight_tying": True}))
    with pytest.raises(AdapterInvalid, match=r"ties the LoRA of lm_head.*set it to false"):
        served.llm.add_adapter("x", tmp_path / "x")
    config.write_text(saved)
    served.llm.add_adapter("x", tmp_path / "x")
    [got] = served.first_logits([PROMPT], ["x"])
    oracles.check("x", got, PROMPT)


UNTIED: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA of another name": ("mpt", {"target_modules": ["Wqkv", "wte"]}),
    "a copy of another name": ("mpt", {"target_modules": ["Wqkv"], "modules_to_save": ["wte"]}),
    "an expression for the full name": ("qwen2", {"target_modules": r"model\.embed_tokens|.*q_proj"}),
}


@pytest.mark.parametrize("case", UNTIED)
@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")
def test_peft_ties_only_tables_that_it_knows_by_name(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any, case: str
) -> None:
    family, config = UNTIED[case]
    directory = tiny_hf_checkpoints[family]()
    oracles = Oracles(directory, tmp_path, {"x": {"r": 3, "ensure_weight_tying": True} | config})
    served = serve(directory)
    served.llm.add_adapter("x", tmp_path / "x")
    [got] = served.first_logits([PROMPT], ["x"])
    oracles.check("x", got, PROMPT)
    assert (got - last_logits(oracles.models[None], PROMPT)).abs().max() > 0.02


@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")
def test_a_config_in_which_peft_does_not_find_the_tied_head_again(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Any
) -> None:
    """PEFT saves the embedding's name in place of the head's, and does not know mpt's; the error says what to add."""
    directory = tiny_hf_checkpoints["mpt"]()
    config = {"r": 3, "target_modules": ["Wqkv", "lm_head"], "ensure_weight_tying": True}
    oracles, served = Oracles(directory, tmp_path, {"x": config}), serve(directory)
    with pytest.raises(AdapterInvalid, match=r"first: lm_head\): PEFT would drop them. Set target_modules"):
        served.llm.add_adapter("x", tmp_path / "x")
    file = tmp_path / "x" / "adapter_config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"target_modules": [*saved["target_modules"], "lm_head"]}))
    served.llm.add_adapter("x", tmp_path / "x")
    [got] = served.first_logits([PROMPT], ["x"])
    oracles.check("x", got, PROMPT)
