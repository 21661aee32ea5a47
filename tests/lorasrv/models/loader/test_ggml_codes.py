"""Codes of GGML blocks, against the gguf package's numbers."""

import gguf
import numpy as np
import pytest
import torch
from ggml_blocks import quantize

from lorasrv.errors import CorruptModel
from lorasrv.models.loader.ggml_codes import decode_codes, packing_of
from lorasrv.models.loader.gguf_file import TensorInfo, ggml_type

EXACT = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4"), 16),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q8_0", "Q5_K"), 256),
}
"""Types whose codes are kept, and their levels."""
ROUNDED = ("Q2_K", "Q3_K", "Q6_K", "IQ2_XXS", "IQ3_S", "IQ1_M", "TQ2_0")


def blocks_of(kind: str, rows: int = 5, blocks: int = 2) -> np.ndarray:
    """Any bytes, but scales of 2^-8 to 2^-4."""
    ours = ggml_type(int(gguf.GGMLQuantizationType[kind]), "t")
    stored = np.random.default_rng(1).integers(0, 256, (rows, blocks, ours.block_bytes), dtype=np.uint8)
    halves = {"MXFP4": (), "Q4_1": (1, 3), "Q5_1": (1, 3), "Q4_K": (1, 3), "Q5_K": (1, 3), "Q2_K": (81, 83)}
    ends = {"Q6_K": (209,), "Q3_K": (109,), "IQ1_M": (49, 51, 53, 55), "TQ2_0": (65,)}
    for place in (halves | ends).get(kind, (1,)):
        stored[..., place] = stored[..., place] & 0x83 | 0x24
    if kind == "MXFP4":
        stored[..., 0] = stored[..., 0] % 8 + 118
    return stored.reshape(rows, -1)


def info_of(kind: str, shape: tuple[int, ...]) -> TensorInfo:
    number = {"F16": 1}.get(kind) or int(gguf.GGMLQuantizationType[kind])
    return TensorInfo(shape, ggml_type(number, "t"), 0, 0)


def read(kind: str, stored: np.ndarray) -> tuple[torch.Tensor, object]:
    want = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    codes = decode_codes("w", stored.reshape(-1).copy(), info_of(kind, want.shape).type, want.shape)
    return torch.from_numpy(want), codes


@pytest.mark.parametrize("kind", EXACT)
def test_codes_are_the_files_own(kind: str) -> None:
    want, codes = read(kind, blocks_of(kind))
    assert codes.levels == EXACT[kind]
    assert codes.group == 32
    assert want.isfinite().all()
    assert torch.equal(codes.dequantize(), want)
    assert torch.equal(codes[torch.tensor([4, 0])].dequantize(), want[[4, 0]])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS"])
def test_blocks_of_real_weights(kind: str) -> None:
    """The tests' own packing is near to what it packs, and read exactly."""
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    want, codes = read(kind, quantize(values, kind))
    assert float((want - torch.from_numpy(values)).norm() / np.linalg.norm(values)) < (0.05 if "5" in kind else 0.12)
    assert torch.equal(codes.dequantize(), want)


@pytest.mark.parametrize("kind", ROUNDED)
def test_other_types_are_rounded_to_8_bits(kind: str) -> None:
    want, codes = read(kind, blocks_of(kind))
    assert codes.levels == 256
    # Random scales leave groups with outliers; weights of a model change by 0.6 %.
    assert 0 < float((codes.dequantize() - want).norm() / want.norm()) < 0.01


def test_q6_k_of_real_weights_changes_by_little() -> None:
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    want, codes = read("Q6_K", quantize(values, "Q6_K"))
    assert 0.003 < float((codes.dequantize() - want).norm() / want.norm()) < 0.0065


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS"])
def test_scales_that_are_no_numbers(kind: str) -> None:
    stored = blocks_of(kind)
    stored[3, 1] = 0x7E
    info = info_of(kind, (5, 2 * ggml_type(int(gguf.GGMLQuantizationType[kind]), "t").block_size))
    with pytest.raises(CorruptModel, match="blk w holds NaN or infinity"):
        decode_codes("blk w", stored.reshape(-1), info.type, info.shape)


def test_floats_and_vectors_have_no_codes() -> None:
    assert decode_codes("w", np.zeros(128, np.uint8), ggml_type(1, "t"), (2, 32)) is None
    assert decode_codes("w", np.zeros(34, np.uint8), ggml_type(8, "t"), (32,)) is None


def test_what_is_said_of_a_file() -> None:
    def said(*kinds: str) -> object:
        return packing_of({str(i): info_of(kind, (256, 256 * (i + 1))) for i, kind in enumerate(kinds)})

    assert said("Q4_0", "Q4_1") is said("Q8_0") is said("F32", "F16", "BF16") is None
    for mixed in (("Q4_0", "Q8_0"), ("Q4_0", "F16"), ("Q8_0", "BF16")):
        assert (said(*mixed).method, said(*mixed).rounding) == ("gguf", ""), "no other format has both as they are"
    exact = said("Q4_K", "IQ4_XS", "Q4_0")
    assert (exact.method, exact.bits, exact.mean_bits, exact.rounding) == ("gguf", (4,), 4, "")
    mixed = said("Q4_K", "Q6_K")
    assert (mixed.bits, mixed.rounding[:27]) == ((4, 6), "Q6_K stored in 8 bits, with")
    assert mixed.mean_bits == pytest.approx((4 + 2 * 8) / 3)
    assert said("IQ3_S", "Q2_K").rounding.startswith("IQ3_S, Q2_K stored in 8 bits")
