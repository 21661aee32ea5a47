"""A scheduler over hand-made model outputs, by its policy."""

from typing import Any

from bare_scheduler import Bench


def scheduler(
    policy: str = "fcfs",
    *,
    slots: int = 8,
    budget: int = 64,
    pages: int = 2000,
    bench: dict[str, Any] | None = None,
    **options: Any,
) -> Bench:
    """Return a bench with `slots` slots, `budget` tokens per step and `pages` pages.

    Args:
        bench: further fields of `Bench`.
        options: further fields of `SchedulerOptions`.
    """
    fields = {"pages": pages, "max_num_seqs": slots, "max_num_batched_tokens": budget, **(bench or {})}
    return Bench(**fields, options={"scheduling_policy": policy, **options})
