"""Count the requests and the cost of one adapter, in numbers that can be added up. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from lorasrv.metrics.histogram import SECONDS, Histogram
from lorasrv.metrics.request_stats import FinishedRequestStats
from lorasrv.outputs import AdapterTier, FinishReason

QUANTILES = (0.5, 0.95)


@dataclass(slots=True)
class Usage:
    """Accumulate the usage of one content under one id, or of the base.

    A request (one choice) counts for the adapter that it named; its cost counts for the model that computed it. A
    request that fell back to the base is one of the adapter's `fallbacks`; its tokens and time count for the base.
    """

    requests: int = 0
    # Requests that failed.
    errors: int = 0
    # Requests refused, or not finished in time.
    refused: int = 0
    # Requests whose client disconnected, or that ended with the server.
    aborted: int = 0
    fallbacks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    # Steps that gave answers their tokens; draft tokens that these steps verified, and those that were right.
    answer_steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    compute_s: float = 0.0
    loads: int = 0
    load_bytes: int = 0
    copies: int = 0
    copy_bytes: int = 0
    # Bytes of pool pages x seconds.
    resident_byte_s: float = 0.0
    # Tier in which requests found the adapter.
    hits_resident: int = 0
    hits_host: int = 0
    hits_disk: int = 0
    # Unix time at which the first and the last request ended; 0: never.
    first_used_s: float = 0.0
    last_used_s: float = 0.0
    # Seconds to the first token of requests whose adapter was resident (the base always is), and of the others.
    hot: Histogram = field(default_factory=Histogram)
    cold: Histogram = field(default_factory=Histogram)

    def on_asked(self, request: FinishedRequestStats, now_s: float) -> None:
        """Count a finished request for the adapter it named."""
        self.requests += 1
        self.fallbacks += request.fell_back
        self.errors += request.reason is FinishReason.ERROR
        self.refused += request.reason in (FinishReason.REFUSED, FinishReason.TIMEOUT)
        self.aborted += request.reason is FinishReason.ABORT
        self.hits_resident += request.tier is AdapterTier.RESIDENT
        self.hits_host += request.tier is AdapterTier.HOST
        self.hits_disk += request.tier is AdapterTier.DISK
        self.first_used_s = self.first_used_s or now_s
        self.last_used_s = now_s

    def on_answered(self, request: FinishedRequestStats) -> None:
        """Count the tokens of an answer, complete or partial, for the model that computed it. Several choices have one
        prompt."""
        if not request.is_answered:
            return
        if not request.is_further:
            self.prompt_tokens += request.prompt_tokens
            self.cached_tokens += request.cached_tokens
        self.generated_tokens += request.generated_tokens
        self.answer_steps += request.steps
        self.draft_tokens += request.draft_tokens
        self.accepted_draft_tokens += request.accepted_draft_tokens
        if request.first_token_s is not None:
            is_cold = request.tier in (AdapterTier.HOST, AdapterTier.DISK) and not request.fell_back
            (self.cold if is_cold else self.hot).add(request.first_token_s)

    def merge(self, other: "Usage") -> None:
        """Add the usage of the same or a later period."""
        first = [at for at in (self.first_used_s, other.first_used_s) if at]
        last = max(self.last_used_s, other.last_used_s)
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_used_s, self.last_used_s = min(first, default=0.0), last
        self.hot.merge(other.hot)
        self.cold.merge(other.cold)

    def to_dict(self) -> dict[str, Any]:
        """Return the usage as in `GET /v1/adapters/{id}/stats`, with null for ratios, means and times without data."""
        found = {"resident": self.hits_resident, "host": self.hits_host, "disk": self.hits_disk}
        tried = sum(found.values())
        return {
            "requests": self.requests,
            "errors": self.errors,
            "refused": self.refused,
            "aborted": self.aborted,
            "fallbacks": self.fallbacks,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "speculation": {
                "steps": self.answer_steps,
                "drafted": self.draft_tokens,
                "accepted": self.accepted_draft_tokens,
                "tokens_per_step": round(self.generated_tokens / self.answer_steps, 3) if self.answer_steps else None,
            },
            "compute_seconds": round(self.compute_s, 6),
            "disk_loads": self.loads,
            "disk_bytes": self.load_bytes,
            "pool_copies": self.copies,
            "pool_bytes": self.copy_bytes,
            "resident_byte_hours": round(self.resident_byte_s / 3600, 3),
            "found": found,
            "hit_ratio": {tier: round(count / tried, 4) if tried else None for tier, count in found.items()},
            "ttft": {"hot": _summary(self.hot), "cold": _summary(self.cold)},
            "first_used": int(self.first_used_s) or None,
            "last_used": int(self.last_used_s) or None,
        }


SUMS = tuple(f.name for f in fields(Usage) if f.name not in ("first_used_s", "last_used_s", "hot", "cold"))
"""The fields that are summed."""
TIMES = ("first_used_s", "last_used_s")


def total(usages: Iterable[Usage]) -> Usage:
    """Add up several usages."""
    whole = Usage()
    for usage in usages:
        whole.merge(usage)
    return whole


def _summary(seconds: Histogram) -> dict[str, float | int | None]:
    """Summarise a histogram; quantiles are exact only to the distance between two of its bounds."""
    assert seconds.bounds is SECONDS
    quantiles = {f"p{round(100 * q)}_ms": _ms(seconds.quantile(q)) for q in QUANTILES}
    return {"count": seconds.count, "mean_ms": _ms(seconds.mean), **quantiles}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)
