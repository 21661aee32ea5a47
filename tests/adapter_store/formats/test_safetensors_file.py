"""Headers of safetensors files: what the library writes is read, damage and other files are refused."""

import json
import math
from typing import Any

import pytest
from hostile_files import CAP_BYTES, HOSTILE, Hostile, measure
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load as reference_load
from store_kit import BASE, build

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.safetensors_file import SafetensorsHeader, header_cap_bytes, parse_header
from adapter_store.spec import BaseShapes

CAP = 1 << 20
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def test_reads_what_the_library_writes() -> None:
    data = build.file()
    header = parse_header(data, CAP)
    expected = reference_load(data)
    assert set(header.tensors) == set(expected)
    assert all(header.tensors[name].shape == array.shape for name, array in expected.items())
    assert header.data_start + header.data_bytes == len(data)


def refused(data: bytes) -> dict[str, str]:
    with pytest.raises(AdapterInvalid) as caught:
        parse_header(data, CAP)
    return {p.code: f"{p.field}: {p.message}" for p in caught.value.problems}


def entry(**changes: Any) -> dict[str, Any]:
    return {"t": F32 | changes}


@pytest.mark.parametrize(
    ("header", "data", "code"),
    [
        (b"not json", b"", "malformed_header"),
        (b"\xff\xfe", b"", "malformed_header"),
        (b"[1]", b"", "malformed_header"),
        (b"[" * 100_000, b"", "malformed_header"),
        (b'{"t":' + b"9" * 5000 + b"}", b"", "malformed_header"),
        (b'{"t":1,"t":2}', b"", "malformed_header"),
        ({}, b"", "no_tensors"),
        ({"__metadata__": {"a": 1}} | entry(), bytes(8), "malformed_header"),
        ({"t": []}, b"", "malformed_header"),
        ({"t": {"dtype": "F32", "shape": [2]}}, b"", "malformed_header"),
        ({"t": F32 | {"extra": 1}}, bytes(8), "malformed_header"),
        (entry(shape=[True, 2]), bytes(8), "malformed_header"),
        (entry(shape=[-2]), bytes(8), "malformed_header"),
        (entry(shape=[2.0]), bytes(8), "malformed_header"),
        (entry(shape=[1] * 9), bytes(8), "malformed_header"),
        (entry(shape=[2**62, 2**62]), bytes(8), "malformed_header"),
        (entry(shape=[2**64]), bytes(8), "malformed_header"),
        (entry(data_offsets=[0]), bytes(8), "malformed_header"),
        (entry(data_offsets=[-8, 0]), bytes(8), "malformed_header"),
        (entry(data_offsets=[8, 0]), bytes(8), "malformed_header"),
        (entry(data_offsets=[4, 12]), bytes(12), "malformed_header"),
        (entry(shape=[3]), bytes(8), "malformed_header"),
        (entry(shape=[0, 4096], data_offsets=[0, 0]), b"", "empty_tensor"),
        (entry(), bytes(7), "truncated"),
        (entry(), bytes(9), "trailing_bytes"),
        ({"a": F32, "b": F32}, bytes(8), "malformed_header"),
        ({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}, bytes(20), "malformed_header"),
        *[(entry(dtype=d), bytes(8), "unsupported_dtype") for d in ("F64", "I8", "F8_E4M3", "BOOL", "f32", 7, None)],
    ],
)
def test_malformed_headers(header: Any, data: bytes, code: str) -> None:
    assert code in refused(build.raw(header, data))


def test_every_tensor_with_a_problem_is_counted() -> None:
    header = {f"t{i}": F32 | {"dtype": "I8"} for i in range(20)} | {"z": F32 | {"shape": [0]}}
    found = refused(build.raw(header, bytes(8)))
    assert "20 places" in found["unsupported_dtype"]
    assert "empty_tensor" in found


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "truncated"),
        (b"\x01\x02", "truncated"),
        (b"\x80\x04\x95" + bytes(100), "not_safetensors"),
        (b"PK\x03\x04" + bytes(100), "not_safetensors"),
        (b"GGUF" + bytes(100), "not_safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "not_safetensors"),
        ((2**63).to_bytes(8, "little") + b"{}", "header_too_large"),
        ((100).to_bytes(8, "little") + b"{}", "truncated"),
    ],
)
def test_files_that_are_something_else(data: bytes, code: str) -> None:
    assert list(refused(data)) == [code]


def test_a_repeated_tensor_is_refused() -> None:
    """The library takes the last one in silence."""
    one = json.dumps(F32)
    data = build.raw(f'{{"t":{one},"t":{one}}}'.encode(), bytes(8))
    assert len(deserialize(data)) == 1  # type: ignore[no-untyped-call]
    assert "'t' appears more than once" in refused(data)["malformed_header"]


@pytest.mark.parametrize("length", [0x0280, 0x0480, 0x0580])
def test_a_header_whose_length_looks_like_a_pickle(length: int) -> None:
    text = json.dumps(entry()).encode().ljust(length)
    assert list(parse_header(build.raw(text, bytes(8)), CAP).tensors) == ["t"]


def test_cap_follows_the_base() -> None:
    assert header_cap_bytes(BASE) == CAP
    moe = BaseShapes("moe", 48, {f"mlp.experts.{i}.{m}": (1, 1) for i in range(128) for m in "gud"})
    assert header_cap_bytes(moe) == 2 * (5 * 48 * 3 * 128 + 1) * 256


@given(st.binary(max_size=64), st.integers(0, 70))
def test_any_bytes_are_a_header_or_refused(body: bytes, length: int) -> None:
    try:
        header = parse_header(length.to_bytes(8, "little") + body, CAP)
    except AdapterInvalid as error:
        str(error).encode()
    else:
        assert isinstance(header, SafetensorsHeader)


OFFSETS = st.lists(st.integers(-1, 24), min_size=2, max_size=2)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16"]),
        "shape": st.lists(st.integers(-1, 4), max_size=3),
        "data_offsets": OFFSETS,
    }
)


@given(st.dictionaries(st.text(max_size=3), ENTRY, min_size=1, max_size=3), st.integers(0, 24))
def test_what_we_accept_the_library_accepts(header: dict[str, Any], data_bytes: int) -> None:
    data = build.raw(header, bytes(data_bytes))
    try:
        ours = parse_header(data, CAP)
    except AdapterInvalid:
        return
    try:
        theirs = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        pytest.fail(f"the library refuses what we accept: {error}")
    assert {name: list(info.shape) for name, info in ours.tensors.items()} == {n: t["shape"] for n, t in theirs.items()}


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 3), max_size=2), st.sampled_from([0, 0, 0, -4, 4])), min_size=1, max_size=3
    ),
    st.sampled_from([0, 0, -4, 4]),
)
def test_tilings_that_are_nearly_right(tensors: list[tuple[list[int], int]], extra: int) -> None:
    """Holes, overlaps and bytes too many or too few: refused as the library refuses them; a true tiling is accepted."""
    header: dict[str, Any] = {}
    at = 0
    for shape, gap in tensors:
        start = max(at + gap, 0)
        at = start + 4 * math.prod(shape)
        header[f"t{len(header)}"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, at]}
    data = build.raw(header, bytes(max(at + extra, 0)))
    try:
        theirs = len(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError:
        theirs = 0
    try:
        ours = len(parse_header(data, CAP).tensors)
    except AdapterInvalid:
        ours = 0
    assert ours == theirs


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.what)
def test_refusing_it_is_cheap(case: Hostile) -> None:
    cost = measure(case)
    assert case.read_bytes > 8 or cost.ms < 50
    assert case.code in {problem.code for problem in cost.problems}
    assert cost.read_bytes <= case.read_bytes
    assert cost.peak_bytes <= case.peak_bytes
    for problem in cost.problems:
        assert len(problem.message) < 2000
        assert len(problem.field) < 300
        assert (problem.message + problem.field).isprintable()


def test_the_bounds_are_small_beside_what_is_refused() -> None:
    """Memory may grow by ten MB; a header of the cap is four thousand tensors."""
    assert CAP_BYTES == 1 << 20
    assert max(len(case.make()) for case in HOSTILE) > 50e6
