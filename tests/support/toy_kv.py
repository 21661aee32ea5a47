"""A KV format for tests: int8 with a scale for each token and key head, stored in the page."""

from sgmv_kernels.formats.kv_format import HEAD_DIM, KEYS, TOKEN, VALUES, KVFormat, KVPart, Parts, Tensor

KEY_SCALES, VALUE_SCALES = "key_scales", "value_scales"


class ToyInt8KV(KVFormat):
    """A format with only the methods that the plain torch kernels need."""

    def __init__(self) -> None:
        super().__init__(
            "toy-int8",
            (
                KVPart(KEYS, "int8", (HEAD_DIM, TOKEN)),
                KVPart(KEY_SCALES, "float32", (TOKEN,)),
                KVPart(VALUES, "int8", (TOKEN, HEAD_DIM)),
                KVPart(VALUE_SCALES, "float32", (TOKEN,)),
            ),
        )

    def write(self, parts: Parts, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        for scale_name, rows in ((KEY_SCALES, keys), (VALUE_SCALES, values)):
            scales = rows.float().abs().amax(-1).clamp_min(1e-12) / 127
            parts[scale_name][pages, :, slots] = scales
            codes = (rows.float() / scales[..., None]).round().to(parts[KEYS].dtype)
            if scale_name == KEY_SCALES:
                parts[KEYS][pages, :, :, slots] = codes
            else:
                parts[VALUES][pages, :, slots] = codes

    def read(self, parts: Parts, pages: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        keys = parts[KEYS][pages].float() * parts[KEY_SCALES][pages][..., None, :]
        return keys, parts[VALUES][pages].float() * parts[VALUE_SCALES][pages][..., None]


TOY = ToyInt8KV()
