"""Token ids -> the text that a caller sees. One of these for each request, in the server and offline alike.

Text comes out in whole characters, and never a part of a stop string: a tail that may still become one is held back.
"""

from lorasrv.detokenizer import Detokenizer
from lorasrv.request import EngineOutput, FinishReason, RequestOutput
from lorasrv.sampling import SamplingParams


class OutputProcessor:
    """Text and ends of one request."""

    def __init__(self, num_prompt_tokens: int, sampling: SamplingParams, detokenizer: Detokenizer) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._stop = sampling.stop
        self._min_tokens = sampling.min_tokens
        longest = max((len(stop) for stop in sampling.stop), default=0)
        self._beginnings = [tuple(s[:n] for s in sampling.stop if len(s) > n) for n in range(1, longest)]
        self._detokenizer = detokenizer
        self._num_generated = 0
        self._num_chars = 0
        self._offsets: list[int] = []
        self._held = ""

    @property
    def num_generated_tokens(self) -> int:
        """So far."""
        return self._num_generated

    def process(self, output: EngineOutput) -> RequestOutput:
        """Add one step's tokens.

        The result may be finished although `output` is not: a stop string was met, and the engine must be told to
        abort. Nothing may be processed after a finished result.
        """
        self._num_generated += len(output.new_token_ids)
        is_early = self._num_generated <= self._min_tokens
        text = self._held + self._push(output)
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
        at, stop = (-1, None) if is_early else self._find_stop(text)
        if stop is not None:
            return self._result(output, text[:at], FinishReason.STOP, stop)
        if output.finish_reason is not None:
            return self._result(output, text, output.finish_reason, output.stop_token_id)
        held = self._possible_stop_length(text)
        self._held = text[len(text) - held :]
        return self._result(output, text[: len(text) - held], None, None)

    def _push(self, output: EngineOutput) -> str:
        """The text that these tokens make certain; notes where in the whole text each of them begins."""
        pieces: list[str] = []
        self._offsets = []
        for number, token in enumerate(output.new_token_ids, 1):
            self._offsets.append(self._num_chars)
            if output.stop_token_id is None or number < len(output.new_token_ids):
                pieces.append(self._detokenizer.push((token,)))
                self._num_chars += len(pieces[-1])
        return "".join(pieces)

    def _find_stop(self, text: str) -> tuple[int, str | None]:
        """The first stop string that ends in the new part of the text, and where it begins. What was held back has
        none that counts: the first `min_tokens` tokens may have one.
        """
        old = len(self._held)
        found = [(at, stop) for stop in self._stop if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0]
        return min(found, key=lambda f: f[0], default=(-1, None))

    def _possible_stop_length(self, text: str) -> int:
        """Length of the longest tail of the text that a stop string begins with."""
        return max((n for n, beginnings in enumerate(self._beginnings, 1) if text.endswith(beginnings)), default=0)

    def _result(
        self, output: EngineOutput, text: str, reason: FinishReason | None, stop_reason: str | int | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=output.request_id,
            text=text,
            token_ids=output.new_token_ids,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated,
            timing=output.timing,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=output.error,
            refusal=output.refusal,
            retry_after_s=output.retry_after_s,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            text_offsets=tuple(self._offsets) if output.logprobs else (),
        )
