"""Pages of codes, by every backend: attention over them is attention over what they hold, rotated back, and a token's
bytes and a row's bits depend on nothing beside them."""

import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kernel_pools import pages_on
from llvmlite.binding import get_host_cpu_features

from sgmv_kernels.backend import Scoring
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_format import (
    ALIGNMENT_BYTES,
    KEY_SCALES,
    KV_FORMATS,
    CodesKV,
    hadamard,
    rotated_block,
)
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.draft_trees import Parents
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import paged_attention_reference, rope_reference

CPU = torch.device("cpu")
CODES = [name for name, kv_format in KV_FORMATS.items() if isinstance(kv_format, CodesKV)]
PAGE, PAGES = 16, 26
SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 80), (4, 2, 96), (2, 1, 256), (4, 2, 24)]
"""(query heads, key heads, numbers of a head)."""
BACKENDS = ("torch", "numba")
every_backend = pytest.mark.parametrize("ops", [*BACKENDS, "triton"], indirect=True)
every_format = pytest.mark.parametrize("name", CODES)


@dataclass
class Sequences:
    """Tokens of sequences that go through the ops step after step, in pages that held NaN."""

    heads: int
    kv: KvPages
    tables: np.ndarray
    qkv: list[torch.Tensor]
    angles: list[torch.Tensor]

    @classmethod
    def make(cls, name: str, lens: Sequence[int], heads: int, kv_heads: int, dim: int, turned: int | None = None):
        size = PAGES * KV_FORMATS[name].page_bytes(kv_heads, dim, PAGE)
        kv = KvPages(torch.full((size,), 0xFF, dtype=torch.uint8), KV_FORMATS[name], kv_heads, PAGE, dim)
        order, tables = torch.randperm(PAGES).tolist(), np.full((len(lens), 12), 1 << 20, dtype=np.int32)
        for row, length in zip(tables, lens, strict=True):
            used = -(-length // PAGE)
            row[:used] = [order.pop() for _ in range(used)]
        spread = torch.randn((heads + 2 * kv_heads) * dim).div(2).exp()  # a few numbers of a head are much larger
        qkv = [torch.randn(n, len(spread)) * spread for n in lens]
        return cls(heads, kv, tables, qkv, [6 * torch.rand(n, (dim if turned is None else turned) // 2) for n in lens])

    def step(
        self,
        ops: Ops,
        kv: KvPages,
        spans: Sequence[tuple[int, int, int]],
        parents: Sequence[Parents] = (),
        **how: Any,
    ) -> torch.Tensor:
        """Compute tokens from `begin` to `end` of some sequences, (sequence, begin, end), in one step."""
        chosen, query_lens = [s for s, _, _ in spans], [end - begin for _, begin, end in spans]
        ends = [end for _, _, end in spans]
        plan = ops.plan_attention(self.tables[chosen], query_lens, ends, PAGE, PAGES, parents)
        angle = torch.cat([self.angles[s][begin:end] for s, begin, end in spans])
        qkv = torch.cat([self.qkv[s][begin:end] for s, begin, end in spans])
        rows = [t.to(ops.device, copy=True) for t in (qkv, angle.cos(), angle.sin())]
        q = ops.rope_write_kv(*rows, kv, plan)
        torch.testing.assert_close(q.cpu(), self.queries(spans), rtol=1e-5, atol=1e-5)
        return ops.paged_attention(q, kv, plan, Scoring(self.kv.head_dim**-0.5, **how)).cpu()

    def turned(self, spans: Sequence[tuple[int, int, int]], first: int, count: int) -> torch.Tensor:
        """Return heads of tokens with their positions."""
        rows = [self.qkv[s][a:b].view(b - a, -1, self.kv.head_dim)[:, first : first + count] for s, a, b in spans]
        angle = torch.cat([self.angles[s][a:b] for s, a, b in spans])
        return rope_reference(torch.cat(rows), angle.cos(), angle.sin())

    def queries(self, spans: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        return self.turned(spans, 0, self.heads)

    def reference(self, kv: KvPages, spans, parents: Sequence[Parents] = (), **how: Any) -> torch.Tensor:
        """Attention in fp32 over what the pages hold, un-rotated."""
        keys, values = (part.cpu() for part in kv.read(torch.arange(PAGES, device=kv.slab.device)))
        used = [self.tables[s][: -(-end // PAGE)].tolist() for s, _, end in spans]
        lens = [end - begin for _, begin, end in spans], [end for _, _, end in spans]
        q = self.queries(spans)
        return paged_attention_reference(q, keys, values, used, *lens, Scoring(self.kv.head_dim**-0.5, **how), parents)


@pytest.mark.parametrize("dim", [64, 96, 80, 128, 256, 24, 6, 100])
def test_rotation_leaves_scores_as_they_are(dim: int) -> None:
    q, k = torch.randn(9, dim), torch.randn(30, dim)
    scores = hadamard(q) @ hadamard(k).T
    torch.testing.assert_close(scores, q @ k.T, rtol=1e-5, atol=1e-5 * dim**0.5)
    torch.testing.assert_close(hadamard(hadamard(k)), k, rtol=1e-5, atol=1e-5)
    block = rotated_block(dim)
    assert (dim % block, block & (block - 1)) == (0, 0)
    one = torch.eye(dim)[0]
    assert int((hadamard(one) != 0).sum()) == block


@every_format
@every_backend
def test_what_is_held_is_what_was_written_but_for_rounding(ops: Ops, name: str) -> None:
    made = Sequences.make(name, [45, 30], 4, 2, 96, turned=48)
    kv, spans = pages_on(made.kv, ops.device), [(0, 0, 45), (1, 0, 30)]
    made.step(ops, kv, spans)
    keys, values = (part.cpu() for part in kv.read(torch.arange(PAGES, device=ops.device)))
    k, v = made.turned(spans, 4, 2), torch.cat([made.qkv[s].view(-1, 8, 96)[:, 6:] for s in (0, 1)])
    row = 0
    for s, _, end in spans:
        for t in range(end):
            page = made.tables[s, t // PAGE]
            pairs = ((keys[page, :, :, t % PAGE], k[row]), (values[page, :, t % PAGE], v[row]))
            for (held, given), most in zip(pairs, ROUNDED[name], strict=True):
                assert ((held - given).norm(dim=-1) <= most * given.norm(dim=-1)).all()
            row += 1
    free = sorted(set(range(PAGES)) - set(made.tables[made.tables < PAGES].tolist()))
    assert (kv.slab.cpu().view(PAGES, -1)[free] == 0xFF).all()


ROUNDED = {"int8": (0.012, 0.03), "k8v4": (0.012, 0.16)}
"""Largest relative error of a key and of a value, rms of a head."""


@pytest.mark.parametrize(
    ("ops", "shape", "window", "softcap"),
    [
        *itertools.product(BACKENDS, SHAPES, (None, 7, 40), (None,)),
        *((backend, SHAPES[0], 9, 2.0) for backend in BACKENDS),
        pytest.param("triton", SHAPES[0], 9, 2.0, marks=pytest.mark.exhaustive),
        pytest.param("triton", SHAPES[3], None, None, marks=pytest.mark.exhaustive),
        ("triton", (2, 1, 16), None, None),
        pytest.param("triton", SHAPES[2], 40, None, marks=pytest.mark.long),
        pytest.param("triton", SHAPES[5], None, None, marks=pytest.mark.long),
    ],
    indirect=["ops"],
)
@every_format
def test_attention_is_that_over_what_the_pages_hold(ops: Ops, name: str, shape, window, softcap) -> None:
    """Prompts, chunks and single tokens, with draft trees in the end."""
    made, how = Sequences.make(name, [150, 40, 17], *shape), {"window": window, "softcap": softcap}
    kv = pages_on(made.kv, ops.device)
    for spans in ([(0, 0, 70), (1, 0, 39)], [(0, 70, 150), (1, 39, 40), (2, 0, 16)], [(2, 16, 17)]):
        assert_near(made.step(ops, kv, spans, **how), made.reference(kv, spans, **how))
    spans, parents = [(0, 140, 150), (2, 9, 17)], [(-1, 0, 0, 1, -1), (-1, -1, 0, 2)]
    assert_near(made.step(ops, kv, spans, parents, **how), made.reference(kv, spans, parents, **how))


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """A thousandth of each head: queries and weights are rounded to 15 bits."""
    assert ((got - want).norm(dim=-1) <= 1e-3 * want.norm(dim=-1)).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="these tiles are for activations of two bytes")
@every_format
@pytest.mark.parametrize("ops", ["triton"], indirect=True)
@pytest.mark.usefixtures("short_parts")
def test_the_tiles_of_served_activations(ops: Ops, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's activations have four bytes, for which tables have others."""
    from sgmv_kernels.triton_ops import attention

    of = attention.attention_config
    monkeypatch.setattr(
        attention, "attention_config", lambda device, dim, itemsize, codes: of(device, dim, 2, codes=codes)
    )
    made, spans = Sequences.make(name, [185, 39], 4, 2, 64), [(0, 184, 185), (1, 4, 39)]
    kv = pages_on(made.kv, ops.device)
    made.step(Ops(CPU, "torch"), kv, [(0, 0, 184), (1, 0, 4)])
    assert_near(made.step(ops, kv, spans), made.reference(kv, spans))


@every_format
@every_backend
def test_slopes_of_a_model_without_rotary_embedding(ops: Ops, name: str) -> None:
    made, spans = Sequences.make(name, [40, 17], 4, 2, 64, turned=0), [(0, 0, 40), (1, 0, 17)]
    slopes, kv = torch.tensor([0.5, 0.25, 0.1, 0.05]), pages_on(made.kv, ops.device)
    got, want = made.step(ops, kv, spans, slopes=slopes.to(ops.device)), made.reference(kv, spans, slopes=slopes)
    assert_near(got, want)
    assert not torch.allclose(want, made.reference(kv, spans), atol=1e-2)


@every_format
@pytest.mark.parametrize("ops", ["numba"], indirect=True)
def test_a_row_has_the_same_bits_in_any_chunk_and_batch(ops: Ops, name: str) -> None:
    made = Sequences.make(name, [150, 60], 9, 3, 64)
    whole_kv = pages_on(made.kv, ops.device)
    whole = made.step(ops, whole_kv, [(0, 0, 150)])
    for chunk in (1, 7, 16):
        kv, found = pages_on(KvPages(made.kv.slab.clone(), made.kv.format, 3, PAGE, 64), ops.device), []
        for begin in range(0, 150, chunk):
            end, at = min(150, begin + chunk), min(begin, 59)
            rows = made.step(ops, kv, [(1, at, at + 1), (0, begin, end)] if chunk < 16 else [(0, begin, end)])
            found.append(rows[-(end - begin) :])
        assert torch.equal(torch.cat(found), whole), chunk
        own = torch.from_numpy(made.tables[0][made.tables[0] < PAGES]).long()
        for part in kv.parts:
            same = kv.parts[part][own].view(torch.uint8) == whole_kv.parts[part][own].view(torch.uint8)
            assert same.all(), (chunk, part)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(("name", "turned"), [*((name, 64) for name in KV_FORMATS), ("bfloat16", 4), ("int8", 4)])
@every_backend
def test_nan_stays_with_the_rows_that_see_it(ops: Ops, name: str, turned: int) -> None:
    """And a number that is infinite, in a page at least; a head of zeros is one of zeros.

    A row that saw what comes behind it would leave NaN in pages that other requests begin with.
    """
    made = Sequences.make(name, [40, 30], 4, 2, 64, turned)
    made.qkv[1][:, -64:] = 0.0
    spans = [(0, 0, 40), (1, 0, 30)]
    calm = made.step(ops, pages_on(made.kv, ops.device), spans)
    assert calm.isfinite().all()
    assert (calm[40:, 2:] == 0).all()
    most = {"bfloat16": 3.4e38, "float16": 65520.0, "float32": math.inf}.get(name, 1e38)
    key, value = 4 * 64 + 5, 6 * 64 + 5
    bads = [(key, -math.inf), (value, math.nan), (value, -most), (key, math.nan), (value, math.inf)]
    for at, bad in bads[: 3 if ops.name == "triton" else 5]:  # which is interpreted
        spoilt = Sequences(made.heads, made.kv, made.tables, [made.qkv[0].clone(), made.qkv[1]], made.angles)
        spoilt.qkv[0][20, at] = bad
        kv = KvPages(made.kv.slab.to(ops.device).clone(), made.kv.format, 2, PAGE, 64)
        got = spoilt.step(ops, kv, spans)
        assert got[20:40, :2].isnan().all()
        exact = {"rtol": 0, "atol": 0} if ops.name != "torch" else {}
        torch.testing.assert_close(got[:20], calm[:20], **exact)
        assert torch.equal(got[40:], calm[40:])


@every_format
@every_backend
def test_tokens_are_copied_bit_for_bit(ops: Ops, name: str) -> None:
    made = Sequences.make(name, [60], 4, 2, 96)
    made.step(Ops(CPU, "torch"), made.kv, [(0, 0, 60)])
    table = made.tables[0].tolist()
    moves = [(table[s // PAGE], s % PAGE, table[t // PAGE], t % PAGE) for s, t in ((20, 3), (37, 4), (59, 21))]
    before, kv = made.kv.slab.clone(), pages_on(made.kv, ops.device)
    ops.copy_slots([kv], np.array(moves, dtype=np.int32))
    after, changed = kv.slab.cpu(), 0
    held, moved = (KvPages(slab, made.kv.format, 2, PAGE, 96) for slab in (before, after))
    for source_page, source, page, slot in moves:
        for part in made.kv.format.parts:
            at, of = (part.at(torch.tensor([p]), torch.tensor([s])) for p, s in ((page, slot), (source_page, source)))
            assert torch.equal(moved.parts[part.name][at], held.parts[part.name][of])
            changed += int((moved.parts[part.name][at] != held.parts[part.name][at]).sum() > 0)
    assert changed == len(moves) * len(made.kv.format.parts)
    assert int((after != before).sum()) <= len(moves) * kv.unit_bytes * kv.token_places().shape[1]


@every_format
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 6])
def test_pages_fit_between_panels_and_parts_do_not_overlap(name: str, dim: int) -> None:
    kv_format = KV_FORMATS[name]
    *offsets, nbytes = kv_format.offsets(3, dim, PAGE)
    assert nbytes % ALIGNMENT_BYTES == 0
    ends = [at + part.nbytes(3, dim, PAGE) for at, part in zip(offsets, kv_format.parts, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, [*offsets[1:], nbytes], strict=True))
    places = KvPages(torch.zeros(nbytes, dtype=torch.uint8), kv_format, 3, PAGE, dim).token_places()
    assert len(places.unique()) == places.numel()


def test_a_page_of_smollm2_takes_half_its_bytes_or_less() -> None:
    bf16, int8, k8v4 = (KV_FORMATS[name].page_bytes(3, 64, PAGE) for name in ("bfloat16", "int8", "k8v4"))
    assert (bf16, int8, k8v4) == (12288, 6528, 4992)
    assert bf16 / int8 >= 1.85
    assert int8 / k8v4 >= 1.3


@every_format
def test_pages_of_other_sizes_are_refused(name: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"pages of {name} have a multiple of 16 tokens"):
        KvPages(torch.zeros(1 << 16, dtype=torch.uint8), KV_FORMATS[name], 1, 8, 64)


def test_a_large_number_costs_the_others_less_when_it_is_spread() -> None:
    """Why keys are rotated."""
    made = Sequences.make("int8", [16], 1, 1, 64)
    keys = torch.randn(16, 1, 64)
    keys[..., 3] = 40.0
    page, slots = torch.zeros(16, dtype=torch.int64), torch.arange(16)
    made.kv.write(page, slots, keys, keys)
    held_keys, held_values = made.kv.read(page[:1])
    errors = [(held_keys[0].permute(2, 0, 1) - keys).norm(), (held_values[0].transpose(0, 1) - keys).norm()]
    assert errors[0] < 0.7 * errors[1]
    assert made.kv.parts[KEY_SCALES].isfinite()[0].all()


FEWER = """
import sys
import llvmlite.binding as llvm
from llvmlite.binding.targets import FeatureMap
known = llvm.get_host_cpu_features()
fewer = FeatureMap({name: on and not name.startswith(("avx512", "avxvnni", "amx")) for name, on in known.items()})
llvm.get_host_cpu_features = lambda: fewer
from sgmv_kernels.cpu_simd.kv_codes import LANES, HAS_BYTE_DOT
assert (LANES, HAS_BYTE_DOT) == (8, False)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
"""Runs tests with kernels for processors that have AVX2 and nothing later."""


@pytest.mark.long
@pytest.mark.skipif(not get_host_cpu_features().get("avx512f"), reason="these are the kernels of this processor")
def test_with_avx2_alone() -> None:
    chosen = "numba and (pages_hold or held_is_what or any_chunk or nan_stays)"
    asked = [__file__, "-k", chosen, "-q", "-n0", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-c", FEWER, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(done.stdout.rpartition(" passed")[0].rpartition("\n")[2].split()[-1]) >= 21 * len(CODES)
