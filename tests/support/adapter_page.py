"""Generate the parts of docs/adapters.md about served and refused adapters, from the tables that decide this.

`python tests/support/adapter_page.py` writes them into the page; a test compares them with the page.
"""

from collections.abc import Callable
from pathlib import Path

from page_parts import table, with_parts

from adapter_store.formats.adapter_config import FIELD_RULES, INERT_INITS, RESIDUAL_INITS, Decision
from adapter_store.formats.tensor_names import FULL_COPY, KNOWN_FORMS, WRAPPER, WRAPPER_PARTS
from adapter_store.validation.vocab_rows import MAX_ADDED_TOKENS, MAX_ROW_BYTES

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"


def _fields(decision: Decision) -> str:
    rules = sorted((name, rule) for name, rule in FIELD_RULES.items() if rule.decision is decision)
    return table(("field", "what it does"), ((f"`{name}`", rule.description) for name, rule in rules))


def _inits() -> str:
    inert = ", ".join(f"`{name}`" for name in ("true", "false", *sorted(INERT_INITS)))
    return f"`init_lora_weights`: {inert} leave the base as it is."


def _wrappers() -> str:
    rows = [
        *((f"`{part}.`", f"removed: {what}") for part, what in WRAPPER_PARTS.items()),
        ("`lora_A.NAME.weight`", "`NAME.` removed: an in-memory state dict; a file with two names is refused"),
        (f"no `{WRAPPER}`", "prefix added: the inner model was saved instead of the PEFT model"),
    ]
    return table(("in the name", "what happens"), rows)


OTHERS = (
    (
        "`lm_head` or `embed_tokens` with more rows than the base has tokens, and no own tokens, or in one table "
        f"only; with another number of rows, and LoRA on either; with over {MAX_ADDED_TOKENS:,} rows fewer",
        "unsupported_vocabulary",
        "upload it with its tokenizer.json; save it with all rows (`save_embedding_layers=True`); cut padding off, as "
        "the error says",
    ),
    (
        f"more than {MAX_ADDED_TOKENS:,} tokens beyond the base's",
        "too_many_added_tokens",
        "the error has both numbers; train fewer tokens",
    ),
    (
        "a tokenizer.json that changes the base's own tokens, or adds some otherwise than behind them",
        "unsupported_tokenizer",
        "the error names the token or the part; `--no-tokenizer` serves an adapter that needs no tokens of its own",
    ),
    ("a copy of a linear (`modules_to_save`)", "unsupported_modules_to_save", FULL_COPY),
    (
        "LoRA beside a copy (`modules_to_save`) of the same module",
        "unsupported_modules_to_save",
        "PEFT leaves the LoRA out; train it in one way",
    ),
    (
        "`trainable_token_indices` beside a copy of the same module, or beside LoRA of the embedding",
        "unsupported_trainable_token_indices",
        "PEFT does not load it; train it in one way",
    ),
    (
        "DoRA (`use_dora`) or `lora_bias` of `lm_head` or `embed_tokens`",
        "unsupported_embedding",
        "train again without that module",
    ),
    (
        "`ensure_weight_tying` with LoRA of only one of `lm_head` and `embed_tokens`, or two that differ (LoRA or "
        "copies), where they are tied",
        "unsupported_ensure_weight_tying",
        "PEFT shares one between both, and saves it for each; the error says what to do",
    ),
    (
        f"more than {MAX_ROW_BYTES >> 30} GiB of trained rows of the vocabulary, in bf16",
        "own_rows_too_large",
        "the error has the bytes; train fewer tokens (`trainable_token_indices`)",
    ),
)
"""Rows that are not in any table of the code."""


def _stays_out() -> str:
    """Return the refused fields, initializations and tensors, in this order, with one row for each reason."""
    refused = sorted((name, rule) for name, rule in FIELD_RULES.items() if rule.decision is Decision.REFUSED)
    fields = [(f"`{name}`", f"unsupported_{name}", f"{rule.description}; {rule.remedy}") for name, rule in refused]
    inits = ", ".join(f"`{name}`" for name in RESIDUAL_INITS)
    changed = "training changed the base's weights; the error has PEFT's call that saves a plain LoRA, if there is one"
    parts: dict[tuple[str, str], list[str]] = {}
    for part, code, what in KNOWN_FORMS:
        parts.setdefault((code, what), []).append(f"`{part}`")
    tensors = [(f"tensors named {', '.join(found)}", code, what) for (code, what), found in parts.items()]
    rows = [*fields, (f"`init_lora_weights`: {inits}", "unsupported_init", changed), *OTHERS, *tensors]
    return table(("what", "error code", "why, and what to do"), ((what, f"`{code}`", why) for what, code, why in rows))


PARTS: dict[str, Callable[[], str]] = {
    "honoured": lambda: _fields(Decision.HONOURED),
    "harmless": lambda: _fields(Decision.HARMLESS),
    "inits": _inits,
    "wrappers": _wrappers,
    "stays out": _stays_out,
}


def up_to_date(page: str) -> str:
    """Return the page with its generated parts replaced."""
    return with_parts(page, {name: make() for name, make in PARTS.items()})


if __name__ == "__main__":
    PAGE.write_text(up_to_date(PAGE.read_text("utf-8")), "utf-8")
