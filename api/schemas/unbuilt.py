"""Fields that clients know and this server does not yet: refused by name, unless the value asks for nothing.

Fields that are in no table at all are ignored: clients of other servers send many.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lorasrv.errors import InvalidRequest

_NULL = (None,)
_OFF = (None, False)
_ZERO = (None, 0)
_ONE = (None, 1)

INERT_VALUES: Mapping[str, tuple[Any, ...]] = {
    # several answers
    "best_of": _NULL,
    "use_beam_search": _OFF,
    "length_penalty": _ONE,
    "early_stopping": _OFF,
    # probabilities
    "logprobs": _OFF,
    "top_logprobs": _ZERO,
    "prompt_logprobs": _NULL,
    "echo": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "return_token_ids": _OFF,
    # sampling
    "presence_penalty": _ZERO,
    "frequency_penalty": _ZERO,
    "repetition_penalty": _ONE,
    "typical_p": _ONE,
    "logit_bias": (None, {}),
    "min_tokens": _ZERO,
    "bad_words": (None, []),
    "allowed_token_ids": _NULL,
    "logits_processors": (None, []),
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": _NULL,
    "add_special_tokens": _NULL,
    # constrained output
    "response_format": (None, {"type": "text"}),
    "guided_json": _NULL,
    "guided_regex": _NULL,
    "guided_choice": _NULL,
    "guided_grammar": _NULL,
    "structured_outputs": _NULL,
    # conversation
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "chat_template": _NULL,
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": _OFF,
    "modalities": (None, ["text"]),
    "audio": _NULL,
    "prediction": _NULL,
    "suffix": (None, ""),
    "prompt_embeds": _NULL,
    # service
    "store": _OFF,
}


def refuse_unbuilt(fields: Mapping[str, Any] | None, also_inert: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raises: InvalidRequest: a field asks for something that is not built; `param` names it.

    `also_inert`: values that ask for nothing because of what the request's other fields are.
    """
    for name, value in (fields or {}).items():
        inert = (*INERT_VALUES.get(name, (value,)), also_inert.get(name))
        if not any(_same(value, nothing) for nothing in inert):
            raise InvalidRequest(f"{name} is not supported by this server yet; leave it out", param=name)


def _same(value: Any, inert: Any) -> bool:
    """Equality of JSON values: unlike in Python, true is not 1."""
    return isinstance(value, bool) == isinstance(inert, bool) and bool(value == inert)
