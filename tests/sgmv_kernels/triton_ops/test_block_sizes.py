"""What the host prepares for the Triton kernels: chunks of rows, tiles and parts of keys, block sizes from a table."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.metadata.plans import plan_of
from sgmv_kernels.metadata.sgmv_tables import rankless_tables
from sgmv_kernels.triton_ops.attention_metadata import MAX_SPLITS, NO_SLOT, Shape, cut, split_of
from sgmv_kernels.triton_ops.block_sizes import (
    BEFORE_SM90,
    DEFAULT,
    attention_config,
    dequantize_above,
    device_name,
    file_name,
    linear_config,
    rows_config,
    sgmv_config,
    table_of,
)
from sgmv_kernels.triton_ops.sgmv_metadata import chunks_of


@given(st.lists(st.integers(0, 70), max_size=8), st.sampled_from([16, 32]))
def test_chunks_hold_every_row_once(counts: list[int], block_m: int) -> None:
    ends = np.cumsum(counts, dtype=np.int32)
    bounds = np.stack((ends - np.array(counts, dtype=np.int32), ends), axis=-1).astype(np.int32)
    held: dict[int, list[int]] = {}
    tables = replace(rankless_tables((), 0, 0), bounds=bounds)
    tables = replace(tables, are_codes=np.zeros_like(bounds[:, 0]), weights=np.ones(len(bounds), dtype=np.float32))
    for begin, rows, segment, _, factor in chunks_of(tables, block_m).tolist():
        assert factor == np.float32(1).view(np.int32)
        assert 0 < rows <= block_m
        held.setdefault(segment, []).extend(range(begin, begin + rows))
    assert held == {s: list(range(*bounds[s])) for s in range(len(counts)) if counts[s]}


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 700)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 16, 71]),
    st.sampled_from([64, 256]),
)
def test_work_covers_every_query_and_key_once(lens: list[tuple[int, int]], group: int, split_tokens: int) -> None:
    query_lens, kv_lens = [n for n, _ in lens], [n + more for n, more in lens]
    plan = plan_of(np.zeros((len(lens), 100), dtype=np.int32), query_lens, kv_lens, 16, 1, torch.device("cpu"))
    shape = Shape(max(1, 16 // group), max(1, 128 // group), split_tokens, 64)
    work = cut(plan.query_starts, plan.kv_lens, shape, group)
    covered = {(i, row): [] for i, n in enumerate(query_lens) for row in range(n)}
    slots = {}
    for items, tile in ((work.decode, shape.decode_rows), (work.prefill, shape.prefill_rows)):
        for sequence, first, begin, end, slot in items.tolist():
            for row in range(first, min(first + tile, query_lens[sequence])):
                covered[sequence, row] += range(begin, end)
            if slot != NO_SLOT:
                slots[slot] = (sequence, first, begin)
    assert all(keys == list(range(kv_lens[i])) for (i, _), keys in covered.items())
    assert sorted(slots) == list(range(work.slots))
    for sequence, first, slot, parts in work.reduce.tolist():
        begins = [slots[slot + i] for i in range(parts)]
        assert begins == sorted(begins)
        assert {(s, f) for s, f, _ in begins} == {(sequence, first)}


@given(st.integers(1, 1 << 20))
def test_parts_stay_few(length: int) -> None:
    part = int(split_of(np.array([length], dtype=np.int32), 256)[0])
    assert -(-length // part) <= MAX_SPLITS
    assert part == 256 or -(-2 * length // part) > MAX_SPLITS  # no longer than it must be


WIDTHS = (64, 192, 576, 1536, 4096, 14336, 16384)


def is_block(n: int) -> bool:
    """What `tl.dot` takes on a GPU; the interpreter takes anything."""
    return n >= 16 and n & (n - 1) == 0


def test_the_default_table_has_blocks_for_every_site() -> None:
    for rows, rank, width, out in itertools.product((1, 256, 257, 100_000), (1, 48, 768), WIDTHS, WIDTHS):
        # Fewer rows than `tl.dot` takes are multiplied without it, or padded.
        assert rows_config(DEFAULT, rows).block_m in (2, 4, 32, 64)
        config = sgmv_config(DEFAULT, rows, rank, SiteDims(width, (out, out)))
        assert all(is_block(n) for n in (config.block_k, config.shrink_n, config.expand_n))
        assert config.planes in (1, config.split_k)


def test_the_order_of_additions_belongs_to_the_site() -> None:
    """Rows and ranks of a batch must not choose it."""
    for width in WIDTHS:
        every = itertools.product((1, 300, 5000), (8, 768), ((64,), (14336, 14336)))
        configs = [sgmv_config(DEFAULT, rows, rank, SiteDims(width, outs)) for rows, rank, outs in every]
        assert len({(config.split_k, config.block_k) for config in configs}) == 1


@pytest.mark.parametrize("name", [DEFAULT, BEFORE_SM90, "NVIDIA H200"])
def test_few_rows_add_ranks_in_one_order(name: str) -> None:
    """Expand without tensor cores has the order of its tiles, which neither ranks nor sites may choose."""
    every = itertools.product((1, 64, 256), (8, 48, 768), WIDTHS)
    configs = [sgmv_config(name, rows, rank, SiteDims(width, (width,))) for rows, rank, width in every]
    assert len({(config.expand_n, config.expand_warps) for config in configs}) == 1


@pytest.mark.parametrize("name", [DEFAULT, BEFORE_SM90])
def test_default_tables_have_blocks_for_every_head(name: str) -> None:
    for dim, itemsize, codes in itertools.product((16, 64, 80, 128, 256), (2, 4), (False, True)):
        config = attention_config(name, dim, itemsize, codes=codes)
        assert all(is_block(n) for n in (config.decode_n, config.prefill_m, config.prefill_n))
        assert config.split_tokens % config.decode_n == 0


def test_tiles_tuned_for_pages_of_floats_are_not_those_of_codes() -> None:
    """A prompt's tile of 128 keys leaves no registers to unpack codes: hundreds of values would spill."""
    of_floats, of_codes = (attention_config("NVIDIA H200", 128, 2, codes=codes) for codes in (False, True))
    assert of_floats.prefill_n > of_codes.prefill_n
    assert of_codes == attention_config(DEFAULT, 128, 2, codes=True)


def test_the_default_table_has_blocks_for_every_linear() -> None:
    for bits, group, rows, out in itertools.product((8, 4, 3), (32, 64, 576), (1, 17, 65, 100_000), WIDTHS):
        config = linear_config(DEFAULT, bits, group, rows, out)
        assert all(is_block(n) for n in (config.block_m, config.block_n))
        assert config.split_k >= 1
        assert dequantize_above(DEFAULT, bits) > 0


def test_a_device_without_a_table_takes_the_default_one() -> None:
    assert table_of("Some GPU (2031)") == table_of(DEFAULT)
    assert file_name("NVIDIA H100 80GB HBM3") == "NVIDIA_H100_80GB_HBM3.json"
    assert table_of(DEFAULT)["measured"] is False
    assert table_of(BEFORE_SM90)["linear"] == table_of(DEFAULT)["linear"]


def test_the_default_table_is_that_of_the_device_s_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    names = {}
    for name, capability in (("NVIDIA A100", (8, 0)), ("NVIDIA L4", (8, 9)), ("NVIDIA H100", (9, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        names[name] = device_name.__wrapped__(gpu)
    assert names == {"NVIDIA A100": BEFORE_SM90, "NVIDIA L4": BEFORE_SM90, "NVIDIA H100": DEFAULT}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert device_name.__wrapped__(gpu) == "NVIDIA H200"
