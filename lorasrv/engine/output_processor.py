"""Output processor: the engine's token ids as the text and the streams that callers see.

`OutputProcessor` turns one request's tokens into whole characters, in the server and offline alike; it holds back a
tail that may become a stop string. `RequestStream` is the request's outputs as an asynchronous iterator that may be
closed at any time. `InFlightRequests` tells which requests use an adapter, until their last choice has finished, so
that it can be deleted: the engine knows contents only, here a request is also known by its adapter id, as another id
may name the same content. Streams and `InFlightRequests` belong to the event loop's thread.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from lorasrv.errors import AdapterDeleted, AdapterLoadFailed, InvalidRequest, name_of
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.outputs import EngineOutput, FinishReason, RequestId, RequestOutput, RequestTiming, TokenLogprobs, refused
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

        The result may be finished although `output` is not: a stop string was found, and the engine must be told to
        stop. Tokens behind the stop are left out. Process nothing after a finished result.
        """
        tokens, ended = output.new_token_ids, output.finish_reason is not None
        texts, offsets = list[str](), list[int]()
        for number, token in enumerate(tokens, 1):
            is_last = number == len(tokens)
            offsets.append(self._num_chars)
            self._num_generated += 1
            is_stop = is_last and output.stop_token_id is not None
            text = "" if is_stop and not self._keep_stop else self._detokenizer.push(token)
            self._num_chars += len(text)
            if ended and is_last:
                text += self._detokenizer.flush()
            text, stop = self._without_stop(text)
            texts.append(text)
            if stop is not None:
                return self._cut(output, number, texts, offsets, stop)
        if not tokens and ended:
            text, stop = self._without_stop(self._detokenizer.flush())
            texts.append(text)
            if stop is not None:
                return self._cut(output, 0, texts, offsets, stop)
        if ended:
            texts[-1] += self._held
            return self._result(output, texts, offsets, output.finish_reason, output.stop_token_id)
        return self._result(output, texts, offsets)

    def repeat(self, request: EngineCoreRequest) -> RequestOutput:
        """Process the tokens that another engine has generated for a resumed request, as they were there.

        Raises:
            InvalidRequest: the answer ends within them.
        """
        tokens = request.resumed_token_ids
        # Their log-probabilities are not known; those who ask for them have had them.
        logprobs = () if request.sampling.logprobs is None else tuple(TokenLogprobs(token, 0.0) for token in tokens)
        result = self.process(EngineOutput(request.request_id, tokens, None, RequestTiming(), logprobs=logprobs))
        if result.finished:
            raise InvalidRequest("the answer ends within the tokens of {param}", param="resumed_token_ids")
        return result

    def _without_stop(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now that `text` follows what was held back, and the stop string that ends
        it, or None. A tail that a stop string begins with is held back."""
        if not self._stop:
            return text, None
        old = len(self._held)
        text = self._held + text
        if self._num_generated > self._min_tokens:
            # Text that was held back has no stop string that counts: it may have one within the first `min_tokens`.
            begins = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stop)
            at, stop = min((found for found in begins if found[0] >= 0), key=lambda found: found[0], default=(-1, None))
            if stop is not None:
                return text[: at + len(stop) if self._keep_stop else at], stop
        shown = len(text) - self._possible_stop_length(text)
        self._held = text[shown:]
        return text[:shown], None

    def _possible_stop_length(self, text: str) -> int:
        """Return the length of the longest tail that a stop string begins with."""
        for length in range(len(self._beginnings), 0, -1):
            if text.endswith(self._beginnings[length - 1]):
                return length
        return 0

    def _cut(
        self, output: EngineOutput, num_tokens: int, texts: Sequence[str], offsets: Sequence[int], stop: str
    ) -> RequestOutput:
        """Return the end of an answer that a stop string has ended behind so many of an output's tokens."""
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
        return RequestOutput(
            request_id=output.request_id,
            text=texts[0] if len(texts) == 1 else "".join(texts),
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
            text_offsets=tuple(offsets) if output.logprobs else (),
            token_texts=tuple(texts) if output.logprobs else (),
        )


MAX_SINGLE = 64
"""Most unread outputs that wait one by one for a slow reader; further ones are joined, up to `JOINED_TOKENS` each."""
JOINED_TOKENS = 64


class StreamOwner(Protocol):
    """Feed streams; implemented by `AsyncEngine`."""

    def abort(self, request_id: RequestId, why: str = "client") -> None:
        """Finish the request before the next step, and its stream with it; `why` names the reason."""


class RequestStream(AsyncIterator[RequestOutput]):
    """Iterate over the outputs of one accepted request, for one reader. Closing it early aborts the request within
    one step. Unread outputs are bounded by the length of the answer. The first output of a resumed request repeats the
    tokens that it had.

    Raises (from iteration):
        AdapterLoadFailed: the adapter could not be loaded; nothing was generated.
        AdapterCorrupt: its weights are damaged on disk.
        AdapterCold: it is not in the pool and the request does not wait.
        LimitExceeded: its adapter or key has as many waiting requests as allowed.
        RequestTimeout: it was not finished in time.
        DeadlineUnreachable: it was predicted not to finish in time.
        AdapterDeleted: the adapter was deleted by force.
        EngineDead: the engine ended before the request did.
    """

    def __init__(self, engine: StreamOwner, request: EngineCoreRequest, processor: OutputProcessor) -> None:
        # Without the hold on its adapter: a stream may be kept for longer than the request.
        self.request = replace(request, hold=None)
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self._engine = engine
        self._processor = processor
        self._unread: deque[RequestOutput | Exception] = deque()
        if request.resumed_token_ids:
            self._unread.append(processor.repeat(request))
        self._reader: asyncio.Future[None] | None = None
        self._take: Callable[[RequestOutput], bool] | None = None
        self._finished = False

    @property
    def num_generated_tokens(self) -> int:
        """Return the number of tokens so far, read or not."""
        return self._processor.num_generated_tokens

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._finished:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output = self._unread.popleft()
        if isinstance(output, Exception):
            raise output
        return output

    def pass_to(self, take: Callable[[RequestOutput], bool]) -> None:
        self._take = take

    async def aclose(self) -> None:
        """Abort the request if it has not finished."""
        if not self._finished:
            self._end()
            self._engine.abort(self.request_id)
            self._wake_reader()

    def abort(self, error: Exception) -> None:
        """Abort the request and raise `error` to its reader."""
        self._engine.abort(self.request_id, name_of(type(error)))
        self.fail(error)

    def deliver(self, output: EngineOutput) -> RequestOutput:
        """Take one step's output, in the event loop; return what the caller will see."""
        result = self._processor.process(output)
        if result.finished:
            self._end()
        if (refusal := refused(result)) is not None:
            self._put(refusal)
        elif result.error is not None and not result.num_generated_tokens:
            self._put(AdapterLoadFailed(result.error))
        elif self._take is None or self._waiting_reader is None or not self._take(result):
            self._put(result)
        return result

    def fail(self, error: Exception) -> None:
        """Raise `error` to the reader after the outputs so far; no more outputs will come."""
        self._end()
        self._put(error)

    def _end(self) -> None:
        self._finished = True
        # The end is the reader's. What takes outputs refers to this stream, and would keep it until garbage is freed.
        self._take = None

    def _put(self, output: RequestOutput | Exception) -> None:
        last = self._unread[-1] if len(self._unread) >= MAX_SINGLE else None
        if (
            isinstance(output, RequestOutput)
            and isinstance(last, RequestOutput)
            and not output.finished
            and len(last.token_ids) < JOINED_TOKENS
        ):
            self._unread[-1] = last.followed_by(output)
        else:
            self._unread.append(output)
        self._wake_reader()

    @property
    def _waiting_reader(self) -> asyncio.Future[None] | None:
        """Return what wakes the reader; None unless it has read everything and waits for more."""
        return None if self._reader is None or self._reader.done() else self._reader

    def _wake_reader(self) -> None:
        if (reader := self._waiting_reader) is not None:
            reader.set_result(None)


@dataclass(slots=True, eq=False)
class InFlightUse:
    """Hold one request's use of adapters."""

    # (id, version) of each.
    versions: frozenset[tuple[str, int]]
    # Choices that have not finished.
    open: set[RequestId]
    is_accepted: bool = False
    # Whether any choice has an output.
    has_output: bool = False
    # Why the request was aborted before it was accepted.
    ended_by: Exception | None = None

    def check(self) -> None:
        """Raise if the request was aborted before it was accepted.

        Raises:
            AdapterDeleted: its adapter was deleted by force.
        """
        if self.ended_by is not None:
            raise self.ended_by


class InFlightRequests(RequestObserver):
    """Track every request that has not finished.

    Args:
        abort: aborts one choice before the next step and tells its reader why; ignores unknown ids.
    """

    def __init__(self, abort: Callable[[RequestId, Exception], object]) -> None:
        self._abort = abort
        self._uses: dict[RequestId, InFlightUse] = {}
        # Adapter and beams that must run together, of each accepted choice.
        self._live: dict[RequestId, tuple[str, int]] = {}
        self._by_adapter: dict[str, Counter[int]] = {}
        self._has_ended = asyncio.Event()

    @contextmanager
    def arriving(
        self, versions: Collection[tuple[str, int]], request_ids: Collection[RequestId]
    ) -> Iterator[InFlightUse]:
        """Count a request while it is being accepted; after the block it counts only if it was accepted."""
        use = InFlightUse(frozenset(versions), set(request_ids))
        self._uses.update(dict.fromkeys(request_ids, use))
        try:
            yield use
        finally:
            if not use.is_accepted:
                for request_id in request_ids:
                    self.on_finished(request_id)

    def on_accepted(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> None:
        for request in requests:
            self._uses[request.request_id].is_accepted = True
            together = 1 if request.beams is None else request.beams.width
            self._live[request.request_id] = request.adapter_id, together
            self._by_adapter.setdefault(request.adapter_id, Counter())[together] += 1

    def on_output(self, request_id: RequestId, output: RequestOutput) -> None:
        if (use := self._uses.get(request_id)) is not None:
            use.has_output = True

    def on_finished(self, request_id: RequestId, why: str = "") -> None:
        use = self._uses.pop(request_id, None)
        if use is None:
            return
        if (live := self._live.pop(request_id, None)) is not None:
            adapter_id, together = live
            counts = self._by_adapter[adapter_id]
            counts[together] -= 1
            if not counts[together]:
                del counts[together]
            if not counts:
                del self._by_adapter[adapter_id]
        use.open.discard(request_id)
        if not use.open:
            has_ended, self._has_ended = self._has_ended, asyncio.Event()
            has_ended.set()

    @property
    def by_adapter(self) -> Mapping[str, Mapping[int, int]]:
        """Return how many accepted choices of each adapter have not finished, by the number of beams that must run
        together (1: no beam search); adapters without any are left out."""
        return self._by_adapter

    async def until_unused(self, adapter_id: str, versions: Collection[int], timeout_s: float) -> int:
        """Wait until no request uses one of these versions, at most `timeout_s`.

        Returns:
            The number of requests that still do.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._of(adapter_id, versions):
                    await self._has_ended.wait()
        except TimeoutError:
            pass
        return len(self._of(adapter_id, versions))

    def abort_adapter(self, adapter_id: str, versions: Collection[int]) -> int:
        """Abort the requests on these versions before the next step, with AdapterDeleted for their readers; return how
        many."""
        error = AdapterDeleted(f"adapter {adapter_id!r} was deleted, and this request ended with it")
        return self._end(self._of(adapter_id, versions), error)

    def abort_unanswered(self, adapter_id: str, error: Exception) -> int:
        """Abort the accepted requests on an adapter that have no output yet, with an error for their readers; return
        how many."""
        live = {self._uses[request_id] for request_id, (name, _) in self._live.items() if name == adapter_id}
        return self._end({use for use in live if not use.has_output}, error)

    def _end(self, doomed: Collection[InFlightUse], error: Exception) -> int:
        for use in doomed:
            use.ended_by = error
            for request_id in list(use.open):
                self._abort(request_id, error)
        return len(doomed)

    def _of(self, adapter_id: str, versions: Collection[int]) -> set[InFlightUse]:
        doomed = {(adapter_id, version) for version in versions}
        return {use for use in self._uses.values() if not doomed.isdisjoint(use.versions)}
