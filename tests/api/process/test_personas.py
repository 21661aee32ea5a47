"""Personas in a real server, by the real command line: restarts, rollback, archives, pages of the prefix cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from served import Served, serve

SYSTEM = "You are Mia, who keeps a lighthouse on a cold coast and has a word for every ship that passes it by."
DEFAULTS = {"system": SYSTEM, "temperature": 0, "max_tokens": 12, "stop": ["zzz"]}
USER = {"role": "user", "content": "Who are you?"}


def chat(served: Served, model: str = "mia", **fields: Any) -> tuple[str, dict[str, Any]]:
    answer = served.post("/v1/chat/completions", model=model, **{"messages": [USER], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_persona_lives_as_an_adapter_does(
    cli: Callable[..., Any], flags, adapter_dirs: dict[str, Path], tmp_path: Path
) -> None:
    def command(served: Served, *words: object) -> str:
        done = cli(*words, "--server", served.url)
        assert done.code == 0, done.err
        return str(done.out)

    store, file = tmp_path / "store", tmp_path / "mia.json"
    file.write_text(json.dumps(DEFAULTS))
    with serve(*flags, store=store) as served:
        assert "defaults " in command(served, "upload", adapter_dirs["two"], "--id", "mia", "--defaults", file)
        text, usage = chat(served)
        told = usage["lorasrv"]["persona"]
        assert (told["version"], told["applied"]) == (1, ["system", "max_tokens", "temperature", "stop"])
        assert (cached(usage), usage["prompt_tokens"] > 64) == (0, True)
        again, usage = chat(served)
        assert (again, cached(usage) >= 48) == (text, True)
        # What a client writes itself gets the same tokens and the same answer, but none of those pages.
        spelled = [{"role": "system", "content": SYSTEM}, USER]
        for fields in ({"use_defaults": False}, {}):
            same, usage = chat(served, messages=spelled, temperature=0, max_tokens=12, **fields)
            assert same == text
            assert (cached(usage) > 0) == (not fields)
        bare, _ = chat(served, use_defaults=False, temperature=0, max_tokens=12)
        assert bare != text
        # Another prompt for the same weights: one adapter in the pool, two versions.
        file.write_text(json.dumps({**DEFAULTS, "system": "You are stern."}))
        assert "mia@2" in command(served, "defaults", "mia", file)
        stern, usage = chat(served)
        assert (stern != text, usage["lorasrv"]["persona"]["version"]) == (True, 2)
        assert len(served.http.get("/v1/pool").json()["adapters"]) == 1
        command(served, "rollback", "mia")
        assert chat(served)[0] == text
        command(served, "defaults", "muse", file, "--new")
        muse, usage = chat(served, "muse")
        assert (usage["lorasrv"]["adapter_tier"], usage["lorasrv"]["adapter_digest"]) == (None, None)
        exported = command(served, "defaults", "mia")
        stats = json.loads(command(served, "show", "muse", "--json"))["stats"]
        assert (stats["requests"], stats["versions"][0]["digest"]) == (1, None)
    with serve(*flags, store=store) as served:
        assert chat(served)[0] == text
        assert chat(served)[1]["lorasrv"]["persona"] == told
        assert chat(served, "muse")[0] == muse
    archive, new = tmp_path / "backup.tar", tmp_path / "new"
    assert cli("store", "export", archive, "--store", store).code == 0
    done = cli("store", "import", archive, "--store", new, "--model", flags[1])
    assert done.code == 0, done.err
    assert not cli("store", "fsck", "--store", new).code
    with serve(*flags, store=new) as served:
        assert command(served, "defaults", "mia") == exported
        assert (chat(served)[0], chat(served, "mia@2")[0], chat(served, "muse")[0]) == (text, stern, muse)
