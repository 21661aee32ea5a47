"""Conversion of codes to weights in a GPU's registers, shared by the kernels of base linears.

One OR turns a code into an integer, as the mantissa of a float, and one multiply-add in the dtype of activations turns
that into a weight. Each function has a second form for Triton's interpreter, which cannot run GPU instructions.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl

from sgmv_kernels.formats.weight_codes import INT4_LEVELS
from sgmv_kernels.triton_ops.common import INTERPRETED, kernel

_INT4 = tl.constexpr(INT4_LEVELS)
_FP32, _BF16 = tl.constexpr(tl.float32), tl.constexpr(tl.bfloat16)
_FP32_128 = tl.constexpr(0x43000000)
"""128.0."""
_ELEVENTH = tl.constexpr(187)
"""v // 11 is v * 187 >> 11, for every v of seven bits."""
_INT4_TEXT = """{ .reg .b32 low, first, second, one, off; mov.b32 one, ONE; mov.b32 off, OFF4;
cvt.u32.u16 low, $2; prmt.b32 low, low, 0, 0x4140;
lop3.b32 first, low, 0x000F000F, MANTISSA, 0xEA; shr.u32 low, low, 4;
lop3.b32 second, low, 0x000F000F, MANTISSA, 0xEA;
fma.rn.TYPE first, first, one, off; fma.rn.TYPE second, second, one, off;
fma.rn.TYPE $0, first, $3, $4; fma.rn.TYPE $1, second, $5, $6; }"""
_BF16_WORDS = {"ONE": "0x3F803F80", "OFF4": "0xC308C308", "MANTISSA": "0x43004300", "TYPE": "bf16x2"}
_FP16_WORDS = {"ONE": "0x3C003C00", "OFF4": "0xE408E408", "MANTISSA": "0x64006400", "TYPE": "f16x2"}


def _written(text: str, words: dict[str, str]) -> Any:
    for name, word in words.items():
        text = text.replace(name, word)
    return tl.constexpr(text)


_INT4_BF16, _INT4_FP16 = _written(_INT4_TEXT, _BF16_WORDS), _written(_INT4_TEXT, _FP16_WORDS)
"""Two bytes of int4, and scales and offsets of both halves -> two weights of the first half and two of the second.

A code becomes the mantissa of 128 + code (fp16: 1024 + code), from which 136 (1032) is subtracted exactly.
"""
_INT8_BF16 = tl.constexpr("""{ .reg .b32 pair, low, sign, minus, none;
mov.b32 minus, 0xBF80BF80; mov.b32 none, 0x80008000;
cvt.u32.u16 pair, $1; prmt.b32 pair, pair, 0, 0x4140;
lop3.b32 low, pair, 0x007F007F, 0x43004300, 0xEA; lop3.b32 sign, pair, 0x00800080, 0x43004300, 0xEA;
fma.rn.bf16x2 low, sign, minus, low; fma.rn.bf16x2 $0, low, $2, none; }""")
_INT8_FP16 = tl.constexpr("""{ .reg .b32 pair, one, off, none;
mov.b32 one, 0x3C003C00; mov.b32 off, 0xE480E480; mov.b32 none, 0x80008000;
cvt.u32.u16 pair, $1; prmt.b32 pair, pair, 0, 0x4140;
lop3.b32 pair, pair, 0x00800080, 0x64006400, 0xBE;
fma.rn.f16x2 pair, pair, one, off; fma.rn.f16x2 $0, pair, $2, none; }""")
"""Two bytes of int8 and their scales -> two weights. bf16: 128 + the low seven bits, minus 128, or 256 if negative."""


def _weights_of_int4_interpreted(stored: Any, scale: Any, offset: Any, scale2: Any, offset2: Any, compute: Any) -> Any:
    first, second = halves_of(stored.to(tl.int32), INT4_LEVELS)
    return (first - 8).to(compute) * scale + offset, (second - 8).to(compute) * scale2 + offset2


@kernel()
def _weights_of_int4_compiled(stored, scale, offset, scale2, offset2, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    if COMPUTE == _FP32:
        first, second = halves_of(stored.to(tl.int32), _INT4)
        first, second = (first - 8).to(COMPUTE) * scale + offset, (second - 8).to(COMPUTE) * scale2 + offset2
    else:
        scale, offset = tl.broadcast_to(scale, stored.shape), tl.broadcast_to(offset, stored.shape)
        scale2, offset2 = tl.broadcast_to(scale2, stored.shape), tl.broadcast_to(offset2, stored.shape)
        held = [stored, scale, offset, scale2, offset2]
        if COMPUTE == _BF16:
            first, second = tl.inline_asm_elementwise(
                _INT4_BF16, "=r,=r,h,r,r,r,r", held, (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            first, second = tl.inline_asm_elementwise(
                _INT4_FP16, "=r,=r,h,r,r,r,r", held, (tl.float16, tl.float16), is_pure=True, pack=2
            )
    return first, second


weights_of_int4: Callable[..., Any] = _weights_of_int4_interpreted if INTERPRETED else _weights_of_int4_compiled
"""Function that turns bytes of int4 into weights of both halves; offsets are minima plus eight scales."""


def _weights_of_int8_interpreted(stored: Any, scale: Any, compute: Any) -> Any:
    return stored.to(compute) * scale


@kernel()
def _weights_of_int8_compiled(stored, scale, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    if COMPUTE == _FP32:
        made = stored.to(COMPUTE) * scale
    else:
        held = [stored, tl.broadcast_to(scale, stored.shape)]
        if COMPUTE == _BF16:
            made = tl.inline_asm_elementwise(_INT8_BF16, "=r,h,r", held, tl.bfloat16, is_pure=True, pack=2)
        else:
            made = tl.inline_asm_elementwise(_INT8_FP16, "=r,h,r", held, tl.float16, is_pure=True, pack=2)
    return made


weights_of_int8: Callable[..., Any] = _weights_of_int8_interpreted if INTERPRETED else _weights_of_int8_compiled
"""Function that turns int8 codes into weights."""


@kernel()
def halves_of(stored, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Split int32 bytes of int4, or pairs of q3h, into codes of the first and of the second half of a tile."""
    if LEVELS == _INT4:
        first, second = stored & 15, stored >> 4
    else:
        second = (stored * _ELEVENTH) >> 11
        first = stored - second * LEVELS
    return first, second


@kernel()
def number_of(code):  # type: ignore[no-untyped-def]
    """Return int32 codes below 128 as fp32 of 128 + code: the code is the mantissa, so no conversion is needed."""
    return ((code << 16) | _FP32_128).to(tl.float32, bitcast=True)
