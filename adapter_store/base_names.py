"""Names of base models, compared: is it the same one, and was it quantized in the same way?

A name is a hub's or a folder's last part. What stands behind the model's own name says how a file of it is written:
`-GPTQ-Int8`, `-unsloth-bnb-4bit`, `.Q4_K_M`. What is left must be equal: Llama-3.2-1B is not Llama-3.2-1B-Instruct.
"""

import re
from dataclasses import dataclass

from adapter_store.errors import show

MAX_CHARS = 200
_FORMAT = r"hf|gguf|ggml|mlx|unsloth|dynamic|quantized|bf16|fp?16|fp?32"
_QUANTIZED = (
    r"bnb|gptq|awq|hqq|autoround|qat|exl[23]|nf4|mxfp[48]|nvfp4|[1-8]bit|(?:int|fp)[1-8]|w\d{1,2}a\d{1,2}|"
    r"(?:ud[-_])?i?q[1-8](?:_(?:[01k]|nl|xxs|xs|s|m|l|xl))*"
)
_SUFFIX = re.compile(rf"[-._ ](?:({_QUANTIZED})|{_FORMAT})$")


@dataclass(frozen=True, slots=True)
class BaseName:
    """`model` is its own name, without case and punctuation; `quantization` what is said of that, in order."""

    shown: str
    model: str
    quantization: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "BaseName":
        """A folder's path is never repeated in full."""
        shown = text.replace("\\", "/").rstrip("/").rpartition("/")[2]
        rest, quantization = shown[-MAX_CHARS:].lower(), []
        while suffix := _SUFFIX.search(rest):
            rest = rest[: suffix.start()]
            quantization += [suffix[1]] if suffix[1] else []
        return cls(shown, "".join(c for c in rest if c.isalnum()), tuple(reversed(quantization)))


def other_base(trained_on: str, served: str) -> list[str]:
    """Warnings of an adapter that says what it was trained on. One that was trained on weights that were not quantized
    fits what is made of them: how this server rounds its base is the operator's to choose.
    """
    theirs, ours = BaseName.of(trained_on), BaseName.of(served)
    if not (theirs.model and ours.model):
        return []
    names = f"trained on {show(theirs.shown)}, served on {show(ours.shown)}"
    if theirs.model != ours.model:
        return [f"{names}: shapes fit, but check that it is the same base"]
    if theirs.quantization and theirs.quantization != ours.quantization:
        return [f"{names}: another quantization than it was trained with, so answers may differ a little"]
    return []
