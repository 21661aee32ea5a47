"""Values that routes refuse: one table per schema. OpenAI's rows are sent to the fake engine and to a real process.

A row is (fields, param, says): the answer names `param` (`*` matches any suffix), and its message has every word of
`says`. Token ids end at `VOCAB`, prompts with their answers at `CONTEXT`, for the fake engine and for the tiny models.
"""

from collections.abc import Iterator
from typing import Any

from fake_engine import VOCAB

Row = tuple[dict[str, Any], str | None, tuple[str, ...]]
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
CHOICES = ("wait", "reject", "fallback_base")
NO_TOKENS = (-1, VOCAB, 2**40, 2**70, 1.5, True)
WRONG_BIAS: tuple[Any, ...] = (
    *({key: 1} for key in ("-1", "5.0", "five", "", " 5", "٥", "1.5", "True", "9" * 11, "9" * 5000)),
    *({"5": value} for value in (100.1, -101, 1e9, "1", None, True)),
    *({"5": 1, "05": 2}, [5], [[5, 1.0]], {str(token): 0 for token in range(1025)}),
)


def wrong(name: str, *values: Any, says: tuple[str, ...] = (), param: str = "", **beside: Any) -> Iterator[Row]:
    """Yield a row for each value of one field; `beside` has valid fields, or fields that the value conflicts with."""
    return (({**beside, name: value}, param or name, says) for value in values)


# Of completions and of chats.
OPENAI: list[Row] = [
    *wrong("temperature", -1, 1e9, "1", True),
    *wrong("top_p", 0, 1.1, -0.5),
    *wrong("top_k", -2, 2**40, 1.5),
    *wrong("min_p", 2, -0.1, 1.1),
    *wrong("typical_p", 0, 2, -0.5, 1.0001, "0.5"),
    *wrong("presence_penalty", -2.01, 2.5, 1e300, "1", True, [1]),
    *wrong("frequency_penalty", -2.01, 2.5, 1e300, "1", True, [1]),
    *wrong("repetition_penalty", 0, -1, 1e-40, 1e-9, 101, "1.1", False),
    *wrong("allowed_token_ids", [], [-1], [2**40], 5, {"1": 1}),
    *wrong("bad_words", [""], [" "], ["x" * 257], ["x"] * 129, "x"),
    *wrong("min_tokens", -1, 17, 2**31, 2**70, 1.5, "3", True, max_tokens=16),
    *wrong("fsd_alpha", -0.1, 1.1, "1", temperature=0),
    *wrong("fsd_alpha", 0.4, temperature=0.7),
    *wrong("fsd_ngram", 0, 9, 2.5, temperature=0),
    *wrong("watermark", 1, "true", {}),
    *wrong("logit_bias", *WRONG_BIAS, param="logit_bias*"),
    *wrong("seed", 2**70),
    *wrong("max_tokens", 0, -1, 2**31, 2**63, "8"),
    *wrong("max_completion_tokens", 0, 2**31),
    *wrong("max_new_tokens", 0, 2**31),
    *wrong("max_tokens", 3, max_completion_tokens=4),
    *wrong("max_tokens", 3, max_new_tokens=4),
    *wrong("stop", "", ["a", ""]),
    *wrong("stop", ["x"] * 17, [str(i) for i in range(10_000)], says=("16",)),
    *wrong("stop", ["x" * 257], [1], param="stop*"),
    *wrong("stop_token_ids", *([token] for token in NO_TOKENS), [0] * 129, param="stop_token_ids*"),
    *wrong("ignore_eos", 1),
    *wrong("stream", "yes"),
    *wrong("stream_options", {"include_usage": True}),
    *wrong("adapter_id", ["a"]),
    *wrong("use_defaults", 1, "no"),
    *wrong("user", 5),
    *wrong("priority", 1.5, "1", True),
    *wrong("timeout_s", "5", True, []),
    *wrong("n", 0, -1, 9, 10**9, True, 1.5, "2", [1], says=("n: ",)),
    *wrong("best_of", 0, -1, 9, 10**9, True, n=1),
    *wrong("best_of", 1, "2", n=2),
    *wrong("best_of", 2, n=3),
    *wrong("on_cold", "base", "", "WAIT", 1, True, ["wait"], {"wait": 1}, says=("must be", *CHOICES)),
    *wrong("cache_salt", "x" * 257, 1, True, ["x"]),
    *wrong("kv_policy", "window", {}, {"kind": "window"}, param="kv_policy*"),
    *wrong("kv_policy", {"kind": "h2o", "recent": 64}, says=("'kind' must be", "'window', 'select'", "not 'h2o'")),
    *wrong("kv_policy", *({"kind": "window", "recent": n} for n in (0, -1, 2**31, "64", 64.5)), param="kv_policy*"),
    *wrong("kv_policy", {"kind": "window", "recent": 64, "sink": 0}, param="kv_policy*"),
    *wrong("kv_policy", {"kind": "window", "recent": 64, "budget": 9}, param="kv_policy*"),
    *wrong("kv_policy", {"kind": "select"}, {"kind": "select", "budget": 0}, param="kv_policy*"),
    # Fields of other servers that would change the answer.
    *wrong("penalty_alpha", 0.6),
    *wrong("num_beams", 4),
    *wrong("truncate_prompt_tokens", 0, -2, 2**31, "3", True, 1.5),
    *wrong("return_token_ids", 1, "yes"),
    *wrong("return_tokens_as_token_ids", True, says=("logprobs",)),
    *wrong("no_repeat_ngram_size", -1, 2**31, "3", True, 1.5),
    *wrong("do_sample", False),
    *wrong("stop_sequences", ["x"]),
    *wrong("return_full_text", True),
    *wrong("response_format", {"type": "xml"}, param="response_format.type", says=("json_schema",)),
    *wrong("response_format", {"type": "json_schema"}, says=("schema is missing",)),
    *wrong("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, says=("missing",)),
    *wrong("response_format", "json", says=("an object such as",)),
    *wrong("guided_json", 5, says=("an object",)),
    *wrong("guided_json", "{", says=("not JSON",)),
    *wrong("guided_choice", [1], param="guided_choice[0]", says=("must be a text",)),
    *wrong("guided_choice", [], ["a", ""], says=("empty",)),
    *wrong("guided_json", "", says=("not JSON",)),
    *wrong("guided_regex", "", says=("empty",)),
    *wrong("guided_grammar", "", " ", says=("empty",)),
    *wrong("structured_outputs", {"choice": []}, {"regex": ""}, {"grammar": ""}, says=("empty",)),
    *wrong("response_format", {"type": "text", "schema": {}}, says=("no schema",)),
    *wrong("response_format", {"type": "json_object", "schema": {}, "value": {}}, says=("one schema",)),
    *wrong("response_format", {"type": "json"}, says=("value is missing",)),
    *wrong("response_format", {"type": "regex"}, {"type": "regex", "value": {}}, says=("regular expression",)),
    *wrong("guided_regex", "(a{0,500}){0,500}", says=("250000",)),
    *wrong("structured_outputs", {"regex": "a", "choice": ["a"]}, says=("one of",)),
    *wrong("structured_outputs", {}, {"choices": ["a"]}, {"regex": None}, says=("needs one of",)),
    *wrong("guided_whitespace_pattern", " ", guided_json={}, says=("not supported",)),
    *wrong("guided_choice", ["a"], guided_regex="a", says=("exclude each other",)),
    *wrong("guided_regex", "a", response_format={"type": "json_object"}, says=("exclude",)),
]
COMPLETIONS: list[Row] = [
    *wrong("model", 7),
    *wrong("prompt", [["a"]], ["a", [1]], ["a", 1], [[1], [True]], ["a"] * 257, [[]], [], [""], param="prompt*"),
    *wrong("prompt", 7, None, {"a": 1}, "", *([1, token] for token in NO_TOKENS), param="prompt*"),
    *wrong("logprobs", 6, -1, 10**6, True),
    *wrong("top_logprobs", 2),
    *wrong("prompt_logprobs", 21, -1),
    *wrong("prompt_logprobs", 1, stream=True),
    *wrong("echo", 1),
    *wrong("echo", True, logprobs=1, n=2, stream=True),
    *wrong("best_of", 2, n=1, stream=True),
    *wrong("stream", True, use_beam_search=True),
    *wrong("temperature", 0.5, 2, use_beam_search=True),
    *wrong("logprobs", 1, use_beam_search=True),
    *wrong("length_penalty", 11, use_beam_search=True),
    *wrong("early_stopping", "always", use_beam_search=True),
    *wrong("best_of", 2, n=3, use_beam_search=True),
    *wrong("use_beam_search", 1),
    *wrong("length_penalty", 2),
    *wrong("early_stopping", True),
    *wrong("suffix", "x"),
    *wrong("store", True),
    *wrong("add_special_tokens", False),
    *wrong("tools", [CLOCK]),
    *wrong("chat_template_kwargs", {"tokenize": True}),
    *wrong("thinking_token_budget", 0, 5),
]
CHATS: list[Row] = [
    *wrong("messages", [], None, [{"role": "user", "content": "x"}] * 2049),
    *wrong("messages", [{"role": "user"}], param="messages[0].content"),
    *(
        row
        for content in (None, 7, [{"type": "image_url", "image_url": {"url": "http://x"}}])
        for row in wrong("messages", [{"role": "user", "content": content}], param="messages[0].content*")
    ),
    *(
        row
        for role in ("robot", "root")
        for row in wrong("messages", [{"role": role, "content": "x"}], param="messages[0].role")
    ),
    *wrong("context_overflow", "drop", True, 1),
    *wrong("thinking_token_budget", -2, 1.5, True, "5"),
    *wrong("thinking_token_budget", 0, 2**40, says=("does not reason",)),
    *wrong("top_logprobs", 3),
    *wrong("top_logprobs", 3, logprobs=False),
    *wrong("top_logprobs", 21, 10**6, -1, True, logprobs=True),
    *wrong("logprobs", 1),
    *wrong("echo", True),
    *wrong("add_special_tokens", True),
    *wrong("tools", [{**CLOCK, "strict": True}], says=("tools[0].strict", "inside function")),
    *wrong("chat_template", "{{ cycler.__init__.__globals__ }}"),
]
# Inside `parameters`.
TGI: list[Row] = [
    *wrong("max_new_tokens", 0, "8"),
    *wrong("temperature", -1),
    *wrong("top_p", 0, 1.5),
    *wrong("top_k", -1),
    *wrong("seed", -1),
    *wrong("stop", [""], [str(i) for i in range(17)]),
    *wrong("stop_sequences", [""], [str(i) for i in range(17)]),
    *wrong("best_of", 0, 10**9, 2),
    *wrong("seed", 1, best_of=2, do_sample=True),
    *wrong("best_of", 2, do_sample=True, stream=True),
    *wrong("decoder_input_details", True, stream=True),
    *wrong("top_n_tokens", 10**6),
    *wrong("top_n_tokens", 2, says=("details: true",)),
    *wrong("return_k_alternatives", 2, says=("details: true",)),
    *wrong("truncate", 0, 512),
    *wrong("grammar", {"type": "json", "value": 3}, {"type": "regex", "value": ""}, {"type": "lark", "value": "a"}),
    *wrong("grammar", {"type": "regex", "value": "a"}, response_format={"type": "json_object"}, says=("exclude",)),
    *wrong("response_format", {"type": "xml"}),
    *wrong("adapter_source", "s3", "pbase"),
    *wrong("adapter_id", ""),
]
TOKENIZE: list[Row] = [
    ({}, None, ()),
    ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, None, ()),
    *wrong("prompt", 3),
    *wrong("messages", []),
    *wrong("chat_template", "{{ 1 }}", prompt="a"),
    *wrong("add_special_tokens", True, messages=[{"role": "user", "content": "b"}]),
]
DETOKENIZE: list[Row] = [*wrong("tokens", [-1], [251], [2**40], ["1"], [1.5], None, param="tokens*")]
NO_WEIGHTS: dict[str, Any] = {"config": None, "weights": None, "defaults": {"temperature": 0.5}}
REGISTER: list[Row] = [
    *wrong("weights", "sha256:zz", param="digest"),
    *wrong("weights", 7),
    *wrong("config", None, []),
    *wrong("id", 5),
    *wrong("if_not_exist", True),
    *wrong("alias", "", "Prod", 7),
    *wrong("defaults", [1], "x"),
    *wrong("allow_drift", True, says=("int8",), stored="bf16"),
    *wrong("stored", "int8", says=("weights",), **NO_WEIGHTS),
    *wrong("allow_partial", True, says=("weights",), **NO_WEIGHTS),
    *wrong("allow_drift", True, says=("weights",), **NO_WEIGHTS),
    *wrong("tokenizer", f"sha256:{'0' * 64}", says=("weights",), **NO_WEIGHTS),
]
WARM: list[Row] = [
    *wrong("deadline_ms", -1, 600_001, 1.5, 10.0, "10", True, None, [1]),
    *wrong("deadline", 5),
]
VERIFY: list[Row] = [
    *wrong("prompts", [], ["x"] * 17, "x"),
    *wrong("prompts", [""], param="prompts[0]"),
    *wrong("prompts", ["x", "y" * 600], param="prompts[1]"),
    *wrong("timeout_s", 0, 3601),
    *wrong("stream", "yes"),
    *wrong("promts", ["x"]),
]
NO_LIMITS: dict[str, tuple[Any, ...]] = {
    "max_running": (0, -1, 1.5, 2.0, "2", True),
    "max_queued": (0, 10**400),
    "tokens_per_s": (0, -0.5, False, [1], 10**400),
    "resident_bytes": ("1MiB", 0),
    "weight": (0, 1e7, {}),
}
# With a valid change, which must not be made either.
PATCH: list[Row] = [
    *(({}, "pinned", ()), ({"aliases": {}}, "pinned", ())),
    *wrong("pinned", None, 1, "true"),
    *wrong("pinnned", True),
    *wrong("id", "x", pinned=True),
    *wrong("rollback", 0, pinned=True),
    *wrong("version", 0, pinned=True),
    *wrong("aliases", ["prod"], [], {f"a{number}": 1 for number in range(1001)}, pinned=True),
    *(
        ({"limits": {name: value}, "pinned": True}, f"limits.{name}", ())
        for name, values in NO_LIMITS.items()
        for value in values
    ),
    *wrong("limits", {"weight": 1, "rps": 1}, param="limits.rps", pinned=True),
    *wrong("limits", {"max_runing": None}, param="limits.max_runing", pinned=True),
    *wrong("limits", [], "none", False, pinned=True),
    *wrong("aliases", {"Prod": 1}, param="aliases.Prod", pinned=True, limits={"weight": 2}),
    *wrong("aliases", {"3": 1}, param="aliases.3", pinned=True, limits={"weight": 2}),
    *(
        row
        for target in (0, "1", True, [1], {}, {"1": 0.5}, {"1": 0.5, "2": 0.4}, {"1": 1.0, "2": 0})
        for row in wrong("aliases", {"next": 1, "prod": target}, param="aliases.prod", pinned=True)
    ),
]
PROMPT: dict[str, Any] = {"model": "tiny-base", "prompt": "hi"}
CHAT: dict[str, Any] = {"model": "tiny-base", "messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, tuple[dict[str, Any], list[Row]]] = {
    "POST /v1/completions": (PROMPT, [*OPENAI, *COMPLETIONS]),
    "POST /v1/chat/completions": (CHAT, [*OPENAI, *CHATS]),
    "POST /": ({"inputs": "hi"}, TGI),
    "POST /tokenize": ({}, TOKENIZE),
    "POST /detokenize": ({}, DETOKENIZE),
    "POST /v1/adapters": ({"id": "mia", "config": {}, "weights": f"sha256:{'0' * 64}"}, REGISTER),
    "PATCH /v1/adapters/mia": ({}, PATCH),
    "POST /v1/adapters/mia:warm": ({}, WARM),
    "POST /v1/adapters/mia:verify": ({}, VERIFY),
}
# Refused by a part of the engine that the fake engine does not have.
OF_BOTH: list[Row] = [
    *wrong("priority", 1001, -1001),
    *wrong("timeout_s", 0, -1, 1e9),
    *wrong("logit_bias", *({str(token): 1} for token in (VOCAB, 2**40, 2**70)), param="logit_bias*"),
    *wrong("logit_bias", {str(token): -100 for token in range(VOCAB)}),
]
ENGINE: dict[str, list[Row]] = {
    "/v1/completions": [
        *OF_BOTH,
        *wrong("prompt", ["hi", ""]),
        *wrong("prompt_logprobs", 1, use_beam_search=True),
        *wrong("seed", 1, use_beam_search=True),
        *wrong("stop", "x", use_beam_search=True),
    ],
    "/v1/chat/completions": OF_BOTH,
}
