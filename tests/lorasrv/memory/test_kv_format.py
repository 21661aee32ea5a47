"""A KV format that only its own file knows, served: the registry entry is all that the engine needs."""

from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from mispredict import expect_short_answers
from tiny_engine import engine_config, offline_engine
from toy_kv import TOY, VALUE_SCALES

from lorasrv.config import MemoryOptions, SchedulerOptions
from lorasrv.engine.factory import build
from lorasrv.errors import ConfigError
from lorasrv.llm import LLM
from lorasrv.memory.memory_manager import PoolLayout
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.spec import ModelSpec
from lorasrv.sampling_params import SamplingParams
from sgmv_kernels.formats.kv_format import KV_FORMATS

LAYERS, KV_HEADS, DIM, PAGE = 3, 2, 16, 16
BLOCK = LAYERS * TOY.page_bytes(KV_HEADS, DIM, PAGE)
GREEDY = SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True)
PROMPTS = [[10 + (7 * i + n) % 300 for i in range(20)] for n in range(6)]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KV_FORMATS, TOY.name, TOY)


def opened(
    model: Path, pages: int, kv_dtype: str = TOY.name, preemption: str = "auto", kernels: str = "torch", **memory: Any
) -> AbstractContextManager[LLM]:
    memory |= {"pool_bytes": pages * BLOCK, "kv_cache_dtype": kv_dtype, "swap_bytes": 64 * BLOCK}
    return offline_engine(model, kernels=kernels, scheduler=SchedulerOptions(preemption_mode=preemption), **memory)


def test_the_pool_counts_in_pages_of_the_format(model: Path) -> None:
    with opened(model, 40) as llm:
        assert llm.engine.metrics.snapshot().pages_total == 40
        assert llm.engine._parts.memory.layout.block_bytes == BLOCK
    with opened(model, 40, "float32") as llm:
        floats = KV_FORMATS["float32"].page_bytes(KV_HEADS, DIM, PAGE) * LAYERS
        assert llm.engine.metrics.snapshot().pages_total == 40 * BLOCK // floats < 20


def test_geometry_rounds_the_pool_down() -> None:
    spec = ModelSpec("llama", 5, 64, 64, 6, 3, 64, 100, 100, 1e-5)
    geometry = PoolLayout.of_bytes(
        7 * 5 * 6528 + 4000, TOY.page_bytes(spec.num_kv_heads, spec.head_dim, 16), 16, spec.num_layers
    )
    assert geometry == PoolLayout(num_pages=7, page_size=16, page_bytes=6528, num_layers=5)


def test_answers_are_near_those_of_float_pages(model: Path) -> None:
    asked = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    found: dict[str, list[float]] = {}
    for kv_dtype in (TOY.name, "float32"):
        with opened(model, 400, kv_dtype) as llm:
            done = llm.generate(PROMPTS, asked)
            found[kv_dtype] = [
                known.logprob for answer in done for known in (answer.prompt_logprobs or ()) if known is not None
            ]
            pages = llm.engine._parts.executor.runner._memory.kv_pages(1)
            assert (VALUE_SCALES in pages.parts) == (kv_dtype == TOY.name)
            assert (pages.slab != 0).any()
    errors = [abs(one - other) for one, other in zip(found[TOY.name], found["float32"], strict=True)]
    assert 0 < max(errors) < 0.05


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_pages_are_copied_swapped_and_found_again_with_their_scales(model: Path, preemption: str) -> None:
    with opened(model, 400, enable_prefix_caching=False) as llm:
        alone = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    with opened(model, 14, preemption=preemption) as llm:
        expect_short_answers(llm.engine._parts.scheduler.predictor)
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == alone
        # The first pages of prompts are still there.
        assert [answer.token_ids for answer in llm.generate(PROMPTS[-2:], GREEDY)] == alone[-2:]
        snapshot = llm.engine.metrics.snapshot()
        llm.engine.check_integrity()
    assert snapshot.preemptions_total > 0
    assert (snapshot.swaps_total > 0) == (preemption == "swap")
    assert snapshot.cached_tokens_total > 0


def test_kernels_that_do_not_read_it_are_refused_with_the_fix(model: Path) -> None:
    with (
        closing(open_checkpoint(str(model))) as checkpoint,
        pytest.raises(ConfigError, match="do not read the KV format 'toy-int8'; use --kernels auto or torch"),
    ):
        build(checkpoint, engine_config(model, kernels="numba", kv_cache_dtype=TOY.name), None)


def test_the_option_lists_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KV_FORMATS, TOY.name)
    with pytest.raises(ConfigError, match=r"choose from auto, bfloat16, float16, float32$"):
        MemoryOptions(kv_cache_dtype=TOY.name)


def test_float16_pages_are_served(model: Path) -> None:
    asked = SamplingParams(max_tokens=3, temperature=0.0)
    with opened(model, 100, "float16", kernels="auto") as llm:
        halves = llm.generate(PROMPTS[:2], asked)
        assert llm.engine._parts.executor.runner._memory.page_bytes == KV_HEADS * DIM * PAGE * 2 * 2
    with opened(model, 100, "float32") as llm:
        floats = llm.generate(PROMPTS[:2], asked)
    assert [a.token_ids[0] for a in halves] == [a.token_ids[0] for a in floats]
