"""Estimate the work of a request in seconds, from a replica's step costs and past answers of its adapter."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

USUAL_ROWS = 16
"""Assumed number of requests that share the fixed part of a step."""
MAX_ADAPTERS = 1 << 16
"""Most adapters whose answers are remembered: those requested last."""
FIRST_ANSWER = 128.0
"""Assumed tokens of an answer before the first one is known."""
MEMORY = 32
"""Number of answers in a mean; older ones decay."""


@dataclass(frozen=True, slots=True)
class WorkRates:
    """Hold the seconds of a replica's work for one request."""

    prompt_token_s: float
    answer_token_s: float

    @classmethod
    def of_steps(cls, step: Mapping[str, float]) -> "WorkRates":
        """Derive the rates from step costs by part, as in `lorasrv_step_cost_seconds`."""
        return cls(step["token"], step["token"] + step["request"] + step["step"] / USUAL_ROWS)


class WorkEstimator:
    """Estimate the work of one router's requests."""

    def __init__(self, rates: WorkRates) -> None:
        self.rates = rates
        # Adapter (None: the base) -> (mean tokens of its answers, number of answers).
        self._means: OrderedDict[str | None, tuple[float, int]] = OrderedDict()
        self._mean = (FIRST_ANSWER, 0)

    def work_s(self, adapter_id: str | None, prompt_tokens: float, max_tokens: int | None = None) -> float:
        """Return the seconds of a request with about `prompt_tokens` and an answer of at most `max_tokens`."""
        answer, _ = self._means.get(adapter_id, self._mean)
        answer = answer if max_tokens is None else min(answer, max_tokens)
        return prompt_tokens * self.rates.prompt_token_s + answer * self.rates.answer_token_s

    def observe(self, adapter_id: str | None, answer_tokens: int) -> None:
        """Learn the length of an answer."""
        self._mean = _moved(self._mean, answer_tokens)
        # A new adapter starts with the mean of all answers, as if that were its first answer.
        known = self._means.pop(adapter_id, (self._mean[0], 1))
        self._means[adapter_id] = _moved(known, answer_tokens)
        if len(self._means) > MAX_ADAPTERS:
            self._means.popitem(last=False)


def _moved(mean: tuple[float, int], value: int) -> tuple[float, int]:
    """Return a decaying mean and its number of values after one more value."""
    number = min(mean[1] + 1, MEMORY)
    return mean[0] + (value - mean[0]) / number, number
