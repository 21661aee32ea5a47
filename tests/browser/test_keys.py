"""The key: asked for, kept in the tab, sent to the server alone; and what a key sees that may only ask models.

The server of these tests has no keys: what a server with keys would answer is put in its place.
"""

import re
from typing import Any

KEY = "lrs-secret-key"


def wants_key(page: Any) -> None:
    def answer(route: Any) -> None:
        if route.request.headers.get("authorization") == f"Bearer {KEY}":
            route.continue_()
        else:
            message = "no such key" if "authorization" in route.request.headers else "a key is needed"
            route.fulfill(status=401, json={"error": {"message": message, "code": "invalid_api_key"}})

    page.route(re.compile(r"/(metrics|info|v1/.*)$"), answer)


def may_only_ask(page: Any) -> None:
    def refuse(route: Any) -> None:
        route.fulfill(status=403, json={"error": {"message": "this key has no scope metrics", "code": "forbidden"}})

    page.route(re.compile(r"/(metrics|info|v1/pool|v1/adapters.*)$"), refuse)


def enter(page: Any, key: str) -> None:
    page.fill("#key-input", key)
    page.get_by_role("button", name="Use it").click()


def test_it_is_asked_for_once_and_stays_in_the_tab(open_page) -> None:
    page = open_page(prepare=wants_key, live=False)
    page.locator("#key-dialog[open]").wait_for()
    assert page.evaluate("document.activeElement.id") == "key-input"
    assert page.get_attribute("#key-input", "type") == "password"
    enter(page, "wrong")
    page.locator("#key-dialog[open]").wait_for()
    assert "does not know this key" in page.locator("#key-note").inner_text()
    enter(page, KEY)
    page.wait_for_selector("#state[data-state=live]")
    page.wait_for_selector("#adapters-rows tr")
    assert page.locator("#key-button").inner_text() == "Key set"
    kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href, document.body.innerHTML]")
    assert not [place for place in kept if KEY in place]
    assert page.input_value("#key-input") == ""
    page.reload()
    page.wait_for_selector("#state[data-state=live]")
    assert page.locator("#key-dialog").is_hidden()
    other = page.context.new_page()
    wants_key(other)
    other.goto(page.url)
    other.locator("#key-dialog[open]").wait_for()
    page.locator("#key-button").click()
    page.get_by_role("button", name="Forget it").click()
    page.wait_for_selector("#state[data-state=key]")
    assert page.evaluate("sessionStorage.length") == 0


def test_a_closed_dialog_stays_closed(open_page) -> None:
    page = open_page(prepare=wants_key, live=False)
    page.locator("#key-dialog[open]").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_selector("#needs-key:visible")
    page.wait_for_timeout(500)
    assert page.locator("#key-dialog").is_hidden()
    assert "wants a key" in page.locator("#adapters-about").inner_text()


def test_a_key_that_no_header_takes_is_not_sent(open_page) -> None:
    page = open_page(prepare=wants_key, live=False)
    page.locator("#key-dialog[open]").wait_for()
    enter(page, "lorasrv-abc\u2026")
    page.get_by_text("of ASCII only").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_key_for_asking_sees_the_try_it_box(open_page) -> None:
    page = open_page(prepare=may_only_ask, live=False)
    page.wait_for_selector("#state[data-state=forbidden]")
    assert "need a key with scope metrics or admin" in page.locator("#needs-admin").inner_text()
    assert page.locator("#overview-body").is_hidden()
    assert "needs a key with scope upload or admin" in page.locator("#adapters-about").inner_text()
    page.get_by_label("In the pool").check()
    page.locator("#adapters-about", has_text="needs a key with scope metrics or admin").wait_for()
    page.fill("#try-tokens", "4")
    page.click("#try-run")
    page.wait_for_selector("#try-stop:disabled")
    assert [len(text) > 0 for text in page.locator(".answer").all_text_contents()] == [True, True]
