"""GGML tensor types: how many bytes a block has. No torch: a file's shapes can be read without it."""

from dataclasses import dataclass

from lorasrv.errors import UnsupportedModel

BLOCK = 32


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A block is `block_bytes` long and holds `block_size` neighbours of a row."""

    name: str
    block_size: int
    block_bytes: int


_LEFT_TO_GGUF = {
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", BLOCK, 18),
    3: GgmlType("Q4_1", BLOCK, 20),
    8: GgmlType("Q8_0", BLOCK, 34),
    30: GgmlType("BF16", 1, 2),
    **{number: GgmlType(*facts) for number, facts in _LEFT_TO_GGUF.items()},
}
_OTHER_NAMES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"}


def ggml_type(number: int, tensor: str) -> GgmlType:
    """Raises UnsupportedModel naming the type, the tensor and the known types."""
    if number not in _TYPES:
        name = _OTHER_NAMES.get(number, f"number {number}")
        known = ", ".join(kind.name for kind in _TYPES.values())
        raise UnsupportedModel(f"tensor {tensor!r:.80} has GGUF type {name}, which is not supported; known: {known}")
    return _TYPES[number]
