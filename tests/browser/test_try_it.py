"""The try-it box: two streams at once, stopped, refused, and hostile."""

import json
import re
from typing import Any

PROMPT = "Who are you?"
MARKUP = '<img src=x onerror="window.hurt=1"><script>window.hurt=2</script><b>&amp;</b>'


def ask(page: Any, first: str, second: str, tokens: int = 12) -> None:
    page.fill("#try-prompt", PROMPT)
    page.fill("#try-tokens", str(tokens))
    page.fill("#lane-1", first)
    page.fill("#lane-2", second)
    page.click("#try-run")


def figures(page: Any, number: int) -> dict[str, str]:
    lane = page.locator(".lane").nth(number - 1)
    names, values = lane.locator("dt").all_inner_texts(), lane.locator("dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def answer(page: Any, number: int) -> str:
    return page.locator(".answer").nth(number - 1).text_content()


def wait_until_done(page: Any) -> None:
    page.wait_for_selector("#try-stop:disabled")


def test_two_personas_side_by_side(page, served) -> None:
    assert page.input_value("#lane-1") != page.input_value("#lane-2")
    ask(page, "two", "tiny")
    wait_until_done(page)
    listed = served.http.get("/v1/adapters/two").json()
    for number, model in ((1, "two"), (2, "tiny")):
        messages = [{"role": "user", "content": PROMPT}]
        whole = served.post("/v1/chat/completions", model=model, messages=messages, max_tokens=12, temperature=0).json()
        assert answer(page, number) == whole["choices"][0]["message"]["content"]
        shown = figures(page, number)
        assert shown["Tokens"] == str(whole["usage"]["completion_tokens"])
        assert re.fullmatch(r"[\d.,]+ m?s", shown["First token"])
        assert re.fullmatch(r"[\d.,]+", shown["Tokens/s"])
    assert figures(page, 1)["Version"] == f"1 · {listed['digest'].removeprefix('sha256:')[:12]}"
    assert figures(page, 1)["Found in"] in ("disk", "host memory", "the pool")
    assert (figures(page, 2)["Version"], figures(page, 2)["Found in"]) == ("base", "the base")
    assert "12 tokens" in page.locator("#try-status").inner_text()


def test_stopping_stops_the_server_too(page, served, eventually) -> None:
    ask(page, "two", "tiny", 450)
    # Not wait_for_function: that is an eval, which the page's policy forbids.
    eventually(lambda: len(answer(page, 1)) > 3 and len(answer(page, 2)) > 3)
    page.click("#try-stop")
    wait_until_done(page)
    assert [figures(page, number)["End"] for number in (1, 2)] == ["stopped by you"] * 2
    served.calm_down()


def test_ctrl_enter_asks(page, eventually) -> None:
    page.fill("#lane-1", "tiny")
    page.fill("#lane-2", "two")
    page.fill("#try-tokens", "3")
    page.press("#try-prompt", "Control+Enter")
    eventually(lambda: [figures(page, number)["Tokens"] for number in (1, 2)] == ["3", "3"])


def test_a_refusal_is_shown_in_the_servers_words(page) -> None:
    ask(page, "twoo", "tiny")
    wait_until_done(page)
    problem = page.locator(".lane").first.locator(".problem")
    assert "'twoo' does not exist; did you mean two?" in problem.inner_text()
    assert page.locator(".lane").nth(1).locator(".problem").is_hidden()


def test_what_a_model_writes_stays_text(page) -> None:
    chunks = [{"choices": [{"index": 0, "delta": {"content": MARKUP[at : at + 5]}}]} for at in range(0, len(MARKUP), 5)]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(
        re.compile("chat/completions$"), lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    ask(page, "two", "tiny")
    wait_until_done(page)
    assert answer(page, 1) == answer(page, 2) == MARKUP
    assert page.locator(".answer *").count() == 0
    assert page.evaluate("window.hurt") is None


def test_an_error_in_the_middle_of_a_stream(page) -> None:
    first = {"choices": [{"index": 0, "delta": {"content": "Ahoy"}}]}
    error = {
        "error": {"message": f"the engine died {MARKUP}", "type": "server_error", "param": None, "code": "engine_dead"}
    }
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in (first, error)) + "data: [DONE]\n\n"
    page.route(
        re.compile("chat/completions$"), lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    ask(page, "two", "tiny")
    wait_until_done(page)
    assert answer(page, 1) == "Ahoy"
    assert page.locator(".problem").first.text_content() == f"The engine died {MARKUP}."
    assert page.locator(".problem *").count() == 0


def said(served, model: str) -> str:
    messages = [{"role": "user", "content": PROMPT}]
    answer = served.post("/v1/chat/completions", model=model, messages=messages, max_tokens=12, temperature=0)
    return str(answer.json()["choices"][0]["message"]["content"])


def test_weights_of_a_sum_are_sliders_and_what_is_typed(page, served, eventually) -> None:
    ask(page, "two", "two")
    wait_until_done(page)
    page.locator(".weights summary").first.click()
    page.get_by_label("Adapter to add to model 1").fill("one")
    page.get_by_label("Adapter to add to model 1").press("Enter")
    assert page.input_value("#lane-1") == "two+0.5*one"
    slider = page.get_by_label("Weight of one in model 1")
    for _ in range(30):
        slider.press("ArrowRight")
    assert page.input_value("#lane-1") == "two+2*one"
    assert page.locator(".weights code").first.inner_text() == "lorasrv compose NAME two 2*one"
    # The answer follows the weights, once they rest; the other model is not asked.
    eventually(lambda: answer(page, 1) == said(served, "two+2*one"))
    wait_until_done(page)
    assert answer(page, 2) == said(served, "two") != answer(page, 1)
    page.fill("#lane-1", "-3.5*three+two")
    assert page.get_by_label("Weight of three in model 1").input_value() == "-3.5"
    page.get_by_label("Leave three out of model 1").click()
    assert page.input_value("#lane-1") == "two"
    assert page.get_by_label("Leave two out of model 1").is_disabled()
    page.fill("#lane-1", "two+")
    assert page.locator(".lane").first.locator(".weights-row").count() == 0
