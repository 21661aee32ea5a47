"""Page layouts, and a format with scales inside the page that only its own file knows."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from toy_kv import KEY_SCALES, TOY, VALUE_SCALES

from sgmv_kernels.backend import KernelsUnavailable, Scoring
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_format import KV_FORMATS, get_kv_format
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import paged_attention_reference, rope_reference

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, PAGE = 6, 3, 64, 16


def pages_of(kv_format, num_pages: int, fill: int = 0xFF) -> KvPages:
    size = num_pages * kv_format.page_bytes(KV_HEADS, DIM, PAGE)
    return KvPages(torch.full((size,), fill, dtype=torch.uint8), kv_format, KV_HEADS, PAGE, DIM)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_float_pages_hold_keys_then_values_and_nothing_else(name: str) -> None:
    kv_format, dtype = KV_FORMATS[name], getattr(torch, name)
    block = KV_HEADS * DIM * PAGE * dtype.itemsize
    assert kv_format.offsets(KV_HEADS, DIM, PAGE) == (0, block, 2 * block)
    kv = pages_of(kv_format, 5)
    assert (kv.keys.shape, kv.keys.dtype) == ((5, KV_HEADS, DIM, PAGE), dtype)
    assert (kv.values.shape, kv.values.dtype) == ((5, KV_HEADS, PAGE, DIM), dtype)
    numbers = kv.slab.view(dtype).view(5, 2, -1)
    kv.keys[3], kv.values[3] = 1.0, 2.0
    assert (numbers[3] == torch.tensor([[1], [2]])).all()
    assert numbers[[0, 1, 2, 4]].isnan().all()


def test_parts_follow_each_other_and_pages_begin_where_panels_may() -> None:
    """A page of SmolLM2 in int8 with scales: 53 % of its bytes in bf16."""
    offsets = TOY.offsets(KV_HEADS, DIM, PAGE)
    assert offsets == (0, 3072, 3264, 6336, 6528)
    assert TOY.page_bytes(1, 6, 4) % 128 == 0
    kv = pages_of(TOY, 4)
    assert {name: view.shape[1:] for name, view in kv.parts.items()} == {
        "keys": (KV_HEADS, DIM, PAGE),
        KEY_SCALES: (KV_HEADS, PAGE),
        "values": (KV_HEADS, PAGE, DIM),
        VALUE_SCALES: (KV_HEADS, PAGE),
    }
    places = [(view.data_ptr() - kv.slab.data_ptr(), view.stride(0) * view.itemsize) for view in kv.parts.values()]
    assert places == [(offset, 6528) for offset in offsets[:-1]]


def test_auto_is_the_format_of_the_weights() -> None:
    assert get_kv_format("auto", "bfloat16") is KV_FORMATS["bfloat16"]
    assert get_kv_format("float32", "bfloat16") is KV_FORMATS["float32"]


def test_slabs_that_are_no_pages() -> None:
    size = 2 * TOY.page_bytes(KV_HEADS, DIM, PAGE)
    for wrong in (torch.zeros(size - 1, dtype=torch.uint8), torch.zeros(size), torch.zeros(1, size, dtype=torch.uint8)):
        with pytest.raises(KernelArgumentError, match=r"slab must be contiguous uint8 \[pages \* 6528\]"):
            KvPages(wrong, TOY, KV_HEADS, PAGE, DIM)


def test_a_format_with_scales_is_written_and_attended_to() -> None:
    """Prefill, then single tokens: what torch's kernels compute is attention over the dequantized pages."""
    ops, kv = Ops(CPU, "torch"), pages_of(TOY, 9)
    tables = np.array([[7, 2, 5], [0, 4, 0]], dtype=np.int32)
    lengths, keys, values = [0, 0], [], []
    for query_lens in ([37, 20], [1, 1], [1, 1]):
        lengths = [held + new for held, new in zip(lengths, query_lens, strict=True)]
        plan = ops.plan_attention(tables, query_lens, lengths, PAGE, kv.num_pages)
        qkv, angle = torch.randn(sum(query_lens), (HEADS + 2 * KV_HEADS) * DIM), torch.rand(sum(query_lens), DIM // 2)
        _, k, v = qkv.clone().view(len(qkv), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        keys.append(rope_reference(k, angle.cos(), angle.sin())[: query_lens[0]])
        values.append(v[: query_lens[0]])
        q = ops.rope_write_kv(qkv, angle.cos(), angle.sin(), kv, plan)
        got = ops.paged_attention(q, kv, plan, Scoring(0.125))
        held = kv.read(torch.arange(kv.num_pages))
        used = [row[: -(-n // PAGE)].tolist() for row, n in zip(tables, lengths, strict=True)]
        want = paged_attention_reference(q, *held, used, query_lens, lengths, Scoring(0.125))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    first_keys, first_values = kv.read(torch.tensor(tables[0].tolist()))
    for found, given in ((first_keys.permute(0, 3, 1, 2), keys), (first_values.permute(0, 2, 1, 3), values)):
        given = torch.cat(given)
        # Half a step of 127 to the largest number of a token's head.
        assert ((found.flatten(0, 1)[:39] - given).abs() <= given.abs().amax(-1, keepdim=True) / 250).all()
    assert (kv.slab.view(9, -1)[[1, 3, 6, 8]] == 0xFF).all()


def test_kernels_refuse_formats_that_they_do_not_read() -> None:
    numba, kv = Ops(CPU, "numba"), pages_of(TOY, 2)
    with pytest.raises(KernelsUnavailable, match="'numba' cannot run here: they do not read the KV format 'toy-int8'"):
        numba.warm_up(torch.float32, TOY)
    plan = numba.plan_attention(np.zeros((1, 1), dtype=np.int32), [1], [1], PAGE, 2)
    with pytest.raises(KernelArgumentError, match="'numba' do not read KV pages in format 'toy-int8'"):
        numba.paged_attention(torch.zeros(1, HEADS, DIM), kv, plan, Scoring(1.0))
    with pytest.raises(KernelArgumentError, match="do not read KV pages"):
        numba.rope_write_kv(torch.zeros(1, 12 * DIM), torch.zeros(1, 8), torch.zeros(1, 8), kv, plan)


def test_default_kernels_that_do_not_read_a_format_are_replaced_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    ops = Ops(CPU)
    ops.warm_up(torch.float32, TOY)
    assert ops.name == "torch"
    assert "do not read the KV format" in caplog.text


def test_sizes_are_known_without_torch() -> None:
    code = "import sys, sgmv_kernels.formats.kv_format as f; f.KV_FORMATS['bfloat16'].page_bytes(3, 64, 16); "
    subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=True)
