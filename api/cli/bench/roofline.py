"""Compute the least bytes and operations that a load needs on any server, the reference for MBU, MFU and floors."""

from collections.abc import Iterable
from dataclasses import dataclass

from api.cli.bench.client import RequestOutcome


@dataclass(frozen=True, slots=True)
class Work:
    """Describe the costs of a model as it is served; 0: unknown, and figures that need it are left out."""

    # Base weights, which a decode step reads once.
    model_bytes: float = 0.0
    # Keys and values of one token in all layers.
    kv_token_bytes: float = 0.0
    # One resident adapter.
    adapter_bytes: float = 0.0
    # Operations per token of prompt and answer, in the linears of all layers.
    token_ops: float = 0.0
    # Additional operations per sampled token: the head.
    sampled_ops: float = 0.0
    # Operations per attended token: attention.
    context_ops: float = 0.0
    # Additional operations per token of a request with an adapter.
    adapter_ops: float = 0.0
    # Whether the products are of 8-bit integers.
    is_int8: bool = False

    def step_bytes(self, adapters: float, context_tokens: float) -> float:
        """Return the bytes of a decode step with this number of distinct adapters and attended tokens."""
        return self.model_bytes + adapters * self.adapter_bytes + context_tokens * self.kv_token_bytes

    def prompt_ops(self, tokens: float, cached: float, has_adapter: bool) -> float:
        """Return the operations of a prompt up to its first new token."""
        looked_at = (tokens * (tokens + 1) - cached * (cached + 1)) / 2
        per_token = self.token_ops + (self.adapter_ops if has_adapter else 0.0)
        return (tokens - cached) * per_token + looked_at * self.context_ops + self.sampled_ops

    def decode_ops(self, context_tokens: float, has_adapter: bool) -> float:
        """Return the operations of one more token with this context."""
        adapter = self.adapter_ops if has_adapter else 0.0
        return self.token_ops + adapter + self.sampled_ops + context_tokens * self.context_ops

    def request_ops(self, outcome: RequestOutcome) -> float:
        """Return the operations of a whole request. The last token of an answer is only sampled, never an input."""
        later = outcome.output_tokens - 1
        context = outcome.prompt_tokens + (later + 1) / 2
        first = self.prompt_ops(outcome.prompt_tokens, outcome.cached_tokens, outcome.has_adapter)
        return first + later * self.decode_ops(context, outcome.has_adapter)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Hold a machine's measured rates per second: bytes read, operations in fp32 and in int8."""

    read_bytes: float
    fp32_ops: float
    int8_ops: float

    def ops(self, work: Work) -> float:
        """Return the reference rate of a server's matrix products: fp32, or int8 if it uses int8 and that is faster."""
        return max(self.fp32_ops, self.int8_ops) if work.is_int8 else self.fp32_ops


@dataclass(frozen=True, slots=True)
class Batch:
    """Hold means over the time in which tokens were generated: requests, distinct adapters, attended tokens."""

    requests: float
    adapters: float
    context_tokens: float


def mean_batch(outcomes: Iterable[RequestOutcome]) -> Batch | None:
    """Compute the mean batch from the times of answers; None if no answer has two tokens at different times."""
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
    """Return the share of read bandwidth that decoding uses: bytes of a step over the time per token.

    The definition is Databricks' (LLM Inference Performance Engineering, 2023), with adapters added.
    """
    batch = mean_batch(outcomes)
    if not work.model_bytes or not tpot_ms or batch is None:
        return None
    read = work.step_bytes(batch.adapters, batch.context_tokens)
    return read / (tpot_ms / 1e3) / rates.read_bytes


def mfu(outcomes: list[RequestOutcome], wall_s: float, work: Work, rates: MachineRates) -> float | None:
    """Return the share of arithmetic: operations of all answered requests over the wall time (PaLM's definition)."""
    if not work.token_ops or not outcomes or wall_s <= 0:
        return None
    return sum(work.request_ops(outcome) for outcome in outcomes) / wall_s / rates.ops(work)


@dataclass(frozen=True, slots=True)
class Wave:
    """Describe requests that run at the same time."""

    requests: int
    # Mean number of distinct adapters; 0: the base.
    adapters: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Floor:
    """Hold the best possible figures on a machine, with perfect overlap of reading and computing."""

    ttft_ms: float
    tpot_ms: float
    tok_per_s: float


def floor(wave: Wave, work: Work, rates: MachineRates) -> Floor:
    """Compute the floor: all prompts at once, then one step for each further token of all requests.

    Reading and computing overlap, so the longer one counts: for the prompts (TTFT), for a step (TPOT), and for the
    whole, because some prompts may be computed while weights are read for other answers.
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
