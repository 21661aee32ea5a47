"""Defaults of a persona in the console: read, edited as a new version, refused with every reason, and hidden."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

MUSE = {
    "name": "Muse",
    "system": "Line one.\nLine <b>two</b>.",
    "greetings": ["Come in, {{user}}."],
    "temperature": 0.5,
}


@pytest.fixture
def muse(served) -> Iterator[str]:
    """A persona without weights."""
    served.post("/v1/adapters", id="muse", defaults=MUSE).raise_for_status()
    yield "muse"
    served.http.delete("/v1/adapters/muse", params={"force": True}).raise_for_status()


def details(page: Any, name: str) -> Any:
    page.fill("#adapters-search", name)
    page.get_by_role("button", name=f"Details of {name}", exact=True).click()
    dialog = page.locator("#details-dialog")
    dialog.get_by_role("heading", name="Defaults").wait_for()
    return dialog


def current(served: Any, name: str) -> Any:
    return served.http.get(f"/v1/adapters/{name}/defaults").json()


def test_a_persona_without_weights_is_shown_and_edited(page, served, muse: str) -> None:
    dialog = details(page, muse)
    text = dialog.inner_text()
    for wanted in ("no weights: the base answers", "Line one.\nLine <b>two</b>.", "Come in, {{user}}.", "0.5"):
        assert wanted in text, wanted
    assert "Report of the upload" not in text
    assert page.get_by_role("button", name="Warm muse").is_disabled()
    dialog.get_by_role("button", name="Edit as a new version").click()
    assert page.evaluate("document.activeElement.id") == "persona-system"
    assert page.input_value("#persona-system") == MUSE["system"]
    assert json.loads(page.input_value("#persona-rest")) == {k: v for k, v in MUSE.items() if k != "system"}
    save = dialog.get_by_role("button", name="Save as a new version")
    save.click()
    dialog.get_by_text("muse@1 was there already").wait_for()
    dialog.get_by_role("button", name="Edit as a new version").click()
    page.fill("#persona-system", "Be brief.")
    page.select_option("#persona-mode", "lock")
    page.fill("#persona-rest", '{"top_p": 3, "seed": "x"}')
    save.click()
    refused = dialog.locator("form .note.bad")
    refused.wait_for()
    assert re.search(r"2 problems.*top_p.*seed|2 problems.*seed.*top_p", refused.inner_text(), re.S)
    for wrong in ("{", "[]", '{"system": "x"}'):
        page.fill("#persona-rest", wrong)
        save.click()
        dialog.locator("form .note.bad", has_text="Everything else").wait_for()
    page.fill("#persona-rest", '{"top_p": 0.5}')
    save.click()
    dialog.get_by_text("muse@2 is made").wait_for()
    assert current(served, muse)["defaults"] == {"top_p": 0.5, "system": {"text": "Be brief.", "mode": "lock"}}
    assert "a client's own is refused" in dialog.inner_text()


def test_a_seed_that_javascript_cannot_hold_stays(page, served) -> None:
    served.post("/v1/adapters", id="seeded", defaults={"seed": 2**53 + 1, "system": "One."}).raise_for_status()
    try:
        dialog = details(page, "seeded")
        assert str(2**53 + 1) in dialog.inner_text()
        dialog.get_by_role("button", name="Edit as a new version").click()
        page.fill("#persona-system", "Two.")
        dialog.get_by_role("button", name="Save as a new version").click()
        dialog.get_by_text("seeded@2 is made").wait_for()
        assert current(served, "seeded")["defaults"] == {"seed": 2**53 + 1, "system": "Two."}
    finally:
        served.http.delete("/v1/adapters/seeded", params={"force": True}).raise_for_status()


def test_weights_get_defaults_unless_somebody_was_faster(page, served) -> None:
    before = served.http.get("/v1/adapters/two").json()
    dialog = details(page, "two")
    dialog.get_by_role("button", name="Give it defaults").click()
    page.fill("#persona-rest", '{"max_tokens": 5}')
    served.http.patch("/v1/adapters/two", json={"aliases": {"prod": 1}}).raise_for_status()
    dialog.get_by_role("button", name="Save as a new version").click()
    dialog.get_by_text("Somebody has changed it since").wait_for()
    page.keyboard.press("Escape")
    dialog = details(page, "two")
    dialog.get_by_role("button", name="Give it defaults").click()
    page.fill("#persona-rest", '{"max_tokens": 5}')
    dialog.get_by_role("button", name="Save as a new version").click()
    dialog.get_by_text(re.compile(r"two@\d+ is made")).wait_for()
    found = current(served, "two")
    assert (found["defaults"], found["digest"]) == ({"max_tokens": 5}, before["digest"])
    served.http.delete(f"/v1/adapters/two@{found['version']}").raise_for_status()
    served.http.patch("/v1/adapters/two", json={"aliases": {"prod": None}}).raise_for_status()


def test_what_is_hidden_is_said(page, served, muse: str) -> None:
    record = served.http.get("/v1/adapters/muse").json()
    record["persona"] |= {"defaults": None}
    page.route(re.compile("/v1/adapters/muse$"), lambda route: route.fulfill(json=record))
    dialog = details(page, muse)
    assert "only its owner and administrators see how" in dialog.inner_text()
    assert dialog.get_by_role("button", name="Edit as a new version").count() == 0
