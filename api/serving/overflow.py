"""Drop the oldest turns of a conversation that no longer fits the context.

The system prompt and a persona's examples, which precede the conversation, stay. Turns are dropped in blocks of a
quarter of the context, counted from the beginning. The conversation's new beginning then stays the same for many turns,
and its pages are found in the prefix cache. Dropped one by one, every turn would change it.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

Plain = dict[str, Any]
BLOCKS = 4
"""Blocks per context."""
MAX_CONTEXTS = 16
"""A conversation longer than this many contexts is refused, because counting its tokens would take seconds."""
ANSWER_SHARE = 8
"""An answer without a limit gets the context divided by this."""
_NEXT: list[Plain] = [{"role": "user", "content": "."}]
"""Appended to a turn that is measured, so that the template renders it as an earlier turn."""


def room_for_prompt(max_model_len: int, max_tokens: int | None) -> int:
    """Return the most tokens that a prompt may have so that its answer fits, too."""
    return max_model_len - (max_model_len // ANSWER_SHARE if max_tokens is None else max_tokens)


def fitted(
    messages: Sequence[Plain],
    num_fixed: int,
    room: int,
    max_model_len: int,
    encode: Callable[[Sequence[Plain]], list[int]],
    encode_bare: Callable[[Sequence[Plain]], list[int]],
) -> tuple[list[int], int]:
    """Return a prompt that fits, as token ids, and the number of turns dropped for it.

    Prompts are measured as the template renders them, because it may leave out part of a message (earlier thoughts).
    The last turn is never dropped: if it does not fit alone, its prompt is returned nevertheless.

    Args:
        messages: the conversation for a chat template.
        num_fixed: number of first messages that stay.
        room: most tokens of the prompt.
        encode: renders messages as token ids.
        encode_bare: the same without the tools, or whatever else the template puts before every conversation.
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
    """Return the conversation's turns; each but the first begins with a user message."""
    turns: list[list[Plain]] = []
    for message in messages:
        if not turns or message["role"] == "user":
            turns.append([])
        turns[-1].append(message)
    return turns
