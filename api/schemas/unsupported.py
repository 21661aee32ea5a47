"""List the fields of generation bodies that only other servers or other routes support; `KnownBody` refuses them."""

from collections.abc import Mapping
from typing import Any

_NULL = (None,)
_OFF = (None, False)
_ZERO = (None, 0)
_ONE = (None, 1)
_NO_REASONING: tuple[Any, ...] = (None, {}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None})
INERT_VALUES: Mapping[str, tuple[Any, ...]] = {
    # log-probabilities: `top_logprobs` of plain completions, `echo` of chat
    "top_logprobs": _ZERO,
    "echo": _OFF,
    "return_token_ids": _OFF,
    # sampling
    "bad_words": (None, []),
    "allowed_token_ids": _NULL,
    "logits_processors": (None, []),
    "truncate_prompt_tokens": _NULL,
    "repetition_detection": _NULL,
    "vllm_xargs": (None, {}),
    # sampling and search, as in transformers' generation
    "penalty_alpha": _ZERO,
    "do_sample": (None, True),
    "num_beams": _ONE,
    "num_beam_groups": _ONE,
    "diversity_penalty": _ZERO,
    "no_repeat_ngram_size": _ZERO,
    "encoder_repetition_penalty": _ONE,
    "encoder_no_repeat_ngram_size": _ZERO,
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "guidance_scale": _ONE,
    "negative_prompt": (None, ""),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "min_new_tokens": _ZERO,
    # names of TGI and LoRAX for other fields, or fields of their own routes
    "stop_sequences": (None, []),
    "truncate": _NULL,
    "return_full_text": _OFF,
    "merged_adapters": _NULL,
    "adapter_parameters": _NULL,
    "tool_prompt": (None, ""),
    # SGLang: its name of the adapter, and structured output
    "lora_path": (None, "", []),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "json_schema": (None, "", {}),
    "stop_regex": (None, "", []),
    "custom_logit_processor": (None, ""),
    "no_stop_trim": _OFF,
    # structured output: white space in JSON
    "guided_whitespace_pattern": _NULL,
    # fields of chat that plain completions do not have
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    # conversation
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "continue_final_message": _OFF,
    "chat_template": _NULL,
    "documents": (None, []),
    "reasoning_effort": _NULL,
    # plain completions do not separate reasoning from the text
    "include_reasoning": (None, True, False),
    "separate_reasoning": _OFF,
    "stream_reasoning": (None, True),
    "thinking_token_budget": (None, -1),
    "verbosity": (None, "medium"),
    "web_search_options": _NULL,
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "audio": _NULL,
    "suffix": (None, ""),
    "prompt_embeds": _NULL,
    # service
    "store": _OFF,
}

INERT_IN_GENERATION: Mapping[str, tuple[Any, ...]] = {
    # /v1/responses: stored conversations and background answers
    "previous_response_id": _NULL,
    "conversation": _NULL,
    "background": _OFF,
    "context_management": (None, []),
    "moderation": _NULL,
    "reasoning": _NO_REASONING,
    # the prompt, under its names on other routes
    "messages": _NULL,
    "prompt": _NULL,
    "input": _NULL,
    "inputs": _NULL,
    "instructions": (None, ""),
    # without tools there are no calls, so this has no effect
    "parallel_tool_calls": (None, True, False),
    # fields of chats and completions that /v1/responses does not have, or names differently
    "max_tokens": _NULL,
    "max_completion_tokens": _NULL,
    "response_format": _NULL,
    "context_overflow": (None, "error"),
    "logprobs": _OFF,
    "n": _ONE,
    "best_of": _ONE,
    "use_beam_search": _OFF,
    "length_penalty": _ONE,
    "early_stopping": _OFF,
    "prompt_logprobs": _NULL,
    "return_tokens_as_token_ids": _OFF,
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (None, True),
    "add_special_tokens": _OFF,
    # names of /v1/responses
    "max_output_tokens": _NULL,
    "text": (None, {}),
    "truncation": (None, "disabled"),
    "include": (None, []),
    # names of TGI and LoRAX, whose fields are inside `parameters`
    "parameters": (None, {}),
    "max_new_tokens": _NULL,
    "ignore_eos_token": _OFF,
    "grammar": (None, ""),
    "apply_chat_template": _NULL,
    "details": _OFF,
    "decoder_input_details": _OFF,
    "top_n_tokens": _ZERO,
    "return_k_alternatives": _ZERO,
    "adapter_source": (None, "", "hub", "local"),
}
"""Fields that only some of the generating routes have. Each route refuses those that its body does not declare."""

INERT_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "reasoning_effort": (None, "none"),
    "reasoning": (*_NO_REASONING, {"effort": "none"}, {"effort": "none", "summary": None}),
}
"""Values that have no effect on plain completions only, which have no template that could turn reasoning off."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "api_token": "opens private adapters on a hub; adapters are only uploaded",
    "max_tool_calls": "limits tools that a server calls itself; there are none",
    "metadata": "nothing is stored; `/v1/responses` repeats it",
}
"""Fields that every route accepts but that change no answer, with the reason."""
