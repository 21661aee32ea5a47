"""Building an engine: what depends on the machine, that an answer does not depend on other requests, and a KV format
that only its own file knows."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mispredict import expect_short_answers
from peft_adapters import peft_adapter
from tiny_checkpoints import write_tiny
from tiny_engine import GREEDY, engine_config, offline_engine
from toy_kv import TOY, VALUE_SCALES

from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SpeculationOptions
from lorasrv.engine.factory import build
from lorasrv.errors import ConfigError, NotEnoughMemory
from lorasrv.llm import LLM
from lorasrv.memory.memory_manager import PoolLayout
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.spec import operations
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker import base_format
from lorasrv.worker.base_format import make_ops
from lorasrv.worker.model_runner import ModelRunner
from sgmv_kernels import ops
from sgmv_kernels.cpu_ops import backend as backend_numba
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.weight_codes import INT4_LEVELS
from sgmv_kernels.ops import Ops

CPU = torch.device("cpu")
WIDE_BLOCK = 16 * 2 * 2 * 64 * 4
"""Bytes of a page of `wide`: 16 tokens, keys and values of 2 heads of 64 in float32."""


@pytest.mark.parametrize(
    ("bf16_linears", "free", "width", "copied"),
    [("auto", 6.0, 2048, True), ("auto", 4.0, 2048, False), ("auto", 99.0, 576, False), ("off", 99.0, 2048, False)],
)
def test_bf16_copies_are_made_where_they_pay(
    monkeypatch: pytest.MonkeyPatch, bf16_linears: str, free: float, width: int, copied: bool
) -> None:
    """`free`: times what the copies of all layers take."""
    checkpoint = open_checkpoint("smollm2-135m")
    spec = replace(checkpoint.spec, hidden_size=width)
    needed = 2 * spec.num_layers * sum(site.in_features * sum(site.out_features) for site in spec.sites())
    assert needed == operations(spec).token
    monkeypatch.setattr(backend_numba, "wide_rows", lambda: 64)
    monkeypatch.setattr(base_format, "free_bytes", lambda: int(free * needed))
    kernels = make_ops(ModelOptions(kernels="numba", bf16_linears=bf16_linears), spec, CPU)
    checkpoint.close()
    scales = torch.ones((32, 2), dtype=torch.float16)
    codes = GroupQuantizedWeight(torch.ones((32, 64), dtype=torch.uint8), scales, scales, INT4_LEVELS)
    plain = 32 * 64 * 5 // 8
    assert kernels.pack_linear(codes, None).nbytes == plain + (2 * 32 * 64 if copied else 0)
    assert kernels.pack_linear(codes, None, few_rows=True).nbytes == plain


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random base of the smallest width that gets bf16 copies, with two adapters in its folders `one` and `two`."""
    folder = tmp_path_factory.mktemp("wide")
    shape = {"hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 32}
    write_tiny(folder, "llama", initializer_range=0.02, **shape)
    for rank, name in ((3, "one"), (16, "two")):
        peft_adapter(folder, folder / name, r=rank, lora_alpha=rank)
    return folder


PROMPTS = [[3 + (11 * i + 5 * j) % 370 for j in range(length)] for i, length in enumerate((7, 1, 33, 64, 90, 64, 150))]
NAMES = [None, "one", "two", None, "one", "one", "two"]
SAMPLING = [
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8 * (i % 2), seed=i, logprobs=4)
    for i in range(len(PROMPTS))
]
ALONE = [slice(i, i + 1) for i in range(len(PROMPTS))]


def _answers(model: Path, batches: Sequence[slice], tokens: int, pages: int = 600, **options: Any) -> list[Any]:
    """(tokens, log-probabilities) of each prompt; the prompts of a slice share their batches."""
    options |= {"kernels": "numba", "pool_bytes": pages * WIDE_BLOCK, "swap_bytes": 1 << 24}
    options |= {"max_num_batched_tokens": tokens, "max_num_seqs": 12, "target_itl_ms": None}
    with offline_engine(model, {name: model / name for name in ("one", "two")}, **options) as llm:
        done = [llm.generate(PROMPTS[batch], SAMPLING[batch], NAMES[batch]) for batch in batches]
    return [(answer.token_ids, answer.logprobs) for batch in done for answer in batch]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor on which bf16 copies were measured to be faster from 8 rows on."""
    backend = replace(backend_numba.BACKEND, wide_rows=lambda: 8)
    monkeypatch.setattr(backend_numba, "wide_rows", backend.wide_rows)
    monkeypatch.setattr(ops, "load_backend", lambda name: backend)


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.long)])
def test_an_answer_is_the_same_to_the_bit_alone_and_in_any_batch(wide: Path, quantization: str, measured: None) -> None:
    """By default on every CPU: in chunks of prompts, with prefix hits (two prompts begin alike), in a small pool."""
    alone = _answers(wide, ALONE, 512, quantization=quantization)
    for tokens, pages in ((512, 600), (24, 90)):
        assert _answers(wide, [slice(None)] * 2, tokens, pages, quantization=quantization) == 2 * alone
    if quantization == "int8":
        copied = _answers(wide, [slice(None)], 512, quantization=quantization, bf16_linears="auto")
        assert copied != alone, "the test sees a difference where there is one"


@pytest.mark.parametrize(
    ("options", "is_invariant"),
    [
        ({}, True),
        ({"quantization": "int4"}, True),
        ({"quantization": "none"}, False),
        ({"kernels": "torch"}, False),
        ({"draft_trees": True}, False),
    ],
)
def test_what_makes_an_answer_depend_on_its_batch_says_so(
    model: Path, options: dict[str, Any], is_invariant: bool
) -> None:
    speculation = SpeculationOptions(draft_trees="draft_trees" in options)
    of_model = ModelOptions(device="cpu", **{name: value for name, value in options.items() if name != "draft_trees"})
    config = EngineConfig(of_model, memory=MemoryOptions(pool_bytes=1 << 22), speculation=speculation)
    with closing(open_checkpoint(str(model))) as checkpoint:
        assert build(checkpoint, config, None).is_batch_invariant == is_invariant


def test_bf16_copies_make_an_answer_depend_on_its_batch(measured: None) -> None:
    assert not Ops(CPU, "numba", copies=True).is_batch_invariant
    assert Ops(CPU, "numba").is_batch_invariant


# A KV format of tests.

LAYERS, KV_HEADS, DIM, PAGE = 3, 2, 16, 16
BLOCK = LAYERS * TOY.page_bytes(KV_HEADS, DIM, PAGE)
ASKED = [[10 + (7 * i + n) % 300 for i in range(20)] for n in range(6)]


@pytest.fixture
def opened(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """opened(pages, kv_cache_dtype, **options): an engine with a pool of so many pages of the registered format."""
    monkeypatch.setitem(KV_FORMATS, TOY.name, TOY)

    def engine(pages: int, kv_cache_dtype: str = TOY.name, **options: Any) -> AbstractContextManager[LLM]:
        known = {"pool_bytes": pages * BLOCK, "swap_bytes": 64 * BLOCK, "kernels": "torch", **options}
        return offline_engine(model, kv_cache_dtype=kv_cache_dtype, **known)

    return engine


def test_the_pool_counts_in_pages_of_the_format(opened) -> None:
    with opened(40) as llm:
        assert llm.engine.metrics.stats().pages_total == 40
        assert llm.engine._parts.memory.layout.block_bytes == BLOCK
    with opened(40, "float32") as llm:
        floats = KV_FORMATS["float32"].page_bytes(KV_HEADS, DIM, PAGE) * LAYERS
        assert llm.engine.metrics.stats().pages_total == 40 * BLOCK // floats < 20
    rounded_down = PoolLayout.of_bytes(7 * 5 * 6528 + 4000, TOY.page_bytes(3, 64, 16), 16, 5)
    assert rounded_down == PoolLayout(num_pages=7, page_size=16, page_bytes=6528, num_slabs=5)


def test_answers_are_near_those_of_float_pages(opened) -> None:
    asked = replace(GREEDY, max_tokens=4, prompt_logprobs=0)
    found: dict[str, list[float]] = {}
    for kv_dtype in (TOY.name, "float32"):
        with opened(400, kv_dtype) as llm:
            known = (known for answer in llm.generate(ASKED, asked) for known in answer.prompt_logprobs or ())
            found[kv_dtype] = [one.logprob for one in known if one is not None]
            pages = llm.engine._parts.executor.runner._memory.kv_pages(1)
            assert (VALUE_SCALES in pages.parts) == (kv_dtype == TOY.name)
            assert (pages.slab != 0).any()
    errors = [abs(one - other) for one, other in zip(found[TOY.name], found["float32"], strict=True)]
    assert 0 < max(errors) < 0.05


@pytest.mark.parametrize(
    ("kv_cache_dtype", "kernels", "preemption"),
    [
        (TOY.name, "torch", "swap"),
        ("int8", "numba", "swap"),
        ("k8v4", "numba", "recompute"),
        pytest.param("int8", "numba", "recompute", marks=pytest.mark.exhaustive),
        pytest.param("k8v4", "numba", "swap", marks=pytest.mark.exhaustive),
    ],
)
def test_pages_are_copied_swapped_and_found_again_with_their_scales(
    opened, kv_cache_dtype: str, kernels: str, preemption: str
) -> None:
    """Kernels whose bits do not depend on the batch give the same log-probabilities to the bit."""
    sampling, kinds = replace(GREEDY, max_tokens=36, logprobs=2), (kv_cache_dtype, kernels)

    def answers(llm: LLM, asked: Sequence[Sequence[int]]) -> list[Any]:
        found = llm.generate(asked, sampling)
        return [(one.token_ids, one.logprobs if kernels == "numba" else None) for one in found]

    options = {"kernels": kernels, "quantization": "int4" if kernels == "numba" else "auto"}
    block = LAYERS * KV_FORMATS[kv_cache_dtype].page_bytes(KV_HEADS, DIM, PAGE)
    with opened(400, kv_cache_dtype, enable_prefix_caching=False, max_num_batched_tokens=512, **options) as llm:
        alone = [one for asked in ASKED for one in answers(llm, [asked])]
    small = {"pool_bytes": 14 * block, "swap_bytes": 64 * block, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    with opened(14, kv_cache_dtype, preemption_mode=preemption, **options, **small) as llm:
        expect_short_answers(llm.engine._parts.scheduler.predictor)
        assert answers(llm, ASKED) == alone, kinds
        # The first pages of prompts are still there.
        assert answers(llm, ASKED[-2:]) == alone[-2:], kinds
        stats = llm.engine.metrics.stats()
        llm.engine.check_integrity()
    assert stats.preemptions_total > 0
    assert (stats.swaps_total > 0) == (preemption == "swap")
    assert stats.cached_tokens_total > 0


def test_float16_pages_are_served(opened) -> None:
    with opened(100, "float16", kernels="auto") as llm:
        halves = llm.generate(ASKED[:2], GREEDY)
        assert llm.engine._parts.executor.runner._memory.page_bytes == KV_HEADS * DIM * PAGE * 2 * 2
    with opened(100, "float32") as llm:
        floats = llm.generate(ASKED[:2], GREEDY)
    assert [a.token_ids[0] for a in halves] == [a.token_ids[0] for a in floats]


def test_formats_and_kernels_that_do_not_fit_are_refused_with_the_fix(model: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"choose from auto, bfloat16, float16, float32, int8, k8v4$"):
        MemoryOptions(kv_cache_dtype=TOY.name)
    monkeypatch.setitem(KV_FORMATS, TOY.name, TOY)
    config = engine_config(model, kernels="numba", kv_cache_dtype=TOY.name)
    words = "do not read the KV format 'toy-int8'; use --kernels auto or torch"
    with closing(open_checkpoint(str(model))) as checkpoint, pytest.raises(ConfigError, match=words):
        build(checkpoint, config, None)


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), NotEnoughMemory, "--pool-bytes, .*: CUDA out of m"),
        (MemoryError("Unable to allocate 2 GiB"), NotEnoughMemory, "--pool-bytes, .*: Unable to all"),
        (RuntimeError("an illegal memory access"), RuntimeError, "^an illegal"),
    ],
)
def test_a_warm_up_without_memory_says_what_to_change(
    error: Exception, raised: type[Exception], says: str, model: Path
) -> None:
    with (
        patch.object(ModelRunner, "warm_up", side_effect=error),
        closing(open_checkpoint(str(model))) as checkpoint,
        pytest.raises(raised, match=says),
    ):
        build(checkpoint, engine_config(model), None)
