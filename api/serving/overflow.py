"""Drop the oldest turns of a conversation that no longer fits the context.

What stands before the conversation stays: the system prompt and a persona's examples. Turns go in blocks of a quarter
of the context, counted from the beginning. So the conversation's new beginning stays the same for many turns, and its
pages are found in the prefix cache; dropped one by one, every turn would change it.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

Plain = dict[str, Any]
BLOCKS = 4
"""Blocks of a context."""
MAX_CONTEXTS = 16
"""A conversation of more contexts is refused, as counting it would take seconds."""
ANSWER_SHARE = 8
"""The context divided by this is left to an answer without a limit."""
_NEXT: list[Plain] = [{"role": "user", "content": "."}]
"""Behind a turn that is measured, so that the template takes it for an earlier one."""


def room_for_prompt(max_model_len: int, max_tokens: int | None) -> int:
    """Return how many tokens a prompt may have if its answer is to fit, too."""
    return max_model_len - (max_model_len // ANSWER_SHARE if max_tokens is None else max_tokens)


def fitted(
    messages: Sequence[Plain],
    num_fixed: int,
    room: int,
    max_model_len: int,
    encode: Callable[[Sequence[Plain]], list[int]],
    encode_bare: Callable[[Sequence[Plain]], list[int]],
) -> tuple[list[int], int]:
    """Return a prompt that fits, and how many turns were dropped for it.

    Prompts are measured as the template renders them, as it may leave out part of a message (earlier thoughts). The
    last turn is never dropped: if it does not fit alone, its prompt is returned all the same.

    Args:
        messages: the conversation for a chat template.
        num_fixed: how many of the first messages stay.
        room: the most tokens of the prompt.
        encode: renders messages as token ids.
        encode_bare: the same without what stands before every conversation, as tools.
    """
    fixed, turns = list(messages[:num_fixed]), split_turns(messages[num_fixed:])
    ids = encode(messages)
    if len(ids) <= room or len(turns) < 2:
        return ids, 0
    alone = len(encode_bare(_NEXT))
    ends = list(accumulate(len(encode_bare([*turn, *_NEXT])) - alone for turn in turns[:-1]))
    block = max(1, max_model_len // BLOCKS)
    num_blocks = -(-(len(ids) - room) // block)
    while True:
        least = num_blocks * block
        dropped = min(sum(end < least for end in ends) + 1, len(ends))
        ids = encode([*fixed, *(message for turn in turns[dropped:] for message in turn)])
        if len(ids) <= room or dropped == len(ends):
            return ids, dropped
        num_blocks += 1


def split_turns(messages: Sequence[Plain]) -> list[list[Plain]]:
    """Return the conversation's turns; each begins with what the user says, except the first."""
    turns: list[list[Plain]] = []
    for message in messages:
        if not turns or message["role"] == "user":
            turns.append([])
        turns[-1].append(message)
    return turns
