"""Weight formats: what they compute is what they say they hold."""

import pytest
import torch
from torch import Tensor

from lorasrv.errors import ConfigError
from lorasrv.quant import FORMATS, get_format
from lorasrv.quant.int8 import quantize_rows
from sgmv_kernels import linear_torch

ERROR = {"none": {torch.float32: 1e-5, torch.bfloat16: 4e-3}, "int8": {torch.float32: 0.02, torch.bfloat16: 0.02}}
"""Relative to the true product, by format and dtype."""
DTYPES = (torch.float32, torch.bfloat16)


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_near_the_float_product(name: str, dtype: torch.dtype, biased: bool) -> None:
    w, bias, x = tensor(96, 64), tensor(96, seed=2) if biased else None, tensor(9, 64, seed=1)
    linear = get_format(name).linear(w, bias, dtype)
    y = linear(x)
    assert (y.dtype, linear.in_features, linear.out_features) == (torch.float32, 64, 96)
    assert relative(y, torch.nn.functional.linear(x, w, bias)) < ERROR[name][dtype]


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_gives_what_the_arithmetic_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_torch, "activation_levels", lambda: None)
    linear = get_format(name).linear(tensor(96, 64), None, torch.bfloat16)
    torch.testing.assert_close(linear(torch.eye(64)), linear.dequantize().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_and_its_tied_head(name: str, dtype: torch.dtype) -> None:
    w, x, ids = tensor(50, 64), tensor(3, 64, seed=1), torch.tensor([0, 49, 7, 7])
    fmt = get_format(name)
    embedding = fmt.embedding(w, dtype)
    assert embedding(ids).dtype == torch.float32
    assert torch.equal(embedding(ids), embedding.dequantize()[ids])
    assert relative(embedding.dequantize(), w) < ERROR[name][dtype]
    head = fmt.tied_head(embedding, w, dtype)
    assert relative(head(x), x @ w.T) < ERROR[name][dtype]


def test_a_float_head_shares_the_embeddings_bytes() -> None:
    w = tensor(50, 64)
    embedding = get_format("none").embedding(w, torch.bfloat16)
    head = get_format("none").tied_head(embedding, w, torch.bfloat16)
    assert (embedding.nbytes, head.nbytes) == (50 * 64 * 2, 0)
    assert torch.equal(head.dequantize(), embedding.dequantize())


def test_stored_sizes() -> None:
    w, bias = tensor(96, 64), tensor(96)
    assert get_format("none").linear(w, bias, torch.float32).nbytes == 96 * 64 * 4 + 96 * 4
    assert get_format("none").linear(w, None, torch.bfloat16).nbytes == 96 * 64 * 2
    assert 96 * 64 < get_format("int8").linear(w, None, torch.float32).nbytes <= 96 * (64 + 12)
    assert get_format("int8").embedding(w, torch.float32).nbytes == 96 * (64 + 4)


def test_int8_survives_outlier_channels() -> None:
    """What per-row scales alone would not: one channel two hundred times the others costs 7 bits all of theirs."""
    w, x = tensor(96, 576), tensor(8, 576, seed=1)
    x[:, 17] *= 200
    w[:, 17] = 0
    assert relative(get_format("int8").linear(w, None, torch.float32)(x), x @ w.T) < 0.15
    packed = linear_torch.pack_int8(*quantize_rows(w))
    if linear_torch.activation_levels() is not None:
        assert relative(linear_torch.int8_linear(x, packed), x @ w.T) > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantized_rows_are_within_half_a_level(dtype: torch.dtype) -> None:
    w = tensor(40, 64).to(dtype)
    w[3] = 0
    values, scales = quantize_rows(w)
    assert values.dtype == torch.int8
    assert (values[3] == 0).all()
    assert ((values.float() * scales[:, None] - w.float()).abs() <= scales[:, None] * 0.5001).all()
    assert (values.abs().amax(1)[torch.arange(40) != 3] == 127).all()


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    w = tensor(40, 64)
    whole = quantize_rows(w)
    monkeypatch.setattr("lorasrv.quant.int8._CHUNK_BYTES", 1000)
    assert all(torch.equal(a, b) for a, b in zip(quantize_rows(w), whole, strict=True))


def test_unknown_format_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="--quantization 'int3' is unknown; choose from none, int8"):
        get_format("int3")
