"""Decide which prompts a separate prefill replica computes; the simulator and the edge use the same rule."""

MIN_TOKENS = 64.0
"""Fewest tokens whose pages replicas take from each other (`PeerPages`)."""
MIN_WORK_S = 0.02
"""Approximate seconds to ask for pages, to compute a step for one discarded token, and to read the pages."""


def is_worth_asking(prompt_tokens: float, prompt_token_s: float) -> bool:
    """Return whether the pages of a prompt of about so many tokens arrive sooner than they can be computed.

    Args:
        prompt_token_s: seconds of work per prompt token.
    """
    return prompt_tokens >= MIN_TOKENS and prompt_tokens * prompt_token_s >= MIN_WORK_S
