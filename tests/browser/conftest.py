"""A real server on a tiny model, and headless Chromium in front of it. Without Chromium or Playwright all is skipped.

`make test-browser` installs Playwright beside the environment, and axe-core where npm is; Chromium is the system's
(Debian: `apt-get install chromium`).
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, chromium
from served import Served, serve
from tiny_checkpoints import adapter_dirs, model, tiny_hf_checkpoints  # noqa: F401

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
NUM_COPIES = 60


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser brings it")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not there: apt-get install chromium")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def served(
    browser: Any,
    model: Path,  # noqa: F811
    adapter_dirs: dict[str, Path],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """`tiny` with three adapters and sixty ids more of one content."""
    folder = tmp_path_factory.mktemp("console") / "tiny"
    shutil.copytree(model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    flags = ("--model", folder, "--served-model-name", "tiny", "--pool-bytes", "16MiB", "--kernels", "torch")
    with serve(*flags, adapters=adapter_dirs) as served:
        weights = (adapter_dirs["one"] / "adapter_model.safetensors").read_bytes()
        digest = f"sha256:{hashlib.sha256(weights).hexdigest()}"
        named = json.loads((adapter_dirs["one"] / "adapter_config.json").read_text())
        assert served.http.put(f"/v1/blobs/{digest}", content=weights).is_success
        for number in range(NUM_COPIES):
            body = {"id": f"copy-{number:02}", "config": named, "weights": digest}
            assert served.http.post("/v1/adapters", json=body).is_success
        yield served


@pytest.fixture
def open_page(browser: Any, served: Served) -> Iterator[Callable[..., Any]]:
    """open_page(**options of the context) -> the console in a tab of its own, when it shows figures.

    At the end nothing may have been asked of another host, no script may have failed, and no policy been hurt.
    """
    contexts, said, asked = [], [], []

    def open_(
        *, path: str = "/console", live: bool = True, prepare: Callable[[Any], None] | None = None, **options: Any
    ):
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        if prepare is not None:
            prepare(page)
        page.goto(f"{served.url}{path}")
        if live:
            page.wait_for_selector("#state[data-state=live]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith(f"{served.url}/")] == []
    # A refused request is logged as one; that is no mistake of the page.
    assert [text for text in said if not text.startswith("Failed to load resource")] == []


@pytest.fixture
def eventually(served: Served) -> Callable[..., None]:
    """eventually(condition): waits until it is true."""
    return served.until


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    return open_page()
