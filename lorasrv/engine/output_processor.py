"""Output processor: turn the engine's token ids into text, in the server and offline.

Only whole characters are returned. A tail that may become a stop string is held back.
"""

from collections.abc import Sequence
from dataclasses import replace

from lorasrv.errors import InvalidRequest
from lorasrv.outputs import EngineOutput, FinishReason, RequestOutput, RequestTiming, TokenLogprobs
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.detokenizer import Detokenizer


class OutputProcessor:
    """Produce the text of one request and find its stop strings."""

    def __init__(self, num_prompt_tokens: int, sampling: SamplingParams, detokenizer: Detokenizer) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._stop = sampling.stop
        self._min_tokens = sampling.min_tokens
        longest = max((len(stop) for stop in sampling.stop), default=0)
        self._beginnings = [tuple(s[:n] for s in sampling.stop if len(s) > n) for n in range(1, longest)]
        self._detokenizer = detokenizer
        self._keep_stop = detokenizer.options.keep_stop
        self._num_generated = 0
        self._num_chars = 0
        self._held = ""

    @property
    def num_generated_tokens(self) -> int:
        """Return the number of tokens generated so far."""
        return self._num_generated

    def process(self, output: EngineOutput) -> RequestOutput:
        """Process one step's output.

        If a stop string is found, the result is finished although `output` is not, and the engine must be told to stop.
        Tokens after the stop string are left out. Process nothing after a finished result.
        """
        tokens, ended = output.new_token_ids, output.finish_reason is not None
        texts, offsets = list[str](), list[int]()
        for number, token in enumerate(tokens, 1):
            is_last = number == len(tokens)
            if output.logprobs:
                offsets.append(self._num_chars + self._detokenizer.num_owed(token))
            is_stop = is_last and output.stop_token_id is not None
            text = "" if is_stop and not self._keep_stop else self._detokenizer.push(token)
            self._num_chars += len(text)
            if ended and is_last:
                text += self._detokenizer.flush()
            text, stop = self._without_stop(text, number)
            texts.append(text)
            if stop is not None:
                return self._cut(output, number, texts, offsets, stop)
        if not tokens and ended:
            text, stop = self._without_stop(self._detokenizer.flush(), 0)
            texts.append(text)
            if stop is not None:
                return self._cut(output, 0, texts, offsets, stop)
        if ended:
            texts[-1] += self._held
            return self._result(output, texts, offsets, output.finish_reason, output.stop_token_id)
        return self._result(output, texts, offsets)

    def count(self, output: EngineOutput) -> RequestOutput:
        """Count the tokens of one step's output that nobody will read, without their text."""
        return self._result(output, (), (), output.finish_reason, output.stop_token_id)

    def repeat(self, request: EngineCoreRequest) -> RequestOutput:
        """Process the tokens that another engine has generated for a resumed request, as that engine did.

        Raises:
            InvalidRequest: the answer ends within them.
        """
        tokens = request.resumed_token_ids
        # Their log-probabilities are not known here; the client already has them.
        logprobs = () if request.sampling.logprobs is None else tuple(TokenLogprobs(token, 0.0) for token in tokens)
        result = self.process(EngineOutput(request.request_id, tokens, None, RequestTiming(), logprobs=logprobs))
        if result.finished:
            raise InvalidRequest("the answer ends within the tokens of {param}", param="resumed_token_ids")
        return result

    def _without_stop(self, text: str, num_tokens: int) -> tuple[str, str | None]:
        """Append `text`, which ends with the first `num_tokens` of this step, to what was held back; return the text
        that may be shown, and the stop string that ends it or None. A tail that may be the start of a stop string is
        held back."""
        if not self._stop:
            return text, None
        old = len(self._held)
        text = self._held + text
        if self._num_generated + num_tokens > self._min_tokens:
            # A stop string that lies within the text held back does not count: it came in the first `min_tokens`.
            begins = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stop)
            at, stop = min((found for found in begins if found[0] >= 0), key=lambda found: found[0], default=(-1, None))
            if stop is not None:
                return text[: at + len(stop) if self._keep_stop else at], stop
        shown = len(text) - self._possible_stop_length(text)
        self._held = text[shown:]
        return text[:shown], None

    def _possible_stop_length(self, text: str) -> int:
        """Return the length of the longest tail that is the start of a stop string."""
        for length in range(len(self._beginnings), 0, -1):
            if text.endswith(self._beginnings[length - 1]):
                return length
        return 0

    def _cut(
        self, output: EngineOutput, num_tokens: int, texts: Sequence[str], offsets: Sequence[int], stop: str
    ) -> RequestOutput:
        """Return the last output of an answer that a stop string ends within the first `num_tokens` of these tokens."""
        if num_tokens < len(output.new_token_ids):
            kept = output.new_token_ids[:num_tokens]
            output = replace(output, new_token_ids=kept, logprobs=output.logprobs[:num_tokens], error=None)
        return self._result(output, texts, offsets, FinishReason.STOP, stop)

    def _result(
        self,
        output: EngineOutput,
        texts: Sequence[str],
        offsets: Sequence[int],
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> RequestOutput:
        self._num_generated += len(output.new_token_ids)
        return RequestOutput(
            request_id=output.request_id,
            text=texts[0] if len(texts) == 1 else "".join(texts),
            token_ids=output.new_token_ids,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated,
            timing=output.timing,
            num_steps=output.num_steps,
            num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=output.error,
            refusal=output.refusal,
            retry_after_s=output.retry_after_s,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            text_offsets=tuple(offsets),
            token_texts=tuple(texts) if output.logprobs else (),
        )
