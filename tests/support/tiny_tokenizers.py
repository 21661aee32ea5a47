"""A tokenizer of Llama 2's kind, whose single-byte tokens are written as numbers."""

from collections.abc import Iterable

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource


def sentencepiece(words: Iterable[str], *, prepends: bool = False, strips: bool = True) -> Tokenizer:
    """Return a tokenizer in which blanks are U+2581 and text outside `words` falls back to byte tokens. A blank is put
    in front of every text (`prepends`) and stripped from every decoded text (`strips`).
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *words]
    backend = Backend(models.BPE(vocab={w: i for i, w in enumerate(tokens)}, merges=[], byte_fallback=True))
    blanks = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prepends else blanks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return Tokenizer.from_source(TokenizerSource(TokenizerJson(backend.to_str()), eos_token_ids=(2,)))
