"""Prompts as token ids, whole or cut to their last tokens (vLLM's `truncate_prompt_tokens`)."""

from collections.abc import Sequence

from api.serving.admission import Prompt
from api.serving.overflow import MAX_CONTEXTS
from lorasrv.errors import ContextLengthExceeded, InvalidRequest
from lorasrv.text.tokenizer import Tokenizer, check_could_fit

ALL_THAT_FIT = -1
"""Value of `truncate_prompt_tokens` that keeps as many tokens as leave room for the answer."""


def token_ids(prompts: Sequence[Prompt], tokenizer: Tokenizer, max_model_len: int) -> list[Sequence[int]]:
    """Return the token ids of prompts.

    Raises:
        ContextLengthExceeded: a prompt is too long; checked before tokenizing any.
    """
    check_lengths(prompts, tokenizer, max_model_len)
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def check_lengths(prompts: Sequence[Prompt], tokenizer: Tokenizer, max_model_len: int) -> None:
    """Check the lengths of prompts before they are tokenized.

    Raises:
        ContextLengthExceeded: a prompt cannot fit the context, however it is tokenized.
    """
    for prompt in prompts:
        if isinstance(prompt, str):
            check_could_fit([prompt], tokenizer, max_model_len)
        elif len(prompt) > max_model_len:
            why = f"the context has {max_model_len} tokens, but the prompt has {len(prompt)}"
            raise ContextLengthExceeded(why, param="prompt")


def num_kept(wanted: int, room: int, max_model_len: int) -> int:
    """Return how many tokens of a prompt to keep.

    Args:
        wanted: `truncate_prompt_tokens`.
        room: number of tokens of the longest prompt whose answer fits.
    Raises:
        InvalidRequest: `wanted` is neither -1 nor between 1 and the context's length.
    """
    if wanted == ALL_THAT_FIT:
        return max(1, room)
    if not 1 <= wanted <= max_model_len:
        raise InvalidRequest(
            f"{{param}} must be between 1 and {max_model_len}, or -1 for what fits", param="truncate_prompt_tokens"
        )
    return wanted


def last_tokens(prompts: Sequence[Prompt], count: int, tokenizer: Tokenizer, max_model_len: int) -> list[Sequence[int]]:
    """Return the last tokens of each prompt. Special tokens that the tokenizer puts around a text stay, as in vLLM.

    Raises:
        ContextLengthExceeded: a text is longer than `MAX_CONTEXTS` contexts; checked before tokenizing any.
    """
    for prompt in prompts:
        if isinstance(prompt, str):
            check_could_fit([prompt], tokenizer, max_model_len * MAX_CONTEXTS)
    return [
        _last_of_text(prompt, count, tokenizer) if isinstance(prompt, str) else prompt[-count:] for prompt in prompts
    ]


def _last_of_text(prompt: str, count: int, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(prompt)
    if len(ids) <= count:
        return ids
    plain = tokenizer.encode(prompt, add_special_tokens=False)
    num_around = len(ids) - len(plain)
    before = next((n for n in range(num_around + 1) if ids[n : n + len(plain)] == plain), 0)
    if not 0 < num_around < count:
        return ids[-count:]
    return [*ids[:before], *ids[before + len(ids) - count :]]
