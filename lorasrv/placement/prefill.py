"""Say which prompts another replica computes, where some do nothing else; the simulator and the edge ask the same."""

MIN_TOKENS = 64.0
"""Replicas take no fewer pages from each other (`PeerPages`)."""
MIN_WORK_S = 0.02
"""Asking for pages, a step for one token that is thrown away, and reading them take about as long."""


def is_worth_asking(prompt_tokens: float, prompt_token_s: float) -> bool:
    """Return whether the pages of a prompt of about so many tokens come sooner than they are computed.

    Args:
        prompt_token_s: seconds of work of one of them.
    """
    return prompt_tokens >= MIN_TOKENS and prompt_tokens * prompt_token_s >= MIN_WORK_S
