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
"""So many blocks are a context."""
MAX_CONTEXTS = 16
"""A conversation of more contexts is refused, as counting it would take seconds."""
ANSWER_SHARE = 8
"""One part in so many of the context is left to an answer without a limit."""


def room_for_prompt(max_model_len: int, max_tokens: int | None) -> int:
    """Return how many tokens a prompt may have if its answer is to fit, too."""
    return max_model_len - (max_model_len // ANSWER_SHARE if max_tokens is None else max_tokens)


def fitted(
    messages: Sequence[Plain],
    num_fixed: int,
    room: int,
    max_model_len: int,
    count: Callable[[str], int],
    encode: Callable[[Sequence[Plain]], list[int]],
) -> tuple[list[int], int]:
    """Return a prompt that fits, and how many turns were dropped for it.

    The last turn is never dropped: if it does not fit alone, its prompt is returned all the same.

    Args:
        messages: the conversation for a chat template.
        num_fixed: how many of the first messages stay.
        room: the most tokens of the prompt.
        count: returns the tokens of a text.
        encode: renders messages as token ids.
    """
    fixed, turns = list(messages[:num_fixed]), split_turns(messages[num_fixed:])
    sizes = [sum(count(_text(message)) for message in turn) for turn in turns]
    ends = list(accumulate(sizes))
    total = sum(count(_text(message)) for message in fixed) + sum(sizes)
    block = max(1, max_model_len // BLOCKS)
    # Texts alone have fewer tokens than the prompt: fewer blocks cannot do.
    num_blocks = max(0, -(-(total - room) // block))
    while True:
        least = num_blocks * block
        dropped = min(sum(end < least for end in ends) + bool(least), max(0, len(turns) - 1))
        ids = encode([*fixed, *(message for turn in turns[dropped:] for message in turn)])
        if len(ids) <= room or dropped >= len(turns) - 1:
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


def _text(message: Plain) -> str:
    calls = message.get("tool_calls")
    return message["content"] if not calls else f"{message['content']}{calls}"
