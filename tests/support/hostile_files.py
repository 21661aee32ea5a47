"""Files built to be expensive to refuse, and the expected answers. As a script, it prints the cost of each refusal."""

import io
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from safetensors_bytes import tiled, with_header

from adapter_store.errors import AdapterInvalid, Problem
from adapter_store.formats.safetensors_file import header_cap_bytes
from adapter_store.spec import BaseShapes
from adapter_store.validation.validate import check_adapter

BASE = BaseShapes(
    family="llama", num_layers=2, modules={"self_attn.q_proj": (32, 32), "self_attn.v_proj": (32, 16)}, name="tiny"
)
CAP_BYTES = header_cap_bytes(BASE)
CONFIG: Mapping[str, object] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
STEM = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{STEM}.lora_A.weight", f"{STEM}.lora_B.weight"


class CountingFile(io.BytesIO):
    """A file that counts the bytes read."""

    taken = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


@dataclass(frozen=True)
class Hostile:
    """Describe a file: `code` must be among its problems, with at most `read_bytes` read and `peak_bytes` allocated."""

    what: str
    make: Callable[[], bytes]
    code: str
    read_bytes: int = 8
    peak_bytes: int = 1 << 20
    config: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """Hold the cost of a refusal."""

    problems: tuple[Problem, ...]
    file_bytes: int
    read_bytes: int
    peak_bytes: int
    ms: float


def measure(case: Hostile) -> Cost:
    """Check the file twice, since counting allocations distorts the time; raise AssertionError if it is accepted."""
    data = case.make()
    file = CountingFile(data)
    started = time.perf_counter()
    _refuse(case, CountingFile(data), len(data))
    ms = (time.perf_counter() - started) * 1e3
    tracemalloc.start()
    try:
        problems = _refuse(case, file, len(data))
        return Cost(problems, len(data), file.taken, tracemalloc.get_traced_memory()[1], ms)
    finally:
        tracemalloc.stop()


def _refuse(case: Hostile, file: CountingFile, file_bytes: int) -> tuple[Problem, ...]:
    try:
        check_adapter({**CONFIG, **case.config}, file, file_bytes, BASE, 16)
    except AdapterInvalid as error:
        return error.problems
    raise AssertionError(f"{case.what}: accepted")


def _million() -> bytes:
    part = b'"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    return with_header(b"{" + b"".join(part % i for i in range(1_000_000))[:-1] + b"}")


def _as_many_as_fit(entry: bytes) -> bytes:
    body = b",".join(entry % i for i in range(CAP_BYTES // (len(entry) + 4)))
    return with_header(b"{" + body + b"}")


def _good(values: bytes = b"\0\0\x80?" * 128) -> bytes:
    return with_header(tiled({A: [4, 32], B: [32, 4]}), values * 2)


def _named(name: str) -> bytes:
    return with_header(tiled({A: [4, 32], B: [32, 4], name: [1]}), b"\0\0\x80?" * 257)


_EMPTY = b'"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
_UNKNOWN = b'"%d":{"dtype":"Q","shape":[1],"data_offsets":[0,0]}'
_WHOLE = 8 + CAP_BYTES
_PARSED = 13 * CAP_BYTES
"""JSON of the cap's size, as Python objects."""
# The header is read twice: once to be checked, once to be hashed with the rest.
_SMALL = 1 << 14

HOSTILE = (
    Hostile("58 MB header, a million empty tensors", _million, "header_too_large"),
    Hostile("header length 2^63", lambda: (2**63).to_bytes(8, "little") + b"{}", "header_too_large"),
    Hostile("header length 2^64 - 1", lambda: (2**64 - 1).to_bytes(8, "little") + b"{}", "header_too_large"),
    Hostile("header one byte over the cap", lambda: with_header(b" " * (CAP_BYTES + 1)), "header_too_large"),
    Hostile("as many empty tensors as fit", lambda: _as_many_as_fit(_EMPTY), "too_many_tensors", _WHOLE, _PARSED),
    Hostile("as many unknown types as fit", lambda: _as_many_as_fit(_UNKNOWN), "too_many_tensors", _WHOLE, _PARSED),
    Hostile("a million brackets", lambda: with_header(b"[" * (CAP_BYTES - 8)), "malformed_header", _WHOLE, _PARSED),
    Hostile("a million digits", lambda: with_header(b"9" * (CAP_BYTES - 8)), "malformed_header", _WHOLE, _PARSED),
    Hostile("a key twice", lambda: with_header(b'{"a":1,"a":2}'), "malformed_header", _SMALL),
    Hostile("a pickle", lambda: b"\x80\x04\x95" + bytes(1 << 20), "not_safetensors"),
    Hostile("a zip archive", lambda: b"PK\x03\x04" + bytes(1 << 20), "not_safetensors"),
    Hostile("zero-size tensors", lambda: with_header(tiled({A: [0, 32]})), "empty_tensor", _SMALL),
    Hostile(
        "a shape of 2^62 by 2^62",
        lambda: with_header({A: {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}}, bytes(8)),
        "malformed_header",
        _SMALL,
    ),
    Hostile("../ as a name", lambda: _named("../../../etc/passwd"), "unknown_tensor", _SMALL),
    Hostile("NUL in a name", lambda: _named(f"{STEM}\0.lora_A.weight"), "unknown_tensor", _SMALL),
    Hostile("a name of a MiB", lambda: _named("x" * (CAP_BYTES - 1024)), "unknown_tensor", 2 * _WHOLE, _PARSED),
    Hostile("a name of dots", lambda: _named("module." * (CAP_BYTES // 8)), "unknown_tensor", 2 * _WHOLE, _PARSED),
    Hostile("right-to-left override in a name", lambda: _named("\u202egnirts"), "unknown_tensor", _SMALL),
    Hostile("NaN in the data", lambda: _good(b"\0\0\xc0\x7f" * 128), "non_finite", _SMALL),
    Hostile("infinity in the data", lambda: _good(b"\0\0\x80\x7f" * 128), "non_finite", _SMALL),
    Hostile("an infinite alpha", _good, "malformed_config", _SMALL, config={"lora_alpha": float("inf")}),
    Hostile(
        "a pattern that runs for years",
        _good,
        "unsupported_rank_pattern",
        _SMALL,
        config={"rank_pattern": {"(?=(.*a){20}x)": 4}, "target_modules": "(.*a){20}x"},
    ),
)


def main() -> None:
    """Print a Markdown table of the costs."""
    print("| file | bytes | read | allocated | ms | refused as |\n|---|---|---|---|---|---|")
    for case in HOSTILE:
        cost = measure(case)
        sizes = " | ".join(_size(n) for n in (cost.file_bytes, cost.read_bytes, cost.peak_bytes))
        print(f"| {case.what} | {sizes} | {cost.ms:.1f} | `{case.code}` |")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,}"


if __name__ == "__main__":
    main()
