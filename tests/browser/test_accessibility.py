"""Keyboard, names, contrast, and axe-core's rules where `make test-browser` could bring them from npm."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

AXE = Path(__file__).parents[2] / "build" / "browser" / "axe-core" / "axe.min.js"
THEMES = ["light", "dark"]
LEAST_CONTRAST = 4.5
# Every text that is seen, with the colour behind it: of the nearest ancestor that is not transparent.
TEXTS = """() => {
  const UNSEEN = ".visually-hidden, .skip, script, datalist";
  const seen = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, at = node.parentElement;
    if (!node.data.trim() || !at.checkVisibility() || at.closest(`${UNSEEN}, [disabled]`)) continue;
    let behind = at, ground;
    do ground = getComputedStyle(behind).backgroundColor;
    while (/rgba\\(.*, 0\\)/.test(ground) && (behind = behind.parentElement));
    const style = getComputedStyle(at);
    const ink = at.closest("svg") ? style.fill : style.color;
    seen.set(`${ink} on ${ground}`, node.data.trim().slice(0, 30));
  }
  return [...seen];
}"""
# Controls and what a screen reader would call them.
NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, a[href], summary, [tabindex], canvas")]
  .filter((e) => e.id !== "main" && !e.hidden && !(e.labels?.length && e.labels[0].textContent.trim())
    && !e.getAttribute("aria-label") && !e.textContent.trim()
    && !document.getElementById(e.getAttribute("aria-labelledby"))?.textContent.trim())
  .map((e) => e.outerHTML.slice(0, 80))"""


def luminance(colour: str) -> float:
    channels = [float(number) / 255 for number in re.findall(r"[\d.]+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(ink: str, ground: str) -> float:
    darker, lighter = sorted((luminance(ink), luminance(ground)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.fixture(params=THEMES)
def themed(request: pytest.FixtureRequest, open_page, eventually) -> Any:
    """The console with everything open that can be."""
    page = open_page(color_scheme=request.param, bypass_csp=True)
    eventually(lambda: page.locator("#adapters-rows tr").count() == 25)
    for name in ("pool-details", "figures-details"):
        page.locator(f"#{name} summary").click()
    page.wait_for_timeout(100)
    return page


def test_contrast(themed) -> None:
    pairs = themed.evaluate(TEXTS)
    assert len(pairs) > 5
    low = {pair: (text, round(contrast(*pair.split(" on ")), 2)) for pair, text in pairs}
    assert {pair: shown for pair, shown in low.items() if shown[1] < LEAST_CONTRAST} == {}


def test_everything_has_a_name(page, eventually) -> None:
    eventually(lambda: page.locator("#adapters-rows tr").count() == 25)
    assert page.evaluate(NAMELESS) == []
    landmarks = ["header", "main", "nav", "footer", "h1"]
    assert [page.locator(name).count() for name in landmarks] == [1] * len(landmarks)
    levels = [
        int(level) for level in page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => h.tagName[1])")
    ]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), "a level of headings is left out"


def test_by_keyboard_alone(page, eventually) -> None:
    eventually(lambda: page.locator("#adapters-rows tr").count() == 25)
    where = """() => { const e = document.activeElement, s = getComputedStyle(e), b = e.getBoundingClientRect();
      const ringed = e.matches("input[type=radio]") ? getComputedStyle(e.nextElementSibling) : s;
      const name = e.id || e.getAttribute("class") || e.tagName;
      return [name, ringed.outlineStyle !== "none" || e.id === "main", b.width > 0]; }"""
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(where))
    names = [name for name, *_ in seen]
    assert names[0] == "skip"
    assert [name for name, ringed, _ in seen if not ringed] == [], "focus that is not seen"
    assert [name for name, _, wide in seen if not wide] == []
    order = ["key-button", "pool-canvas", "plot", "try-prompt", "try-run", "lane-1", "lane-2", "adapters-search"]
    places = [names.index(name) for name in order]
    assert places == sorted(places), dict(zip(order, places, strict=True))
    page.keyboard.press("Home")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_no_motion_where_it_is_not_wanted(open_page) -> None:
    page = open_page(reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert page.evaluate("getComputedStyle(document.getElementById('key-button')).transitionDuration") == "0s"


def axe(page: Any) -> list[str]:
    if not AXE.exists():
        pytest.skip("axe-core is not there: make test-browser brings it where npm is")
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [f"{one['id']} ({one['impact']}): {one['nodes'][0]['html'][:120]}" for one in found]


def test_axe(themed) -> None:
    themed.fill("#try-tokens", "2")
    themed.click("#try-run")
    themed.wait_for_selector("#try-stop:disabled")
    assert axe(themed) == []


def test_axe_in_dialogs(themed) -> None:
    themed.locator("#key-button").click()
    assert axe(themed) == []
    themed.keyboard.press("Escape")
    themed.locator("#adapters-rows th button").first.click()
    themed.get_by_text("Report of the upload").wait_for()
    assert axe(themed) == []
