"""Scanning the values of an upload: what is not finite is found in any chunk; norms."""

import io

import pytest
import torch
from store_kit import BASE, PREFIX, Q0, build, check, digest_of, norm_of_b, problems_of

from adapter_store.validation.validate import check_adapter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, -1])
def test_non_finite_values(dtype: torch.dtype, value: float, where: int) -> None:
    tensors = build.tensors(dtype=dtype)
    name = f"{PREFIX}1.self_attn.v_proj.lora_B.weight"
    tensors[name].view(-1)[where] = value
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert found["non_finite"].field == name
    assert "NaN or infinite" in found["non_finite"].message


def test_the_largest_finite_values_pass_and_what_bf16_cannot_hold_does_not() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        tensors = build.tensors(dtype=dtype)
        tensors[f"{Q0}.lora_A.weight"][0, 0] = -torch.finfo(dtype).max
        check(build.config(), build.file(tensors))
    tensors = build.tensors()
    largest = torch.finfo(torch.bfloat16).max
    tensors[f"{Q0}.lora_A.weight"][0, 0] = largest
    check(build.config(), build.file(tensors))
    tensors[f"{Q0}.lora_A.weight"][0, 0] = 3.3961775292304601e38  # halfway to the next: rounds to infinity
    assert tensors[f"{Q0}.lora_A.weight"].bfloat16().isinf().any()
    found = problems_of(lambda: check(build.config(), build.file(tensors)))
    assert "too large for bf16" in found["non_finite"].message


def test_nan_beyond_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapter_store.validation.tensor_scan.CHUNK_BYTES", 64)
    tensors = build.tensors()
    tensors[f"{Q0}.lora_B.weight"][31, 3] = torch.nan
    assert "non_finite" in problems_of(lambda: check(build.config(), build.file(tensors)))
    tensors[f"{Q0}.lora_B.weight"][31, 3] = 0
    data = build.file(tensors)
    assert check(build.config(), data).spec.weights_digest == digest_of(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("missing", [1, 2, 3, 4, 200, 1001])
def test_a_file_that_becomes_shorter_while_it_is_read(dtype: torch.dtype, missing: int) -> None:
    """The end need not be that of a value."""
    data = build.file(dtype=dtype)
    found = problems_of(lambda: check_adapter(build.config(), io.BytesIO(data[:-missing]), len(data), BASE, 16))
    assert set(found) == {"truncated"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norm_of_b_over_many_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapter_store.validation.tensor_scan.CHUNK_BYTES", 64)
    tensors = build.tensors(dtype=dtype)
    report = check(build.config(), build.file(tensors)).report
    assert report.norm_b == pytest.approx(norm_of_b(tensors), rel=1e-9)
    untrained = {n: t * ("lora_A" in n) for n, t in tensors.items()}
    assert check(build.config(), build.file(untrained)).report.norm_b == 0
