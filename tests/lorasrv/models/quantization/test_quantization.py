"""Weight formats: what they compute is what they say they hold."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_engine import GREEDY, offline_engine
from torch import Tensor

from lorasrv.config import ModelOptions
from lorasrv.errors import UnsupportedFormat
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.checkpoint import StoredPacking
from lorasrv.models.quantization import FORMATS, Acceptance, Fit, Linear, StoredWeights, get_format, select_format
from lorasrv.models.quantization.rounding import round_asymmetric, round_symmetric
from lorasrv.models.quantization.tables import TableFormat
from lorasrv.models.quantization.unquantized import FloatLinear, NoneFormat
from lorasrv.models.spec import ModelSpec
from lorasrv.worker.base_format import choose_format
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS
from sgmv_kernels.ops import Ops

OF_FILES = ("gptq", "awq", "compressed-tensors", "bitsandbytes", "hqq", "eetq", "gguf", "mixed")
ERROR = {"none": 4e-3, "int8": 0.012, "int4": 0.11, "q3h": 0.19, "nf4": 0.11, "fp4": 0.14} | dict.fromkeys(
    OF_FILES, 4e-3
)
"""Relative to the true product of normal numbers."""
TORCH, NUMBA = (Ops(torch.device("cpu"), name) for name in ("torch", "numba"))
every_ops = pytest.mark.parametrize("ops", [NUMBA, TORCH], ids=lambda ops: ops.name)
every_format = pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp8"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor, levels: int, group: int) -> GroupQuantizedWeight:
    return round_symmetric(weight, group) if levels == INT8_LEVELS else round_asymmetric(weight, group, levels)


def relative(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


@every_ops
@every_format
@every_dtype
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_near_the_float_product(ops: Ops, name: str, dtype: torch.dtype, biased: bool) -> None:
    w, bias, x = tensor(96, 128), tensor(96, seed=2) if biased else None, tensor(9, 128, seed=1)
    linear = get_format(name, ops).linear(w, bias, dtype)
    y = linear(x)
    assert (y.dtype, linear.in_features, linear.out_features) == (torch.float32, 128, 96)
    assert relative(y, torch.nn.functional.linear(x, w, bias)) < ERROR[name]


def test_nf4_and_fp4_are_those_of_bitsandbytes() -> None:
    """Codes as the library's: of a weight that its 16 values give exactly, and 64 neighbours share a magnitude."""
    for name in ("nf4", "fp4"):
        kind = FORMATS[name]
        assert issubclass(kind, TableFormat)
        values = torch.tensor(kind.values)
        which = torch.randint(0, 16, (6, 128), generator=torch.Generator().manual_seed(0))
        which[:, ::64] = 15
        largest = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)) + 0.1
        exact = values[which] * largest.repeat_interleave(64, 1)
        held = get_format(name, TORCH).linear(exact, None, torch.float32)
        assert relative(held.dequantize(), exact) < 0.005
        assert held.nbytes * 8 == (8 + 32 / 64) * 6 * 128 + 16 * 8, "the torch kernels give a code a byte"
        assert torch.equal(held.dequantize() == 0, exact == 0)
        nothing = get_format(name, TORCH).linear(exact * 0, None, torch.float32)
        assert not nothing.dequantize().any()


@every_format
def test_dequantize_gives_what_the_arithmetic_uses(name: str) -> None:
    linear = get_format(name, TORCH).linear(tensor(96, 128), None, torch.bfloat16)
    torch.testing.assert_close(linear(torch.eye(128)), linear.dequantize().T, rtol=1e-5, atol=1e-5)


@every_ops
@every_format
@every_dtype
def test_both_ends_keep_eight_bits_and_share_them(ops: Ops, name: str, dtype: torch.dtype) -> None:
    w, x, ids = tensor(50, 128), tensor(3, 128, seed=1), torch.tensor([0, 49, 7, 7])
    fmt = get_format(name, ops)
    embedding = fmt.embedding(w, dtype)
    assert embedding(ids).dtype == torch.float32
    assert torch.equal(embedding(ids), embedding.dequantize()[ids])
    assert relative(embedding.dequantize(), w) < ERROR["int8"]
    for head in (fmt.tied_head(embedding, dtype), fmt.head(w, dtype)):
        assert relative(head(x), x @ w.T) < ERROR["int8"]
    assert fmt.tied_head(embedding, dtype).nbytes == 0
    assert torch.equal(fmt.tied_head(embedding, dtype).dequantize(), embedding.dequantize())


def test_stored_sizes(codes_only: None) -> None:
    w, bias = tensor(96, 128), tensor(96)
    assert get_format("none", NUMBA).linear(w, None, torch.bfloat16).nbytes == w.numel() * 2
    for name, group, own, bits in (
        ("none", None, bias, 32), ("int8", None, None, 8.5), ("int4", None, None, 5), ("q3h", None, None, 4),
        ("int4", 128, bias, 4.25),
    ):  # fmt: skip
        linear = get_format(name, NUMBA, group).linear(w, own, torch.float32)
        assert linear.nbytes == w.numel() * bits / 8 + (0 if own is None else own.nbytes), name


def test_int8_survives_outlier_channels() -> None:
    """One channel two hundred times the others costs its 32 neighbours their bits, and no other channel."""
    w, x = tensor(96, 576), tensor(8, 576, seed=1)
    x[:, 17] *= 200
    w[:, 17] = 0
    assert relative(get_format("int8", NUMBA).linear(w, None, torch.float32)(x), x @ w.T) < 0.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_symmetric_codes_are_within_half_a_level(dtype: torch.dtype) -> None:
    w = tensor(40, 64).to(dtype)
    w[3] = 0
    codes = round_symmetric(w, 32)
    assert (codes.codes.dtype, codes.levels) == (torch.int8, INT8_LEVELS)
    assert (codes.codes[3] == 0).all()
    scales = codes.scales.float().repeat_interleave(32, dim=1)
    # The scale itself is rounded to fp16, which may cut off a 2000th of the largest.
    assert ((codes.dequantize() - w.float()).abs() <= scales * 0.5 + w.float().abs() * 6e-4 + 1e-7).all()


@pytest.mark.parametrize(("levels", "group"), [(INT4_LEVELS, 32), (INT4_LEVELS, 64), (Q3H_LEVELS, 64)])
def test_asymmetric_codes_are_no_worse_than_the_whole_range(levels: int, group: int) -> None:
    w = tensor(40, 128)
    w[3] = 0.25
    codes = round_asymmetric(w, group, levels)
    groups = w.view(40, -1, group)
    low, high = (find(groups, -1, keepdim=True) for find in (torch.amin, torch.amax))
    step = (high - low) / (levels - 1)
    plain = ((groups - low) / step.clamp_min(1e-9)).round() * step + low
    error = (codes.dequantize() - w).view(groups.shape).square().sum(-1)
    assert (error <= (plain - groups).square().sum(-1) * 1.02 + 1e-6).all()
    assert int(codes.codes.max()) == levels - 1
    assert torch.equal(codes.dequantize()[3], w[3])


@pytest.mark.parametrize("levels", [INT8_LEVELS, INT4_LEVELS])
def test_chunks_do_not_show(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = tensor(40, 64)
    whole = rounded(w, levels, 32).dequantize()
    monkeypatch.setattr("lorasrv.models.quantization.rounding._CHUNK_BYTES", 1000)
    assert torch.equal(rounded(w, levels, 32).dequantize(), whole)


def test_what_a_file_holds_is_not_rounded_again() -> None:
    four, eight = (rounded(tensor(16, 64), levels, 32) for levels in (INT4_LEVELS, INT8_LEVELS))

    def kept(name: str, group: int | None = None, *, keep_int8_codes: bool = True) -> tuple[bool, bool]:
        fmt = get_format(name, TORCH, group, keep_int8_codes=keep_int8_codes)
        return fmt.keeps(four), fmt.keeps(eight)

    assert kept("int4") == (True, True)
    assert kept("int4", 64) == kept("int8") == kept("q3h") == (False, True)
    assert kept("int4", keep_int8_codes=False) == (True, False)
    assert kept("q3h", keep_int8_codes=False) == kept("none") == (False, False)
    # Groups of 16, as files of GPTQ may have them.
    fine = rounded(tensor(16, 64), INT8_LEVELS, 16)
    numba = Ops(torch.device("cpu"), "numba")
    assert [get_format("int4", ops, None, keep_int8_codes=True).keeps(fine) for ops in (TORCH, numba)] == [True, False]


@pytest.mark.parametrize(
    ("name", "group", "words"),
    [
        ("int3", None, "--quantization 'int3' is unknown; choose from auto, none, int8, int4, q3h, nf4, fp4, fp8"),
        ("int4", 48, "--quantization-group 48 does not go with int4; choose from 32, 64, 128"),
        ("q3h", 32, "--quantization-group 32 does not go with q3h; choose from 64, 128"),
        ("none", 64, "--quantization none has no groups"),
    ],
)
def test_unknown_formats_and_groups_list_the_choices(name: str, group: int | None, words: str) -> None:
    with pytest.raises(UnsupportedFormat, match=words):
        get_format(name, TORCH, group)


def test_groups_that_do_not_divide() -> None:
    with pytest.raises(UnsupportedFormat, match="groups of 64 do not divide the 96 inputs of a linear"):
        get_format("q3h", TORCH).linear(tensor(16, 96), None, torch.float32)


SPEC = ModelSpec("llama", 2, 64, 128, 4, 2, 16, 100, 100, 1e-5)


def stored(levels: int | None = None, group: int = 32, spec: ModelSpec = SPEC) -> StoredWeights:
    """A checkpoint of floats, or of codes."""
    return StoredWeights(spec, None if levels is None else rounded(tensor(16, 128), levels, group))


class TestWhichFormatServesACheckpoint:
    @pytest.mark.parametrize(
        ("held", "name", "fit", "group"),
        [
            (stored(), "int8", Fit.DEFAULT, 32),
            (stored(INT8_LEVELS), "int8", Fit.EXACT, 32),
            (stored(INT4_LEVELS), "int4", Fit.EXACT, 32),
            (stored(INT4_LEVELS, 64), "int4", Fit.EXACT, 64),
            (stored(Q3H_LEVELS, 64), "q3h", Fit.EXACT, 64),
            (stored(spec=replace(SPEC, hidden_size=72)), "none", Fit.FLOATS, None),
            (stored(INT4_LEVELS, spec=replace(SPEC, hidden_size=72)), "none", Fit.FLOATS, None),
        ],
    )
    def test_auto_takes_the_best(self, held: StoredWeights, name: str, fit: Fit, group: int | None) -> None:
        found, accepted = select_format(held)
        assert (found, accepted.fit, accepted.group) == (name, fit, group)

    def test_a_group_that_is_asked_for_does_not_change_the_format_but_what_it_keeps(self) -> None:
        for group, fit in ((32, Fit.EXACT), (64, Fit.ON_REQUEST)):
            name, accepted = select_format(stored(INT4_LEVELS), "auto", group)
            assert (name, accepted.fit, accepted.group) == ("int4", fit, group)

    def test_eight_bits_of_a_file_stay_only_beside_fewer(self) -> None:
        for levels, keeps in ((INT4_LEVELS, True), (INT8_LEVELS, False), (None, False)):
            assert select_format(stored(levels), "int4")[1].keep_int8_codes == keeps

    def test_formats_asked_for_by_name(self) -> None:
        for name in FORMATS:
            served_as, accepted = select_format(stored(), name)
            assert served_as == {"bitsandbytes": "int8", "eetq": "int8"}.get(name, name)
            assert (accepted.fit == Fit.REFUSED) == (served_as in OF_FILES)
            assert accepted.reason
        for name in OF_FILES:
            packed = replace(stored(INT4_LEVELS), packing=StoredPacking(name, (4,), 4.0))
            assert select_format(packed)[0] == name
            assert select_format(packed)[1].fit == Fit.OWN
        for name, served_as in (("bitsandbytes-nf4", "nf4"), ("bitsandbytes-fp4", "fp4")):
            assert select_format(stored(), name)[0] == served_as
            packed = replace(stored(INT4_LEVELS), packing=StoredPacking("bitsandbytes", (4,), 4.0))
            assert select_format(packed, name)[0] == "bitsandbytes"
        refused = select_format(stored(spec=replace(SPEC, hidden_size=96)), "q3h")[1]
        assert refused.fit == Fit.REFUSED
        assert refused.reason.startswith("groups of 64 do not divide the 96 inputs of a linear; choose another")


class NegatedFormat(NoneFormat):
    """A format of tests: keeps weights with their signs turned. Serves models of 96 inner features, and no others."""

    name = "negated"
    groups = (16,)

    @classmethod
    def accepts(cls, stored: StoredWeights, group: int | None = None) -> Acceptance:
        if stored.spec.intermediate_size != 96:
            return Acceptance(Fit.REFUSED, "serves 96 inner features only; choose --quantization none")
        return Acceptance(Fit.EXACT, "made for it", group)

    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        assert isinstance(weight, Tensor)
        NegatedFormat.packed += 1
        return _Negated(-weight.to(dtype), None if bias is None else -bias.float())

    packed = 0


class _Negated(FloatLinear):
    def __call__(self, x: Tensor) -> Tensor:
        return -super().__call__(x)

    def dequantize(self) -> Tensor:
        return -super().dequantize()


class TestAFormatThatOnlyItsOwnFileKnows:
    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(FORMATS, NegatedFormat.name, NegatedFormat)
        monkeypatch.setattr(NegatedFormat, "packed", 0)

    @pytest.mark.parametrize("quantization", ["auto", "negated"])
    def test_it_serves(self, llama_dir: Path, quantization: str) -> None:
        def answer(quantization: str) -> list[int]:
            with offline_engine(llama_dir, quantization=quantization) as llm:
                return llm.generate([[5, 9, 60]], GREEDY)[0].token_ids

        assert answer(quantization) == answer("none")
        assert NegatedFormat.packed >= 4 * 3

    def test_it_refuses_with_its_own_words(self, model: Path) -> None:
        with closing(open_checkpoint(str(model))) as checkpoint:
            assert choose_format(ModelOptions(), checkpoint, TORCH).name == "int8"
            for asked, group, words in (
                ("negated", None, "^--quantization negated: serves 96 inner features only"),
                ("negated", 32, "32 does not go with negated; choose from 16"),
                (
                    "int5",
                    None,
                    "choose from auto, none, int8, .*, nf4, fp4, .*, gptq, awq, .*, bitsandbytes, .*, gguf, negated",
                ),
                ("auto", 128, "^--quantization int8: groups of 128 do not divide the 64 inputs"),
            ):
                with pytest.raises(UnsupportedFormat, match=words):
                    choose_format(ModelOptions(quantization=asked, quantization_group=group), checkpoint, TORCH)
