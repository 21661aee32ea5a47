"""Building an engine: what depends on the machine, and that an answer does not depend on other requests."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import peft_adapter
from tiny_checkpoints import write_tiny

from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine import factory
from lorasrv.engine.factory import build, make_ops
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.spec import operations
from lorasrv.sampling_params import SamplingParams
from sgmv_kernels import ops
from sgmv_kernels.cpu_ops import backend as backend_numba
from sgmv_kernels.ops import INT4_LEVELS, GroupQuantizedWeight, Ops

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
    monkeypatch.setattr(factory, "free_bytes", lambda: int(free * needed))
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
    config = EngineConfig(
        model=ModelOptions(dtype="float32", kernels="numba", **options),
        memory=MemoryOptions(pool_bytes=pages * WIDE_BLOCK, swap_bytes=1 << 24),
        scheduler=SchedulerOptions(max_num_batched_tokens=tokens, max_num_seqs=12, target_itl_ms=None),
    )
    with LLM(str(model), config) as llm:
        for name in ("one", "two"):
            llm.add_adapter(name, model / name)
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
    ],
)
def test_what_makes_an_answer_depend_on_its_batch_says_so(
    model: Path, options: dict[str, str], is_invariant: bool
) -> None:
    config = EngineConfig(model=ModelOptions(device="cpu", **options), memory=MemoryOptions(pool_bytes=1 << 22))
    with closing(open_checkpoint(str(model))) as checkpoint:
        assert build(checkpoint, config, None).is_batch_invariant == is_invariant


def test_bf16_copies_make_an_answer_depend_on_its_batch(measured: None) -> None:
    assert not Ops(CPU, "numba", copies=True).is_batch_invariant
    assert Ops(CPU, "numba").is_batch_invariant
