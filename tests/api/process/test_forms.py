"""Both forms of one adapter in a real server, through the real command line, and after a restart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from answers import error_of
from served import Served, serve

PROMPT = list(range(20, 60))


def ask(served: Served, model: str) -> tuple[str, dict[str, Any]]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = served.post("/v1/completions", **body).json()
    return answer["choices"][0]["text"], answer["usage"]


def test_they_share_nothing_and_survive_a_restart(
    cli: Callable[..., Any], flags, adapter_dirs: dict[str, Path], tmp_path: Path
) -> None:
    def shown(served: Served) -> Any:
        return json.loads(cli("show", "mia", "--server", served.url, "--json").out)

    folder, store = adapter_dirs["two"], tmp_path / "store"
    with serve(*flags, "--adapter-storage", "int8", store=store) as served:
        for form in (("--stored", "bf16"), ()):
            done = cli("upload", folder, "--id", "mia", "--server", served.url, *form)
            assert done.code == 0, done.err
        assert "stored as int8, which changes it by 0." in done.out
        assert [version["stored"] for version in shown(served)["versions"]] == ["bf16", "int8"]
        assert "\tint8\t" in cli("list", "--server", served.url).out
        plain, first = ask(served, "mia@1")
        again, second = ask(served, "mia@1")
        assert (plain, first["prompt_tokens_details"]["cached_tokens"]) == (again, 0)
        assert second["prompt_tokens_details"]["cached_tokens"] == 32
        assert second["lorasrv"]["speculation"]["drafted"] > 0, "the corpus has the first answer"
        coded, third = ask(served, "mia@2")
        assert third["prompt_tokens_details"]["cached_tokens"] == 0
        assert not third["lorasrv"]["speculation"].get("drafted")
        pool = served.http.get("/v1/pool").json()
        sizes = sorted(adapter["pages"] for adapter in pool["adapters"])
        assert len(sizes) == 2
        assert sizes[0] < sizes[1]
        before = shown(served)
    with serve(*flags, store=store) as served:
        assert shown(served)["versions"] == before["versions"]
        assert (ask(served, "mia@1")[0], ask(served, "mia")[0]) == (plain, coded)
        # The same content again, in the form that it has.
        done = cli("upload", folder, "--id", "mia", "--server", served.url, "--stored", "int8")
        assert "unchanged: mia@2" in done.out
        exported = cli("upload", folder, "--id", "mia", "--server", served.url, "--stored", "int4")
        assert (exported.code, exported.out) == (2, "")
        assert len(exported.err.splitlines()) == 1
        refused = served.post("/v1/adapters", id="mia", config={}, weights="sha256:" + "0" * 64, stored="int4")
        assert (refused.status_code, error_of(refused)["param"]) == (400, "stored")
