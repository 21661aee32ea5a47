"""What must be read and computed at least, whatever the server does: what MBU, MFU and floors are shares of."""

from collections.abc import Iterable
from dataclasses import dataclass

from api.cli.bench.client import RequestOutcome


@dataclass(frozen=True, slots=True)
class Work:
    """Facts of a model as it is served; 0 is unknown, and what would need it is left out.

    Args:
        model_bytes: of the base's weights; a decode step reads them once.
        kv_token_bytes: keys and values of one token in all layers.
        adapter_bytes: of one adapter in the pool.
        token_ops: for every token of prompt and answer, in the linears of all layers.
        sampled_ops: more for a token that is sampled: the head.
        context_ops: for each earlier token that one looks at: attention.
        adapter_ops: more for a token of a request with an adapter.
        is_int8: whether the products are of 8-bit integers.
    """

    model_bytes: float = 0.0
    kv_token_bytes: float = 0.0
    adapter_bytes: float = 0.0
    token_ops: float = 0.0
    sampled_ops: float = 0.0
    context_ops: float = 0.0
    adapter_ops: float = 0.0
    is_int8: bool = False

    def step_bytes(self, adapters: float, context_tokens: float) -> float:
        """Of one decode step with so many distinct adapters, whose requests look at so many tokens together."""
        return self.model_bytes + adapters * self.adapter_bytes + context_tokens * self.kv_token_bytes

    def prompt_ops(self, tokens: float, cached: float, has_adapter: bool) -> float:
        """Of a prompt, up to its first new token."""
        looked_at = (tokens * (tokens + 1) - cached * (cached + 1)) / 2
        per_token = self.token_ops + (self.adapter_ops if has_adapter else 0.0)
        return (tokens - cached) * per_token + looked_at * self.context_ops + self.sampled_ops

    def decode_ops(self, context_tokens: float, has_adapter: bool) -> float:
        """Of one more token, which looks at so many."""
        adapter = self.adapter_ops if has_adapter else 0.0
        return self.token_ops + adapter + self.sampled_ops + context_tokens * self.context_ops

    def request_ops(self, outcome: RequestOutcome) -> float:
        """Of a whole request. The last token of an answer is sampled, and not computed with."""
        later = outcome.output_tokens - 1
        context = outcome.prompt_tokens + (later + 1) / 2
        first = self.prompt_ops(outcome.prompt_tokens, outcome.cached_tokens, outcome.has_adapter)
        return first + later * self.decode_ops(context, outcome.has_adapter)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What a machine does in a second, measured: bytes read, operations of fp32 and of int8."""

    read_bytes: float
    fp32_ops: float
    int8_ops: float

    def ops(self, work: Work) -> float:
        """The rate that the products of a server are held against: of what it computes in, or fp32 where that is
        faster.
        """
        return max(self.fp32_ops, self.int8_ops) if work.is_int8 else self.fp32_ops


@dataclass(frozen=True, slots=True)
class Batch:
    """Means over the time in which anybody generated: requests, distinct adapters, tokens that they look at."""

    requests: float
    adapters: float
    context_tokens: float


def mean_batch(outcomes: Iterable[RequestOutcome]) -> Batch | None:
    """From when answers began and ended; None if none had two tokens at two times."""
    events: list[tuple[float, int, RequestOutcome]] = []
    for outcome in outcomes:
        if outcome.last_s > outcome.first_s:
            events += [(outcome.first_s, 1, outcome), (outcome.last_s, -1, outcome)]
    events.sort(key=lambda event: event[:2])
    running: dict[int, RequestOutcome] = {}
    seconds = requests = adapters = context = 0.0
    before_s = 0.0
    for at_s, change, outcome in events:
        if running:
            past = at_s - before_s
            seconds += past
            requests += past * len(running)
            adapters += past * len({o.model for o in running.values() if o.has_adapter})
            context += past * sum(o.prompt_tokens + o.output_tokens / 2 for o in running.values())
        if change > 0:
            running[id(outcome)] = outcome
        else:
            del running[id(outcome)]
        before_s = at_s
    return Batch(requests / seconds, adapters / seconds, context / seconds) if seconds else None


def mbu(outcomes: list[RequestOutcome], tpot_ms: float | None, work: Work, rates: MachineRates) -> float | None:
    """Share of the read bandwidth that decoding uses: bytes of a step over the time of a token. The definition is
    Databricks' (LLM Inference Performance Engineering, 2023), with adapters added.
    """
    batch = mean_batch(outcomes)
    if not work.model_bytes or not tpot_ms or batch is None:
        return None
    read = work.step_bytes(batch.adapters, batch.context_tokens)
    return read / (tpot_ms / 1e3) / rates.read_bytes


def mfu(outcomes: list[RequestOutcome], wall_s: float, work: Work, rates: MachineRates) -> float | None:
    """Share of the arithmetic: operations of all answered requests over the time of all. PaLM's definition."""
    if not work.token_ops or not outcomes or wall_s <= 0:
        return None
    return sum(work.request_ops(outcome) for outcome in outcomes) / wall_s / rates.ops(work)


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that run at a time: `requests` of them, with so many distinct adapters (a mean; 0: the base)."""

    requests: int
    adapters: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Floor:
    """What nobody can be faster than on a machine, if reading and computing overlap as well as they can."""

    ttft_ms: float
    tpot_ms: float
    tok_per_s: float


def floor(wave: Wave, work: Work, rates: MachineRates) -> Floor:
    """Prompts computed at once, and a step for each further token of all; of reading and computing, what takes longer:
    of the prompts (TTFT), of a step (TPOT), and of everything together, as some prompts may be computed while weights
    are read for other answers.
    """
    ops, has_adapter = rates.ops(work), wave.adapters > 0
    first_ops = wave.requests * work.prompt_ops(wave.prompt_tokens, 0, has_adapter)
    first_bytes = work.step_bytes(wave.adapters, 0)
    context = wave.prompt_tokens + wave.output_tokens / 2
    step_ops = wave.requests * work.decode_ops(context, has_adapter)
    step_bytes = work.step_bytes(wave.adapters, wave.requests * context)

    def seconds(read: float, computed: float) -> float:
        return max(read / rates.read_bytes, computed / ops)

    later = wave.output_tokens - 1
    all_s = seconds(first_bytes + later * step_bytes, first_ops + later * step_ops)
    tok_per_s = wave.requests * wave.output_tokens / all_s
    return Floor(1e3 * seconds(first_bytes, first_ops), 1e3 * seconds(step_bytes, step_ops), tok_per_s)
