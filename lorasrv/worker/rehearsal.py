"""Rehearsal: small steps of every kind that requests may ask for, computed by the engine's thread before the first
request.

The warm-up (`warm_up.py`) loads the kernels of this project. Torch loads each of its own when it is first launched, a
library makes its workspace at a thread's first call, and ranks connect at their first exchange; each of these may wait
for all that the device computes. So each way to sample, to verify drafts, to draft and to move pages occurs here: with
one row, with two, and with as many as are drawn together, because torch has different kernels for them.

All steps are on the base, and on the first pages of the empty pool. Their logits are finite: rows that are not would be
skipped.

Source: runs of the sampler on dummy requests before the server is ready, vLLM.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lorasrv.kv_policy import SelectPolicy
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.sampling.logprobs import ROWS_AT_ONCE
from lorasrv.sampling.sampler import DRAWN_TOGETHER
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import (
    PENDING,
    AdapterOrders,
    CopyPages,
    PageCopy,
    PageOp,
    PlannedDrafts,
    ScheduledRequest,
    SchedulerOutput,
    SwapIn,
    SwapOut,
)
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.exchange import Exchange

GREEDY = SamplingParams(temperature=0.0)
DRAW = SamplingParams(seed=0)
DRAWS = tuple(
    replace(of_order, min_p=min_p, typical_p=typical_p)
    for of_order in (DRAW, replace(DRAW, top_p=0.9), replace(DRAW, top_k=20))
    for min_p, typical_p in ((0.0, 1.0), (0.1, 0.9))
)
"""Draws from all tokens, from sorted ones and from the first ones, with and without filters behind that."""
CHANGES = (
    SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias=((0, 1.0),)),
    # A grammar's mask is applied in the same way.
    SamplingParams(temperature=0.0, allowed_token_ids=(0, 1)),
    SamplingParams(temperature=0.0, watermark=True),
    SamplingParams(temperature=0.0, fsd_alpha=0.5),
)
KINDS = (GREEDY, *CHANGES, *DRAWS)
DRAFTS = PlannedDrafts((0, 0), ("lookup", "lookup"))
MANY_PAGES = 17
"""Pages that a swap gathers with another kernel than fewer: `index_select` has one for up to 16 indices."""


def _request(
    number: int, sampling: SamplingParams = GREEDY, num_tokens: int = 1, num_pages: int = 1
) -> ScheduledRequest:
    """Return a prompt whose pages are all the first one."""
    rest = ((0,) * num_pages, None, True, sampling, 0)
    return ScheduledRequest(RequestId(f"rehearsal-{number}"), (0,) * num_tokens, 0, *rest, history=[0] * num_tokens)


def _step(requests: Iterable[ScheduledRequest], *page_ops: PageOp) -> SchedulerOutput:
    return SchedulerOutput(tuple(requests), {}, page_ops, AdapterOrders(), 0)


WARM_UP_STEP = _step([_request(0, DRAW)])
"""One token, for the first step of an engine thread on any device."""


class Rehearsal:
    """Make the steps for one model on a GPU.

    Args:
        drafters: names of the models that draft on the worker.
    """

    def __init__(
        self, spec: ModelSpec, limits: DecoderLimits, page_size: int, drafters: Sequence[str], exchange: Exchange
    ) -> None:
        self._spec, self._limits, self._page_size = spec, limits, page_size
        self._drafters, self._exchange = drafters, exchange
        # Where ranks compute together, steps are not planned ahead, and no attention is observed.
        self._is_alone = exchange.can_record

    def steps(self) -> Iterator[SchedulerOutput]:
        """Yield the steps, to be computed in this order."""
        most = min(self._limits.max_samples, self._limits.max_rows)
        counts = [count for count in (1, 2, DRAWN_TOGETHER) if count <= most]
        for count in counts:
            for kind in KINDS:
                yield _step(_request(number, kind) for number in range(count))
            if self._is_alone:
                yield _step(replace(_request(i), token_ids=(PENDING,), start=1) for i in range(count))
            for kind in (GREEDY, DRAW):
                for logprobs in (0, 5):
                    yield _step(_request(i, replace(kind, logprobs=logprobs)) for i in range(count))
            yield _step(replace(_request(i), vocab_size=self._spec.vocab_size) for i in range(count))
            yield from self._drafted(count)
            if self._is_alone and self._spec.why_no_kv_policy is None:
                policy = SelectPolicy(budget=self._page_size, page_size=self._page_size)
                yield _step(replace(_request(i), kv_policy=policy, num_observed=1) for i in range(count))
        for each in (1, 2):
            yield _step([_request(number, kind) for number, kind in enumerate(KINDS * each)][:most])
        yield from self._prompts()
        for pages in ((0,), (0, 1), (0,) * MANY_PAGES):
            yield _step([_request(0)], CopyPages((PageCopy(0, 1),)), SwapOut(RequestId("0"), pages))
            yield _step([_request(0)], SwapIn(RequestId("0"), pages))

    def _drafted(self, count: int) -> Iterator[SchedulerOutput]:
        """Yield steps of `count` answers with drafts, and of answers for which models draft, as far as they fit."""
        longest = 1 + len(DRAFTS.token_ids)
        if longest > self._limits.max_model_len:
            return
        if count * longest <= self._limits.max_rows:
            for kind in (*KINDS, replace(DRAW, logprobs=5)):
                yield _step(_with_drafts(_request(number, kind)) for number in range(count))
            yield _step(replace(_with_drafts(_request(i, DRAW)), by_rejection=True) for i in range(count))
        for name in self._drafters:
            asking = PlannedDrafts(asked=name, num_asked=len(DRAFTS.token_ids))
            for kind in (GREEDY, DRAW):
                yield _step(replace(_request(number, kind), drafts=asking) for number in range(count))

    def _prompts(self) -> Iterator[SchedulerOutput]:
        """Yield prompts with log-probabilities of their tokens, one of them as long as those that ranks divide."""
        longest = min(self._limits.max_rows, self._limits.max_model_len)
        for length in (2, 3, ROWS_AT_ONCE + 2, self._exchange.divided_from):
            count = min(length, longest)
            prompt = _request(0, replace(GREEDY, prompt_logprobs=5), count, -(-count // self._page_size))
            yield _step([replace(prompt, prompt_rows=range(count - 1))])


def _with_drafts(request: ScheduledRequest) -> ScheduledRequest:
    return replace(request, token_ids=request.token_ids + DRAFTS.token_ids, drafts=DRAFTS)
