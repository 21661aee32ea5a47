"""The pictures of docs/console.md: the built-in base, three personas, and traffic on them, in headless Chromium.

PYTHONPATH=tests/support:build/browser .venv/bin/python tests/browser/take_screenshots.py [SECONDS of traffic before]
"""

import io
import random
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from chromium import chromium
from PIL import Image
from served import Served, serve

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PERSONAS = ROOT / "examples" / "persona_bots"
WIDTH, HEIGHT = 1440, 1000
PHONE = {"width": 390, "height": 844}
QUESTIONS = ("Who are you?", "What is the sea?", "Tell me about your day.", "How do I fix a bicycle?", "Write a poem.")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
    listed = tomllib.loads((PERSONAS / "personas.toml").read_text("utf-8"))["persona"]
    adapters = {persona["id"]: PERSONAS / persona["adapter"] for persona in listed}
    IMAGES.mkdir(exist_ok=True)
    with serve("--pool-bytes", "192MiB", adapters=adapters) as served, chromium() as browser:
        served.http.patch(f"/v1/adapters/{min(adapters)}", json={"pinned": True, "aliases": {"prod": 1}})
        stop = threading.Event()
        asker = threading.Thread(target=traffic, args=(served, list(adapters), stop))
        asker.start()
        try:
            pages = {theme: console(browser, served, theme) for theme in ("dark", "light")}
            time.sleep(seconds)
            for theme, page in pages.items():
                ask(page)
                keep(page.screenshot(full_page=theme == "light"), f"console-{theme}.png")
            pages["dark"].set_viewport_size(PHONE)
            pages["dark"].wait_for_timeout(500)
            keep(pages["dark"].screenshot(), "console-phone.png")
        finally:
            stop.set()
            asker.join()


def console(browser: Any, served: Served, theme: str) -> Any:
    page = browser.new_page(color_scheme=theme, viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(f"{served.url}/console")
    page.wait_for_selector("#state[data-state=live]")
    return page


def keep(picture: bytes, name: str) -> None:
    """As a PNG of few colours: a quarter of the bytes, and nobody sees it."""
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            IMAGES / name, optimize=True
        )


def ask(page: Any) -> None:
    """Two personas, until both have said something."""
    page.click("#try-run")
    for answer in (1, 2):
        page.wait_for_selector(f".lane:nth-child({answer}) .answer:not(:empty)")
    page.wait_for_selector("#try-stop:disabled", timeout=60_000)


def traffic(served: Served, models: list[str], stop: threading.Event) -> None:
    """Requests that come and go, a few at a time, on all models."""
    dice = random.Random(1)

    def one(model: str, question: str, tokens: int) -> None:
        messages = [{"role": "user", "content": question}]
        served.post(
            "/v1/chat/completions", model=model, messages=messages, max_tokens=tokens, temperature=0.9, min_tokens=40
        )

    while not stop.is_set():
        threads = [
            threading.Thread(target=one, args=(dice.choice(models), dice.choice(QUESTIONS), dice.randint(40, 160)))
            for _ in range(dice.randint(1, 5))
        ]
        for thread in threads:
            thread.start()
            stop.wait(dice.uniform(0.1, 2.0))
        for thread in threads:
            thread.join()
        stop.wait(dice.choice([0, 0, 1, 6]))


if __name__ == "__main__":
    main()
