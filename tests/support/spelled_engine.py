"""A tiny byte-level tokenizer, and outputs as from the real output processor, for a fake engine with real tokens.

Every byte above 7 is a separate token, so that a character may be cut anywhere; three special tokens follow.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.outputs import EngineOutput, FinishReason, RequestId, RequestOutput, RequestTiming, TokenLogprobs
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.detokenizer import Detokenizer, _byte_alphabet
from lorasrv.text.gguf_vocabularies import BpeVocabulary
from lorasrv.text.tokenizer import Tokenizer, TokenizerSource

NUM_BYTES = 248
BOS, EOS, END_OF_TURN = range(NUM_BYTES, NUM_BYTES + 3)
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<turn>{% endfor %}assistant:"


def tiny_tokenizer(add_bos: bool = True) -> Tokenizer:
    characters = _byte_alphabet()
    spelled = {byte: char for char, byte in characters.items()}
    tokens = (*(spelled[byte] for byte in range(8, 256)), "<s>", "</s>", "<turn>")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    vocabulary = BpeVocabulary(tokens, (), "gpt-2", control=(BOS, EOS, END_OF_TURN))
    return Tokenizer.from_source(TokenizerSource(vocabulary, TEMPLATE, (EOS,), BOS, add_bos=add_bos, special=special))


def logprob_of(token_id: int, position: int) -> float:
    """Return an arbitrary but fixed logprob of a token of the answer."""
    return -((token_id * 31 + position * 17) % 97) / 64 - 0.015625


def spelled(tokenizer: Tokenizer, text: str, *, eos: bool = True) -> Callable[..., list[RequestOutput]]:
    """Script the fake engine: the text byte by byte, with top tokens, and then the end."""

    def outputs(rid: RequestId, index: int, asked: SimpleNamespace) -> list[RequestOutput]:
        sampling: SamplingParams = asked.sampling
        if sampling.prompt_only:
            return [
                RequestOutput(rid, "", (), len(asked.prompt), 0, RequestTiming(), finish_reason=FinishReason.LENGTH)
            ]
        said = text[index:] if asked.count > 1 else text
        ids = tokenizer.encode(said, add_special_tokens=False) + [EOS] * eos
        if sampling.max_tokens is not None:
            ids = ids[: sampling.max_tokens]
        processor = OutputProcessor(len(asked.prompt), sampling, Detokenizer(tokenizer, asked.text))
        return list(_processed(processor, rid, index, ids, asked.prompt, sampling))

    return outputs


def _processed(
    processor: OutputProcessor,
    rid: RequestId,
    index: int,
    ids: Sequence[int],
    prompt: Sequence[int],
    sampling: SamplingParams,
) -> Iterator[RequestOutput]:
    timing = RequestTiming(queue_ms=1.5)
    for position, token_id in enumerate(ids):
        last = position == len(ids) - 1
        ended = FinishReason.STOP if token_id == EOS else FinishReason.LENGTH
        stop_token_id = token_id if token_id == EOS else None
        # The processor treats a stop token without text as an end of sequence; its outputs are adjusted below.
        found = () if sampling.logprobs is None else (_found(token_id, position, sampling.logprobs),)
        made = EngineOutput(rid, (token_id,), ended if last else None, timing, stop_token_id, logprobs=found)
        output = processor.process(made)
        told: dict[str, Any] = {"stop_reason": None} if output.stop_reason == EOS else {}
        if sampling.prompt_logprobs is not None and position == 0 and index == 0:
            told["prompt_logprobs"] = (None, *(_found(t, p, 0) for p, t in enumerate(prompt[1:], 1)))
        output = replace(output, **told)
        yield output
        if output.finished:
            return


def _found(token_id: int, position: int, num_top: int) -> TokenLogprobs:
    top = sorted(((i, logprob_of(i, position)) for i in range(60, 60 + max(num_top, 1))), key=lambda t: (-t[1], t[0]))
    return TokenLogprobs(token_id, logprob_of(token_id, position), tuple(top[:num_top]))
