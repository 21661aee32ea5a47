"""The pictures of docs/console.md: the built-in base with the default pool, three personas and 21 random adapters, and
conversations with all of them, in headless Chromium.

PYTHONPATH=tests/support:build/browser .venv/bin/python tests/browser/take_screenshots.py [SECONDS of traffic before]
"""

import io
import random
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from chromium import chromium
from PIL import Image
from served import Served, serve

from adapter_store.store import AdapterStore
from lorasrv.config import BUILTIN_MODEL
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.offline.planner.random_adapters import write_random_adapter

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PERSONAS = ROOT / "examples" / "persona_bots"
WIDTH, HEIGHT = 1440, 1000
PHONE = {"width": 390, "height": 844}
TENANTS = [f"tenant-{number:02}" for number in range(1, 22)]
CONVERSATIONS = 10
QUESTIONS = ("Who are you?", "What is the sea?", "Tell me about your day.", "How do I fix a bicycle?", "Write a poem.")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
    listed = tomllib.loads((PERSONAS / "personas.toml").read_text("utf-8"))["persona"]
    adapters = {persona["id"]: PERSONAS / persona["adapter"] for persona in listed}
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        store = fill(Path(folder) / "store")
        with serve(adapters=adapters, store=store) as served, load(served, [*adapters, *TENANTS]):
            served.http.patch(f"/v1/adapters/{min(adapters)}", json={"pinned": True, "aliases": {"prod": 1}})
            pages = {theme: console(browser, served, theme) for theme in ("dark", "light")}
            time.sleep(seconds)
            for theme, page in pages.items():
                ask(page)
                keep(page.screenshot(full_page=theme == "light"), f"console-{theme}.png")
            phone = pages["dark"]
            phone.set_viewport_size(PHONE)
            for top, name in (("document.body", "phone"), ("document.getElementById('adapters')", "phone-adapters")):
                phone.evaluate(f"{top}.scrollIntoView()")
                phone.wait_for_timeout(2500)
                keep(phone.screenshot(), f"console-{name}.png")


def fill(folder: Path) -> Path:
    """A store with random adapters of several ranks beside the personas."""
    with closing(open_checkpoint(BUILTIN_MODEL)) as checkpoint:
        shapes = base_shapes(checkpoint.spec, checkpoint.name)
    with AdapterStore(folder, shapes) as store:
        for number, name in enumerate(TENANTS):
            write_random_adapter(store, name, (4, 8, 16, 32)[number % 4], number)
    return folder


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


@contextmanager
def load(served: Served, models: list[str]) -> Iterator[None]:
    """Keep a few conversations going, on all models, the first ones most often."""
    stop = threading.Event()
    served.http.timeout = 600

    def converse(seed: int) -> None:
        dice = random.Random(seed)
        weights = [1 / rank for rank in range(1, len(models) + 1)]
        while not stop.wait(dice.choice([0.0, 0.0, 0.5, 3.0])):
            [model] = dice.choices(models, weights)
            messages = [{"role": "user", "content": dice.choice(QUESTIONS)}]
            tokens = dice.randint(40, 160)
            served.post(
                "/v1/chat/completions",
                model=model,
                messages=messages,
                max_tokens=tokens,
                temperature=0.9,
                min_tokens=40,
            )

    threads = [threading.Thread(target=converse, args=(seed,)) for seed in range(CONVERSATIONS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
