"""A tokenizer of Llama 2's kind, whose tokens of single bytes are written as their numbers."""

from collections.abc import Iterable

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource


def sentencepiece(words: Iterable[str], *, prepends: bool = False, strips: bool = True) -> Tokenizer:
    """Blanks are U+2581, every byte is a token to which what is not in `words` falls back; a blank goes in front of
    every text (`prepends`) and is stripped from every decoding (`strips`).
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *words]
    backend = Backend(models.BPE(vocab={w: i for i, w in enumerate(tokens)}, merges=[], byte_fallback=True))
    blanks = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prepends else blanks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return Tokenizer.from_source(TokenizerSource(TokenizerJson(backend.to_str()), eos_token_ids=(2,)))
