"""Formats of parts, as options write them."""

import pytest

from lorasrv.errors import UnsupportedFormat
from lorasrv.models.code_format import CodeFormat, parse_parts

GROUPS = {"int8": 32, "int4": 32, "q3h": 64}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("attn=int4,mlp=q3h", {"qkv": "int4:32", "o": "int4:32", "gate_up": "q3h:64", "down": "q3h:64"}),
        ("down=int8, mlp = q3h:128", {"gate_up": "q3h:128", "down": "int8:32"}),
        ("mlp=q3h,down=int8:64", {"gate_up": "q3h:64", "down": "int8:64"}),
        ("o=int4", {"o": "int4:32"}),
    ],
)
def test_a_site_goes_before_its_part_in_any_order(text: str, found: dict[str, str]) -> None:
    assert {site: str(form) for site, form in parse_parts(text, GROUPS).items()} == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("attention=int4", "'attention' is no part of a layer; choose from attn, mlp, qkv, o, gate_up, down"),
        ("attn=int4,", "'' is no part of a layer"),
        ("attn=int5", "'int5' is no format of a part; choose from int8, int4, q3h"),
        ("attn=int4,mlp", "mlp has no format; write mlp=int4"),
        ("attn=int4,attn=q3h", "names attn twice"),
        ("attn=q3h:32", "q3h has no groups of '32'; choose from 64, 128"),
        ("attn=int4:", "int4 has no groups of ''; choose from 32, 64, 128"),
    ],
)
def test_what_is_no_format_by_part_is_named(text: str, says: str) -> None:
    with pytest.raises(UnsupportedFormat) as refused:
        parse_parts(text, GROUPS)
    assert str(refused.value).startswith(f"--quantization {text!r}")
    assert says in str(refused.value)


@pytest.mark.parametrize(("name", "group", "bits"), [("int8", 32, 8.5), ("int4", 64, 4.5), ("q3h", 128, 3.75)])
def test_bits_count_scales_and_minima(name: str, group: int, bits: float) -> None:
    assert CodeFormat(name, group).bits == bits
