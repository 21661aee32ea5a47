"""Replicas in several ranks, which are threads here, against one process: the same tokens, and logits to the bit."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from all_drafts import every_draft
from mispredict import expect_short_answers
from partitions import ONE, THREE_HEADS, Told, answers, assert_same, ranks, replica
from peft_adapters import peft_adapter
from rank_threads import ThreadLauncher
from safetensors.torch import load_file, save_file
from tiny_checkpoints import VOCAB, TinyCheckpoint
from tiny_engine import BLOCK, GREEDY, LONG, engine_config

from lorasrv.distributed import model_processes, rank_exchange
from lorasrv.distributed.comm import MemoryComm
from lorasrv.distributed.rank_exchange import RankExchange
from lorasrv.engine import factory
from lorasrv.engine.factory import build
from lorasrv.errors import ConfigError, InvalidRequest
from lorasrv.kv_policy import WindowPolicy
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import SlotMoves
from lorasrv.speculation.drafter import Draft, Drafter, DraftQuery

WIDE = THREE_HEADS | {"head_dim": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("0&1&2", THREE_HEADS),
    "mistral": ("0&1;2", WIDE),
    "qwen2": ("0;1&2", THREE_HEADS),
    "qwen3": ("0&1&2", WIDE | {"attention_bias": True}),
    "gemma": ("0;1;2", {"head_dim": 32}),
    "gemma2": ("0&1;2", WIDE),
    "gemma3": ("0;1&2", WIDE),
    "mpt": ("0&1", {"n_heads": 6, "d_model": 96}),
    "phi3": ("0&1", THREE_HEADS),
    "smollm3": ("0;1&2", THREE_HEADS),
    "granite": ("0&1;2", THREE_HEADS),
    "olmo2": ("0;1;2", {}),
}
"""By family: how it is divided, and what is changed so that three ranks have heads. Gemma has one key head."""
ASKED = [None, "a", "b"]


@pytest.fixture(autouse=True)
def _divides_small_steps() -> Iterator[None]:
    """Rows of a step are divided as soon as two ranks have one each."""
    with patch.object(rank_exchange, "DIVIDED_FROM", 2):
        yield


def adapters_of(model: Path, folder: Path, **configs: Any) -> dict[str, Path]:
    """Adapters of rank 64 and 1 on every linear of a model."""
    for name, rank in (("a", 64), ("b", 1)):
        peft_adapter(model, folder / name, seed=rank, r=rank, **configs)
    return {name: folder / name for name in ("a", "b")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tiny_hf_checkpoints: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    """With adapters of rank 1 and 64 on all linears, in one batch with the base."""
    text, changes = FAMILIES[family]
    model = tiny_hf_checkpoints[family](**changes)
    adapters = adapters_of(model, tmp_path)
    told = answers(model, ranks(text), adapters, ASKED)
    alone = answers(model, ONE, adapters, ASKED)
    assert_same(told, alone)
    assert len({tuple(tokens) for tokens in told.tokens}) == 3
    assert_same(answers(model, ranks("cp=2"), adapters, ASKED), alone)


def test_norms_over_all_heads_are_not_divided(tiny_hf_checkpoints: dict[str, TinyCheckpoint]) -> None:
    with pytest.raises(ConfigError, match=r"olmo2 models norm queries and keys over all heads .*--pp\) or rows"):
        answers(tiny_hf_checkpoints["olmo2"](), ranks("0&1"))


def test_sums_of_adapters(tiny_hf_checkpoints: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    """Terms are cut as adapters are, and weights reach every rank."""
    model = tiny_hf_checkpoints["llama"](**THREE_HEADS)
    adapters, asked = adapters_of(model, tmp_path, lora_bias=True), ["-0.5*b+0.25*a", "a", "0.5*a+2*b"]
    alone = answers(model, ONE, adapters, asked)
    assert len({tuple(tokens) for tokens in alone.tokens}) == 3
    for text in ("0&1;2", "cp=2"):
        assert_same(answers(model, ranks(text), adapters, asked), alone)


@pytest.mark.parametrize(("quantization", "dtype"), [("int4", "bfloat16"), ("q3h", "float32"), ("none", "float32")])
def test_every_format(
    quantization: str, dtype: str, tiny_hf_checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    """Codes are cut, not rounded again. Floats are multiplied by torch, whose sums depend on the width."""
    model = tiny_hf_checkpoints["llama"](**THREE_HEADS | {"hidden_size": 192, "intermediate_size": 192})
    adapters = adapters_of(model, tmp_path)
    options = {"quantization": quantization, "dtype": dtype}
    told = answers(model, ranks("0&1;2"), adapters, ASKED, **options)
    expected = answers(model, ONE, adapters, ASKED, **options)
    if quantization == "none":
        assert told.tokens == expected.tokens
        for got, wanted in zip(told.logits, expected.logits, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    else:
        assert_same(told, expected)


SUMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("0&1&2", THREE_HEADS | {"attention_bias": True, "mlp_bias": True}),
    "gemma3": ("0;1&2", WIDE),
    "mpt": ("0&1", {"n_heads": 6, "d_model": 96}),
    "phi3": ("0&1;2", THREE_HEADS),
}


@pytest.mark.parametrize("family", SUMS)
def test_sums(family: str, tiny_hf_checkpoints: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    """Partial sums of o and down, biases and shifts once, with half of the exchanges; in floats, as rounded inputs of a
    linear may fall to the other side."""
    text, changes = SUMS[family]
    model = tiny_hf_checkpoints[family](**changes)
    adapters = adapters_of(model, tmp_path, lora_bias=True)
    gathered: list[int] = []
    gather = MemoryComm.gather

    def counted(own: MemoryComm, *args: Any) -> list[torch.Tensor]:
        gathered[-1] += own.rank == 1
        return gather(own, *args)

    told = []
    with patch.object(MemoryComm, "gather", counted):
        for exchange in ("sums", "columns"):
            gathered.append(0)
            told.append(answers(model, ranks(text, exchange), adapters, ASKED, quantization="none", dtype="float32"))
    assert 2 * gathered[0] == gathered[1] > 0
    assert told[0].tokens == told[1].tokens
    for got, wanted in zip(told[0].logits, told[1].logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert len({tuple(tokens) for tokens in told[0].tokens}) == 3


def test_sums_of_a_file_of_codes(
    tiny_hf_checkpoints: dict[str, TinyCheckpoint], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """Codes are cut between groups, not rounded again; where they cannot be, the start is refused."""
    source = tiny_hf_checkpoints["llama"]()
    file = write_gguf(source, tmp_path / "tiny.gguf", {"ffn_down": "Q8_0", "": "Q4_0"})
    options = {"quantization": "auto", "dtype": "bfloat16"}
    told, expected = (answers(file, ranks("0&1", kind), **options) for kind in ("sums", "columns"))
    torch.testing.assert_close(told.logits[0], expected.logits[0], rtol=1e-3, atol=1e-3)
    changes = THREE_HEADS | {"num_key_value_heads": 6}
    narrow = write_gguf(tiny_hf_checkpoints["llama"](**changes), tmp_path / "narrow.gguf", {"": "Q4_0"})
    with pytest.raises(ConfigError, match=r"--tp-exchange sums: .*o_proj.* no whole groups of 32"):
        answers(narrow, ranks("0&1", "sums"), **options)


@pytest.mark.parametrize("text", ["0;1", "0&1", "cp=3"])
def test_a_pool_of_codes_and_a_file_of_codes(
    text: str, tiny_hf_checkpoints: dict[str, TinyCheckpoint], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """Keys and values as codes; the weights of a GGUF file with several types, whose head is the embedding. Each of its
    linears is counted once."""
    source = tiny_hf_checkpoints["llama"](tie_word_embeddings=True)
    file = write_gguf(source, tmp_path / "tiny.gguf", {"ffn_down": "Q8_0", "": "Q4_0"})
    counted: list[tuple[int, int]] = []
    options: dict[str, Any] = {
        "then": lambda llm: counted.append((llm.weights.kept, llm.weights.remade)),
        "kv_cache_dtype": "int8",
        "quantization": "auto",
        "dtype": "bfloat16",
        "pool_bytes": 4 << 20,
    }
    assert_same(answers(file, ranks(text), **options), answers(file, ONE, **options))
    assert counted[0] == counted[1] != (0, 0)


@pytest.mark.parametrize(("mode", "text"), [("swap", "0&1"), ("recompute", "0;1"), ("swap", "cp=2")])
def test_preempted_requests(
    mode: str, text: str, tiny_hf_checkpoints: dict[str, TinyCheckpoint], tmp_path: Path
) -> None:
    """A pool that is too small for all of them: pages are swapped, or computed again, in every rank."""
    model = tiny_hf_checkpoints["llama"]()
    adapters = adapters_of(model, tmp_path)
    prompts = [LONG[i : i + 40] for i in range(6)]
    counts = []

    def count(llm: LLM) -> None:
        stats = llm.engine.metrics.stats()
        counts.append((stats.preemptions_total, stats.swaps_total))

    def short(llm: LLM) -> None:
        expect_short_answers(llm.engine._scheduler.predictor)

    def told(options: Any, pages: int) -> Told:
        return answers(
            *(model, options, adapters, [None, "b"] * 3, replace(GREEDY, max_tokens=40), prompts, count, short),
            pool_bytes=pages * BLOCK,
            preemption_mode=mode,
            enable_prefix_caching=False,
        )

    tight = told(ranks(text), 24)
    assert tight.tokens == told(ONE, 200).tokens
    assert counts[0][0] > 0
    assert (counts[0][1] > 0) == (mode == "swap")
    assert counts[1] == (0, 0)


class Knowing(Drafter):
    """Proposes what is said next, or something else."""

    def __init__(self, name: str, answers: dict[int, list[int]], offset: int) -> None:
        self.name, self._answers, self._offset = name, answers, offset

    def draft(self, ask: DraftQuery) -> Draft:
        right = self._answers.get(ask.request.num_prompt_tokens, [])[ask.request.num_generated_tokens :]
        guess = [(token + self._offset) % VOCAB for token in right[: min(3, ask.max_tokens)]]
        return Draft(tuple(guess), (self.name,) * len(guess))


@pytest.mark.parametrize("text", ["0&1", "cp=2"])
def test_cached_prefixes_and_drafts(text: str, tiny_hf_checkpoints: dict[str, TinyCheckpoint]) -> None:
    """Pages that a second request shares, and drafts in trees: accepted ones move to other slots in all ranks."""
    model = tiny_hf_checkpoints["llama"]()
    sampling, prompts = replace(GREEDY, max_tokens=20), [LONG[:40], LONG[:47]]
    said = answers(model, ONE, sampling=sampling, prompts=prompts, asked=[None] * 2).tokens
    right = dict(zip(map(len, prompts), said, strict=True))
    drafters = [Knowing("wrong", right, 1), Knowing("right", right, 0)]
    counted, moved, move = [], [], RankExchange.on_slots_moved

    def count(llm: LLM) -> None:
        stats = llm.engine.metrics.stats()
        counted.append((stats.cached_tokens_total, sum(stats.accepted_draft_tokens_by_chance_total.values())))

    def noted(own: RankExchange, moves: Sequence[SlotMoves]) -> None:
        moved.append(sum(len(one.sources) for one in moves))
        move(own, moves)

    def ask_again(llm: LLM) -> None:
        assert [one.token_ids for one in llm.generate(prompts, sampling)] == said
        count(llm)

    with (
        every_draft(),
        patch.object(factory, "make_drafters", lambda options: drafters),
        patch.object(RankExchange, "on_slots_moved", noted),
    ):
        options = {"speculation": "auto", "draft_trees": True, "draft_head_bytes": 0, "sampling": sampling}
        told = answers(model, ranks(text), prompts=prompts, asked=[None] * 2, then=ask_again, **options)
    assert told.tokens == said
    assert min(counted[0]) > 30
    assert sum(moved) > 0


def test_sampling_and_log_probabilities(tiny_hf_checkpoints: dict[str, TinyCheckpoint]) -> None:
    """Rank 0 samples alone; log-probabilities of a prompt ask for logits of rows in its middle."""
    model = tiny_hf_checkpoints["qwen2"]()
    sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=7, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    alone = answers(model, ONE, sampling=sampling)
    for text in ("0;1", "cp=2", "cp=3"):
        assert_same(answers(model, ranks(text), sampling=sampling), alone)


def test_adapters_with_vectors(tiny_hf_checkpoints: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    """DoRA by stages and rows is exact."""
    model = tiny_hf_checkpoints["qwen2"]()
    adapters = adapters_of(model, tmp_path, use_dora=True)
    alone = answers(model, ONE, adapters, ASKED)
    for text in ("0;1", "cp=2"):
        assert_same(answers(model, ranks(text), adapters, ASKED), alone)


QV = ["q_proj", "v_proj"]


def test_adapters_of_the_ends(model: Path, tmp_path: Path) -> None:
    """LoRA of the embedding and the head, by ranks that have the whole model."""
    adapters = adapters_of(
        model, tmp_path, target_modules=[*QV, "embed_tokens", "lm_head"], save_embedding_layers=False
    )
    told = answers(model, ranks("cp=2"), adapters, ASKED)
    assert_same(told, answers(model, ONE, adapters, ASKED))
    assert len({tuple(tokens) for tokens in told.tokens}) == 3


@pytest.mark.parametrize(
    ("partition", "config", "message"),
    [
        ("0&1", {"use_dora": True}, "use_dora: has DoRA's magnitudes"),
        ("0;1", {"target_modules": [*QV, "lm_head"]}, "lm_head: has LoRA outside the layers"),
        ("0&1", {"target_modules": [*QV, "embed_tokens"]}, "embed_tokens: has LoRA outside the layers"),
        ("0;1", {"target_modules": QV, "modules_to_save": ["lm_head"]}, "lm_head: has rows of the vocabulary"),
        ("0&1", {"target_modules": QV, "trainable_token_indices": [3, 9]}, "embed_tokens: has rows of the vocabulary"),
        ("cp=2", {"target_modules": QV, "added": ["zyxxy"]}, "embed_tokens: has rows of the vocabulary"),
    ],
)
def test_adapters_that_are_refused(
    partition: str, config: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    """By name, when they are first asked for; the base goes on."""
    with replica(model, ranks(partition)) as llm:
        peft_adapter(model, tmp_path / "a", seed=1, **config)
        llm.add_adapter("a", tmp_path / "a")
        with pytest.raises(Exception, match=message):
            llm.generate([LONG[:5]], GREEDY, ["a"])
        assert llm.generate([LONG[:5]], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_layers": 1}, "--draft-layers does not go with --partition 0;1"),
        ({"bf16_linears": "auto"}, "--bf16-linears auto does not go with"),
    ],
)
def test_options_that_are_refused_at_the_start(options: dict[str, Any], message: str, model: Path) -> None:
    config = replace(engine_config(model, speculation="auto", **options), partition=ranks("0;1"))
    with closing(open_checkpoint(str(model))) as checkpoint, pytest.raises(ConfigError, match=message):
        build(checkpoint, config, None)


def test_policies_over_keys_are_refused_and_no_pages_are_lent(model: Path) -> None:
    with replica(model, ranks("0;1")) as llm:
        with pytest.raises(InvalidRequest, match="not with --partition 0;1"):
            llm.generate([LONG[:40]], GREEDY, kv_policy=WindowPolicy())
        assert llm.engine._memory.peer_pages.facts is None, "a reader's thread would ask the ranks beside the engine's"


def test_the_fingerprint_is_that_of_all_ranks(tiny_hf_checkpoints: dict[str, TinyCheckpoint], tmp_path: Path) -> None:
    """A change of the last layer is not rank 0's; replicas with it are not resumed by others."""
    model = tiny_hf_checkpoints["llama"]()
    changed = shutil.copytree(model, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"] *= 2
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})

    def fingerprint(folder: Path) -> str:
        config = engine_config(folder, quantization="int8", kernels="numba")
        launched = patch.object(model_processes, "ProcessLauncher", ThreadLauncher)
        with closing(open_checkpoint(str(folder))) as checkpoint, launched:
            built = build(checkpoint, replace(config, partition=ranks("0;1")), None)
            with closing(built.parts.executor):
                return built.fingerprint

    found = [fingerprint(folder) for folder in (model, model, changed)]
    assert found[0] == found[1] != found[2]
    assert all(found)
