"""Safetensors files made by hand: any header, and headers whose tensors fill the data."""

import json
import math
from collections.abc import Mapping, Sequence

ITEM_BYTES = {"F32": 4, "BF16": 2}


def with_header(header: object, data: bytes = b"") -> bytes:
    """Return a file with any header: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tiled(shapes: Mapping[str, Sequence[int]], dtype: str = "F32") -> dict[str, object]:
    """Return header entries of tensors that follow each other without a gap."""
    entries: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return entries
