"""Two real processes, by the real command line: one computes prompts, the other answers; and one of them is killed."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import Served, serve

pytestmark = pytest.mark.slow
SECRET = "of-one-cluster"
PROMPT = [20 + (7 * number) % 300 for number in range(200)]
SENT = 192


def ask(served: Served, model: str, salt: str, peer: str = "") -> tuple[str, int | None]:
    """The text of an answer, and how many tokens of its prompt a peer has sent."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    headers = {"x-lorasrv-cluster": SECRET, "x-lorasrv-prefill": peer} if peer else {}
    answer = served.http.post("/v1/completions", json={**body, "cache_salt": salt}, headers=headers)
    assert answer.status_code == 200, answer.text
    sent = answer.json()["usage"]["lorasrv"].get("kv_transfer", {}).get("tokens")
    return answer.json()["choices"][0]["text"], sent


def unreached(decode: Served) -> float:
    """How many prompts were computed because a peer did not answer in time, or at all."""
    refused = 'lorasrv_peer_prompts_refused_total{reason="unreachable"}'
    return decode.figure(refused) + decode.figure(refused.replace("unreachable", "timeout"))


def handed(decode: Served, model: str, prefill: Served, text: str) -> None:
    """Ask until the pages come in time: a server that waits no longer for them answers the same."""
    for number in range(9):
        said, sent = ask(decode, model, f"handed {number}", prefill.url)
        assert said == text
        if sent == SENT:
            return
    raise AssertionError(decode.log)


def test_an_answer_over_two_processes(flags: Any, adapter_dirs: dict[str, Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    options = (*flags, "--cluster-secret-file", secret)
    adapters = {"mia": adapter_dirs["one"]}
    with (
        serve(*options, "--role", "decode", adapters=adapters) as decode,
        serve(*options, "--role", "prefill", adapters=adapters, ends=-signal.SIGKILL) as prefill,
    ):
        alone = {model: ask(decode, model, "alone") for model in ("tiny", "mia")}
        assert alone["tiny"][0] != alone["mia"][0]
        for model, (text, sent) in alone.items():
            assert sent is None
            handed(decode, model, prefill, text)
        assert decode.figure("lorasrv_peer_pages_received_total") == 2 * SENT / 16
        assert prefill.figure("lorasrv_peer_pages_sent_total") >= 2 * SENT / 16
        refused_before = unreached(decode)
        prefill.calm_down()
        # It hangs with the prompt, then it is gone.
        prefill.signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as waiting:
            answer = waiting.submit(ask, decode, "mia", "killed", prefill.url)
            decode.until(lambda: decode.figure("lorasrv_requests_waiting"))
            prefill.signal(signal.SIGKILL)
            assert answer.result(60) == (alone["mia"][0], 0)
        assert ask(decode, "tiny", "gone", prefill.url) == (alone["tiny"][0], 0)
        assert unreached(decode) == refused_before + 2
        assert "Traceback" not in decode.log
