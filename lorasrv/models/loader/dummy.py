"""Generate random weights of a given shape for measurements and tests: `--load-format dummy`. Reads no weight file."""

import zlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lorasrv.errors import ModelNotFound
from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader.hf import read_spec
from lorasrv.models.spec import SHAPES
from lorasrv.text.gguf_vocabularies import BpeVocabulary
from lorasrv.text.tokenizer import TokenizerJson, TokenizerSource
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

_STD = 0.02
_BLOCK = 1_000_003
"""Number of random numbers, which all weights repeat from different positions, because drawing eight billion numbers
would take minutes. It is a prime, so that no two rows of a weight are equal."""


class DummyCheckpoint:
    """Generate a checkpoint of random weights; see `Checkpoint`.

    Args:
        model: a built-in shape, a config.json, or a folder that contains one.
    Raises:
        ModelNotFound, CorruptModel, UnsupportedModel: `model` is none of these, or its configuration cannot be read.
    """

    packing = None

    def __init__(self, model: str) -> None:
        self._folder: Path | None = None
        if model in SHAPES:
            self.name, self.spec = model, SHAPES[model]
            return
        path = Path(model).expanduser()
        folder = path.parent if path.name == "config.json" else path
        if not (folder / "config.json").is_file():
            known = ", ".join(SHAPES)
            raise ModelNotFound(f"--load-format dummy: --model {model!r} has no config.json and is not one of: {known}")
        self._folder, self.name, self.spec = folder, folder.resolve().name, read_spec(folder)

    def names(self) -> Iterable[str]:
        return tensor_shapes(self.spec).keys()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, bf16. Norms are 1, biases 0; other weights are random, and the same for the same name."""
        shape = tensor_shapes(self.spec)[name]
        if len(shape) == 1:
            return (torch.zeros if name.endswith(".bias") else torch.ones)(shape, dtype=torch.bfloat16)
        weight = torch.empty(shape, dtype=torch.bfloat16)
        flat, block = weight.view(-1), self._numbers.roll(zlib.crc32(name.encode()) % _BLOCK)
        for start in range(0, flat.numel(), _BLOCK):
            flat[start : start + _BLOCK] = block[: flat.numel() - start]
        return weight

    def codes(self, name: str) -> GroupQuantizedWeight | None:
        return None

    def tokenizer_source(self) -> TokenizerSource:
        """Return the folder's tokenizer.json; without one, a tokenizer with one token for each byte."""
        file = self._folder / "tokenizer.json" if self._folder else None
        vocabulary: TokenizerJson | BpeVocabulary
        if file is not None and file.is_file():
            vocabulary = TokenizerJson(file.read_text("utf-8"))
        else:
            vocabulary = BpeVocabulary(_byte_tokens(self.spec.vocab_size), (), "gpt-2")
        return TokenizerSource(vocabulary, None, self.spec.eos_token_ids, self.spec.bos_token_id)

    def close(self) -> None:
        """Do nothing: no file is open."""

    @cached_property
    def _numbers(self) -> Tensor:
        return (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * _STD).bfloat16()


def _byte_tokens(vocab_size: int) -> tuple[str, ...]:
    """Return the bytes as byte-level BPE spells them: printable ones unchanged, others from U+0100 on, in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    spelled = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    return (*spelled, *(f"<unused{i}>" for i in range(256, vocab_size)))[:vocab_size]
