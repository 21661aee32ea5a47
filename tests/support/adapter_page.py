"""Generate the parts of docs/adapters.md that say what is served and refused, from the tables that decide it.

`python tests/support/adapter_page.py` writes them into the page; a test compares.
"""

from collections.abc import Callable
from pathlib import Path

from page_parts import table, with_parts

from adapter_store.formats.adapter_config import FIELD_RULES, INERT_INITS, RESIDUAL_INITS, Decision
from adapter_store.formats.tensor_names import KNOWN_FORMS, WRAPPER, WRAPPER_PARTS

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"


def _fields(decision: Decision) -> str:
    rules = sorted((name, rule) for name, rule in FIELD_RULES.items() if rule.decision is decision)
    if decision is Decision.REFUSED:
        rows = ((f"`{name}`", rule.description, rule.remedy) for name, rule in rules)
        return table(("field", "why", "what to do"), rows)
    return table(("field", "what it does"), ((f"`{name}`", rule.description) for name, rule in rules))


def _inits() -> str:
    inert = ", ".join(f"`{name}`" for name in ("true", "false", *sorted(INERT_INITS)))
    residual = ", ".join(f"`{name}`" for name in RESIDUAL_INITS)
    return (
        f"`init_lora_weights`: {inert} leave the base unchanged and are served. {residual} change the base's weights "
        "before training, so the adapter is wrong on the original base. They are refused, and the error names the "
        "PEFT call that saves a plain LoRA."
    )


def _wrappers() -> str:
    rows = [
        *((f"`{part}.`", f"removed: {what}") for part, what in WRAPPER_PARTS.items()),
        ("`lora_A.NAME.weight`", "`NAME.` removed: an in-memory state dict; a file with two names is refused"),
        (f"no `{WRAPPER}`", "prefix added: the inner model was saved instead of the PEFT model"),
    ]
    return table(("in the name", "what happens"), rows)


def _forms() -> str:
    """Return one row per code, with all name parts that lead to it for the same reason."""
    parts: dict[tuple[str, str], list[str]] = {}
    for part, code, what in KNOWN_FORMS:
        parts.setdefault((code, what), []).append(f"`{part}`")
    rows = ((", ".join(found), f"`{code}`", what) for (code, what), found in parts.items())
    return table(("in the name", "error code", "what it is, and what to do"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "honoured": lambda: _fields(Decision.HONOURED),
    "harmless": lambda: _fields(Decision.HARMLESS),
    "refused": lambda: _fields(Decision.REFUSED),
    "inits": _inits,
    "wrappers": _wrappers,
    "forms": _forms,
}


def up_to_date(page: str) -> str:
    """Return the page with its generated parts replaced."""
    return with_parts(page, {name: make() for name, make in PARTS.items()})


if __name__ == "__main__":
    PAGE.write_text(up_to_date(PAGE.read_text("utf-8")), "utf-8")
