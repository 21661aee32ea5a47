"""Own rows of the vocabulary: logits and answers are PEFT's, beside plain adapters and the base."""

import json
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hand_decoder import HandDecoder
from peft_oracles import PeftOracles
from safetensors.torch import load_file, save_file
from served_logits import ServedLogits
from tiny_engine import BLOCK

from adapter_store.errors import AdapterInvalid
from lorasrv.models.loader import open_checkpoint
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.adapter_rows import own_tokens
from sgmv_kernels.ops import Ops

QV = ["q_proj", "v_proj"]
TOKENS = [7, 300, 12, 381, 3]
ROWS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": QV, "modules_to_save": ["embed_tokens"]},
    "head": {"target_modules": QV, "modules_to_save": ["lm_head", "norm"]},
    "both": {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
    "tied": {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "lora-beside-its-base": {"target_modules": [*QV, "lm_head"], "save_embedding_layers": True},
    "lora-and-a-copy": {"target_modules": [*QV, "lm_head"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": QV, "trainable_token_indices": TOKENS},
    "tokens-of-the-head": {"target_modules": QV, "trainable_token_indices": {"lm_head": [*range(60), 12 * 31]}},
    "tokens-of-both": {"target_modules": QV, "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}},
    "tokens-of-each": {"target_modules": QV, "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [9, 7]}},
    "tokens-and-lora": {"target_modules": [*QV, "lm_head"], "trainable_token_indices": TOKENS},
    "lora": {"target_modules": [*QV, "lm_head", "embed_tokens"], "save_embedding_layers": False},
    "plain": {"target_modules": QV},
}
PROMPT = [*TOKENS, *(3 + (131 * i) % 381 for i in range(20))]
Oracles = partial(PeftOracles, r=3)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
Serve = Callable[..., ServedLogits]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_logits_in_one_batch_are_pefts(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve, family: str) -> None:
    """Untied and tied tables, with and without a scale of the embedding and a bound of the logits."""
    directory = tiny_hf_checkpoints[family]()
    oracles, served = Oracles(directory, tmp_path, ROWS), serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    names = [*oracles.models, *reversed(oracles.models)]
    logits = served.first_logits([PROMPT[i % 7 :] for i in range(len(names))], names)
    for i, (name, got) in enumerate(zip(names, logits, strict=True)):
        oracles.check(name, got, PROMPT[i % 7 :])
    assert max(served.batches) >= 4, "the batch was not mixed"
    answers = served.llm.generate([PROMPT] * len(names), GREEDY, names)
    for name, answer in zip(names, answers, strict=True):
        oracles.check_answer(name, PROMPT, list(answer.token_ids))


@pytest.mark.parametrize("kernels", ["torch", "numba", pytest.param("triton", marks=pytest.mark.long)])
def test_every_set_of_kernels(tiny_hf_checkpoints: Any, tmp_path: Path, kernels: str) -> None:
    """A vocabulary that takes several blocks in each slab; panels in several runs of pages."""
    directory = tiny_hf_checkpoints["llama"](vocab_size=397)
    names = ["both", "tokens-of-each", "lora-and-a-copy", "plain"]
    oracles = Oracles(directory, tmp_path, {name: ROWS[name] for name in names})
    served = HandDecoder(directory, oracles.folders, tmp_path / "store", kernels, in_runs=2)
    prompts = [[*PROMPT[i:], 396, 200] for i in range(len(oracles.models))]
    shares = [(name, prompts[i], 0, tuple(range(i * 10, i * 10 + 10))) for i, name in enumerate(oracles.models)]
    for i, got in served.logits(shares).items():
        oracles.check(shares[i][0], got, shares[i][1])


def test_a_row_has_the_same_bits_alone_and_beside_others(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve
) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    names = ["both", "tokens-of-each"]
    oracles, served = (
        Oracles(directory, tmp_path, {name: ROWS[name] for name in names}),
        serve(directory, quantization="int8"),
    )
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    alone = {name: served.first_logits([PROMPT], [name])[0] for name in names}
    served.llm.engine.check_integrity()
    many = names * 3
    prompts = [PROMPT if i < 2 else PROMPT[i:] for i in range(len(many))]
    together = served.first_logits(prompts, many)
    assert all(torch.equal(alone[name], together[i]) for i, name in enumerate(names))


def layout_tokens(served: ServedLogits, adapter: str) -> tuple[list[int], list[int]]:
    """Tokens whose rows are the adapter's own: of the head, and of the embedding."""
    key = served.llm.store.resolve(adapter).key
    rows = served.llm.input_processor.layout(key).rows
    if rows is None:
        return [], []
    head, embedding = (own.tolist() for own in rows.row_tokens.tokens)
    return head, embedding


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


HEAD_COPY, EMBEDDING_COPY = (
    f"base_model.model.{name}" for name in ("lm_head.base_layer.weight", "model.embed_tokens.weight")
)


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_rows_that_are_the_bases_take_no_room(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve, weights: str
) -> None:
    """A copy of the base's head, one whose rows were rounded by another type, and a copy of which two rows were
    trained."""
    directory = tiny_hf_checkpoints["llama"](dtype="bfloat16")
    oracles = Oracles(directory, tmp_path, {name: ROWS[name] for name in ("lora-beside-its-base", "embedding")})
    served = serve(directory, quantization=weights)
    served.llm.add_adapter("same", oracles.folders["lora-beside-its-base"])
    assert layout_tokens(served, "same") == ([], [])
    embedding = open_checkpoint(str(directory)).tensor("model.embed_tokens.weight").float()

    def train(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EMBEDDING_COPY] = embedding.clone()
        tensors[EMBEDDING_COPY][[5, 200]] *= 1.001

    rewrite(oracles.folders["embedding"], train)
    served.llm.add_adapter("trained", oracles.folders["embedding"])
    assert layout_tokens(served, "trained") == ([], [5, 200])

    def half(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD_COPY] = tensors[HEAD_COPY].half() * 1.0005

    rewrite(oracles.folders["lora-beside-its-base"], half)
    served.llm.add_adapter("rounded", oracles.folders["lora-beside-its-base"])
    head, _ = layout_tokens(served, "rounded")
    assert len(head) == (0 if weights == "int8" else 384), "floats are compared bit by bit, codes up to their rounding"

    def another(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD_COPY][[4, 9]] = torch.randn(2, 64).half()

    rewrite(oracles.folders["lora-beside-its-base"], another)
    served.llm.add_adapter("another", oracles.folders["lora-beside-its-base"])
    head, _ = layout_tokens(served, "another")
    assert weights == "none" or head == [4, 9]


def test_the_bases_own_table_replaces_both_where_they_are_tied(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve
) -> None:
    """PEFT loads it over the base's parameter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory = tiny_hf_checkpoints["qwen2"]()
    oracles = Oracles(
        directory, tmp_path, {"x": {"target_modules": [*QV, "embed_tokens"], "save_embedding_layers": True}}
    )
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    rewrite(oracles.folders["x"], lambda tensors: tensors[name].index_fill_(0, torch.tensor([*TOKENS, 77]), 0.3))
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ensure_weight_tying")
        oracles.models["x"] = PeftModel.from_pretrained(base, oracles.folders["x"]).eval()
    served = serve(directory)
    served.llm.add_adapter("x", oracles.folders["x"])
    assert layout_tokens(served, "x") == (sorted([*TOKENS, 77]),) * 2
    [got] = served.first_logits([PROMPT], ["x"])
    oracles.check("x", got, PROMPT)


def test_rows_come_back_after_eviction(tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    some = {name: ROWS[name] for name in ("both", "tokens-of-both", "lora-and-a-copy", "plain")}
    oracles, served = Oracles(directory, tmp_path, some), serve(directory, pool_bytes=24 * BLOCK)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    for name in [*some, *some]:
        [got] = served.first_logits([PROMPT], [name])
        oracles.check(name, got, PROMPT)
    assert served.llm.engine.metrics.stats().adapter_evictions_total > 0


def test_steps_without_such_an_adapter_do_nothing_for_it(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, {n: ROWS[n] for n in ("plain", "both", "lora")}), serve(directory)
    for name, folder in oracles.folders.items():
        served.llm.add_adapter(name, folder)
    calls: list[str] = []
    for op in ("own_logits_", "own_embeddings_"):
        known = getattr(Ops, op)
        monkeypatch.setattr(Ops, op, lambda self, *given, op=op, known=known: (calls.append(op), known(self, *given)))
    served.first_logits([PROMPT] * 3, ["plain", "lora", None])
    assert not calls
    served.first_logits([PROMPT] * 3, ["plain", "both", None])
    assert set(calls) == {"own_logits_", "own_embeddings_"}


def test_what_config_says_about_rows_makes_another_content(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve
) -> None:
    """The same file, whose rows stand for other tokens."""
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, {"tokens": ROWS["tokens"]}), serve(directory)
    other = tmp_path / "other"
    shutil.copytree(oracles.folders["tokens"], other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"trainable_token_indices": [8, 300, 12, 381, 3]}))
    first = served.llm.add_adapter("x", oracles.folders["tokens"])
    second = served.llm.add_adapter("x", other)
    assert (first.version, second.version) == (1, 2)
    assert first.key != second.key
    assert layout_tokens(served, "x@2")[1] == sorted([8, 300, 12, 381, 3])


def test_a_table_over_the_limit_is_refused_with_its_size(
    tiny_hf_checkpoints: Any, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    oracles, served = Oracles(directory, tmp_path, {"both": ROWS["both"], "tokens": ROWS["tokens"]}), serve(directory)
    monkeypatch.setattr("adapter_store.validation.vocab_rows.MAX_ROW_BYTES", 2 * 384 * 64 * 2 - 1)
    served.llm.add_adapter("tokens", oracles.folders["tokens"])
    with pytest.raises(AdapterInvalid, match="hold 98304 bytes in bf16, and 98303 are the most") as refused:
        served.llm.add_adapter("both", oracles.folders["both"])
    assert {problem.code for problem in refused.value.problems} == {"own_rows_too_large"}


def test_rows_are_blocks_of_about_equal_size_in_all_slabs(tiny_hf_checkpoints: Any, tmp_path: Path) -> None:
    from lorasrv.models.lora_sites import BLOCK_ROWS, LEAST_ROWS, rows_layout

    spec = open_checkpoint(str(tiny_hf_checkpoints["llama"](vocab_size=397))).spec
    for vocab, slabs, counts in ((397, 3, (0, 397)), (397, 3, (17, 1)), (397, 3, (100, 384))):
        tokens = tuple(np.arange(count) for count in counts)
        layout = rows_layout(spec, tokens, 4)
        assert layout is not None
        assert layout.num_layers % slabs == 0
        for site, count in enumerate(counts):
            sizes = [panels[site].total_rank for panels in layout.panels]
            assert sum(sizes) == count <= vocab
            assert [len(layout.row_tokens.block(site, layer)) for layer in range(layout.num_layers)] == sizes
            assert max(sizes) <= min(BLOCK_ROWS, max(LEAST_ROWS, -(-count // slabs)))


def test_one_load_at_a_time_reads_rows_of_the_head() -> None:
    """Rows in fp32 take memory, and adapters are read by several threads."""
    now, most = [0], [0]

    class Head:
        def rows(self, ids: torch.Tensor) -> torch.Tensor:
            now[0] += 1
            most[0] = max(most[0], now[0])
            time.sleep(0.05)
            now[0] -= 1
            return torch.zeros(len(ids), 4)

    names = SimpleNamespace(embedding="model.embed_tokens")
    spec = SimpleNamespace(vocab_size=8, hidden_size=4, tied_head=False, names=names)
    base: Any = SimpleNamespace(spec=spec, head=Head(), row_prints={}, final_norm=torch.ones(4), has_float_tables=False)
    rows = np.zeros((8, 4), np.float32)
    rows[3] = 1
    own = SimpleNamespace(module="lm_head", token_ids=None, frozen=False)
    adapter: Any = SimpleNamespace(spec=SimpleNamespace(rows=(own,), vocab_size=0), rows=(rows,))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: own_tokens(base, adapter, torch.bfloat16)[0].tolist(), range(4)))
    assert (found, most) == ([[3]] * 4, [1])
