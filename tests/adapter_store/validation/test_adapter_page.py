"""docs/adapters.md says what the tables say."""

import re
from pathlib import Path

from adapter_page import PAGE, PARTS, up_to_date

from adapter_store.formats.adapter_config import FIELD_RULES
from adapter_store.formats.tensor_names import KNOWN_FORMS


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")
    assert up_to_date(page) == page, "run: python tests/helpers/adapter_page.py"


def test_it_names_every_field_and_every_refusal() -> None:
    page = PAGE.read_text("utf-8")
    assert [name for name in FIELD_RULES if f"`{name}`" not in page] == []
    assert [code for _, code, _ in KNOWN_FORMS if f"`{code}`" not in page] == []


def test_a_changed_table_is_noticed() -> None:
    page = PAGE.read_text("utf-8")
    for name in PARTS:
        begin = page.index(f"<!-- generated: {name} -->")
        stale = page[: page.index("\n", begin) + 1] + "old\n" + page[page.index("<!-- end -->", begin) :]
        assert stale != page
        assert up_to_date(stale) == page


def test_commands_on_the_page_exist() -> None:
    """Options that the page names are options that the command line has."""
    sources = "".join(path.read_text("utf-8") for path in (Path(PAGE).parents[1] / "api" / "cli").rglob("*.py"))
    options = set(re.findall(r"--[a-z-]{3,}", re.sub(r"<!--.*?-->", "", PAGE.read_text("utf-8"))))
    assert len(options) >= 3
    assert [option for option in sorted(options) if f'"{option}"' not in sources] == []
