"""The console's first part: the pool map, the charts, the word for the server's state, colours, widths."""

import re
from typing import Any

import pytest


def wait_for_beat(page: Any) -> None:
    """Until the figures have been asked for once more."""
    with page.expect_response(re.compile("/v1/pool$")):
        pass
    page.wait_for_timeout(100)


def test_figures_are_the_servers(page, served) -> None:
    info = served.http.get("/info").json()
    assert page.locator("#served").inner_text() == f"tiny · {info['quantization']} · {info['version']}"
    assert page.title() == "lorasrv console"
    assert page.locator("#tiles .tile").count() == 8
    assert "live" in page.locator("#announcer").inner_text()
    served.post("/v1/adapters/two:warm", deadline_ms=20_000)
    wait_for_beat(page)
    pool = served.http.get("/v1/pool").json()
    shown = [int(text.replace(",", "")) for text in page.locator("#pool-legend .pages").all_inner_texts()]
    assert shown == [pool[f"pages_{part}"] for part in ("kv", "prefix", "adapters", "free")]
    assert f"{pool['pages_total']:,} pages of 16 tokens" in page.locator("#pool-about").inner_text()


def test_the_map_answers_the_keyboard(page, served) -> None:
    served.post("/v1/adapters/three:warm", deadline_ms=20_000)
    wait_for_beat(page)
    pool = served.http.get("/v1/pool").json()
    (first, number), *_ = next(a for a in pool["adapters"] if a["ids"] == ["three"])["runs"]
    canvas, readout = page.locator("#pool-canvas"), page.locator("#pool-readout")
    canvas.focus()
    assert readout.inner_text().startswith("Page 0: ")
    canvas.press("End")
    assert readout.inner_text().startswith(f"Page {pool['pages_total'] - 1}: adapter ")
    seen = {readout.inner_text()}
    for _ in range(len(pool["adapters"]) * 2):
        canvas.press("PageUp")
        seen.add(readout.inner_text())
    last = f"Page {first + number - 1}: adapter three ("
    assert [text for text in seen if text.startswith(last)], seen
    canvas.press("Home")
    canvas.press("ArrowRight")
    assert readout.inner_text().startswith("Page 1: ")
    assert re.search(r"in use: keys and values \d", canvas.get_attribute("aria-label"))
    page.locator("#pool-details summary").click()
    page.wait_for_selector("#pool-owners tr")
    rows = page.locator("#pool-owners tr").all_inner_texts()
    assert [row for row in rows if row.startswith("three") and f"\t{number}\t" in row], rows


def test_the_map_answers_the_pointer(page, served) -> None:
    served.post("/v1/adapters/one:warm", deadline_ms=20_000)
    wait_for_beat(page)
    box = page.locator("#pool-canvas").bounding_box()
    page.mouse.move(box["x"] + 3, box["y"] + 3)
    assert page.locator("#pool-readout").inner_text().startswith("Page 0: ")
    page.mouse.move(box["x"] - 30, box["y"] - 30)
    assert page.locator("#pool-readout").inner_text().startswith("Point at the map")
    # What is drawn differs where owners differ: an adapter's square is not a free one's.
    colours = page.evaluate(
        """() => { const c = document.getElementById("pool-canvas"), x = c.getContext("2d");
        return new Set(x.getImageData(0, 0, c.width, c.height).data.reduce((all, v, i, d) =>
          i % 4 ? all : (all.push(`${d[i]},${d[i + 1]},${d[i + 2]},${d[i + 3]}`), all), [])).size; }"""
    )
    assert colours > 2


def test_a_large_pool_is_shown_by_owner_until_one_zooms_in(open_page, served) -> None:
    """On a telephone, where a square for each page of this pool would be too small to be seen."""
    served.post("/v1/adapters/two:warm", deadline_ms=20_000)
    page = open_page(viewport={"width": 390, "height": 844})
    wait_for_beat(page)
    pool = served.http.get("/v1/pool").json()
    canvas, readout, zoom = page.locator("#pool-canvas"), page.locator("#pool-readout"), page.locator("#pool-zoom")
    assert zoom.inner_text() == "Show pages"
    canvas.focus()
    owners = set()
    for _ in range(len(pool["adapters"]) + 2):
        owners.add(readout.inner_text())
        canvas.press("ArrowRight")
    [two] = [text for text in owners if text.startswith("Adapter two (")]
    canvas.press("Home")
    while readout.inner_text() != two:
        canvas.press("ArrowRight")
    canvas.press("Enter")
    (first, number), *_ = next(a for a in pool["adapters"] if "two" in a["ids"])["runs"]
    assert readout.inner_text().startswith(f"Page {first}: adapter two (")
    shown = re.search(r"Pages (\d+) to (\d+) are shown", page.locator("#pool-about").inner_text())
    assert int(shown[1]) <= first <= first + number - 1 <= int(shown[2]) < pool["pages_total"]
    assert zoom.inner_text() == "Show owners"
    canvas.press("Escape")
    assert zoom.inner_text() == "Show pages"
    canvas.click(position={"x": 5, "y": 5})
    assert readout.inner_text().startswith("Page "), "an area that is clicked shows its pages, too"
    page.locator("#pool-bar").click(position={"x": 2, "y": 5})
    assert re.search(r"Pages 0 to \d+ are shown\.$", page.locator("#pool-about").inner_text())


def test_charts_are_filled_from_the_start(page, served) -> None:
    for _ in range(3):
        served.post("/v1/completions", model="tiny", prompt="a", max_tokens=8)
        wait_for_beat(page)
    plot = page.locator(".chart svg.plot").first
    line = plot.locator("path.line-0").first.bounding_box()
    assert line["width"] > 0.25 * plot.bounding_box()["width"]


def test_charts_have_a_gap_where_the_server_was_away(page, served) -> None:
    for _ in range(2):
        served.post("/v1/completions", model="tiny", prompt="a", max_tokens=8)
        wait_for_beat(page)
    # The line begins with the second scrape: a rate is of two.
    assert page.locator(".chart").first.locator("path.line-0").count() == 1
    page.route(re.compile("/metrics$"), lambda route: route.abort())
    page.wait_for_selector("#state[data-state=lost]")
    assert "No answer" in page.locator("#announcer").inner_text()
    assert page.locator("#tiles .value").first.inner_text() != "", "the last figures stay"
    page.unroute(re.compile("/metrics$"))
    page.wait_for_selector("#state[data-state=live]")
    for _ in range(2):
        wait_for_beat(page)
    assert page.locator(".chart").first.locator("path.line-0").count() == 2
    page.locator("#figures-details summary").click()
    page.wait_for_selector("#figures-rows tr")
    assert "did not answer" in page.locator("#figures-rows").inner_text()


def test_latencies_are_those_of_answers(page, served) -> None:
    wait_for_beat(page)
    for _ in range(3):
        served.post("/v1/completions", model="tiny", prompt="a", max_tokens=8)
    wait_for_beat(page)
    wait_for_beat(page)
    chart = page.locator(".chart", has_text="Time to first token")
    assert re.search(r"median\s*[\d.,]+ m?s", chart.inner_text())
    plot = chart.locator("svg.plot")
    assert re.search(r"Latest: median [\d.,]+ m?s, 95 % [\d.,]+ m?s", plot.get_attribute("aria-label"))
    plot.focus()
    plot.press("ArrowLeft")
    assert re.match(r"\d\d:\d\d:\d\d: median ", chart.locator("[aria-live]").inner_text())


@pytest.mark.parametrize("preferred", ["light", "dark"])
def test_colours_are_the_systems_until_one_is_chosen(open_page, preferred: str) -> None:
    page = open_page(color_scheme=preferred)
    paper = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    systems = paper()
    assert page.locator("#themes input:checked").get_attribute("value") == "auto"
    other = {"light": "Dark", "dark": "Light"}[preferred]
    page.locator("#themes label", has_text=other).click()
    chosen = paper()
    assert chosen != systems
    page.reload()
    assert paper() == chosen
    page.locator("#themes label", has_text="Auto").click()
    assert paper() == systems


@pytest.mark.parametrize("width", [360, 700, 1000, 1900])
def test_nothing_is_wider_than_the_screen(open_page, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 800})
    page.wait_for_selector("#adapters-rows tr")
    too_wide = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll") && !e.closest("dialog")
          && !e.classList.contains("visually-hidden") && e.getBoundingClientRect().right > innerWidth + 0.5)
          .map((e) => e.tagName + "#" + e.id)"""
    )
    assert too_wide == []
    name, *buttons = (page.locator("#adapters-rows tr").first.locator("button").nth(n) for n in range(4))
    for button in (name, *buttons):
        box = button.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= width, "no button of an adapter is cut off"


def test_it_is_the_same_with_a_slash(open_page) -> None:
    page = open_page(path="/console/")
    assert page.locator("#tiles .tile").count() == 8
