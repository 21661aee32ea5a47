"""Policies over keys and values in a real server, through the real command line."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from answers import refused
from served import Served, serve

PROMPT = [20 + (7 * i + i * i % 31) % 300 for i in range(150)]
WINDOW = {"kind": "window", "recent": 60 + 4, "sink": 9}
FULL_ROWS = 16 + 64 + 16
SELECT = {"kind": "select", "budget": 128, "recent": 64, "every": 32}


def said(served: Served, model: str, policy: Any = None, prompt: list[int] = PROMPT, **more: Any) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    response = served.post("/v1/completions", **body | more, **({} if policy is None else {"kv_policy": policy}))
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0], answer["usage"]["lorasrv"].get("kv")


def test_answers_tell_how_far_they_are_those_of_full_attention(
    model: Path, adapter_dirs: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--model", model, "--served-model-name", "tiny", "--kernels", "numba", "--quantization", "int4")
    # 60 pages: of the storm, requests wait and are preempted.
    pool = ("--pool-bytes", 60 * 3 * 2 * 2 * 16 * 16 * 4, "--max-num-batched-tokens", 64, "--max-num-seqs", 32)
    adapters = {"mia": adapter_dirs["one"], "tom": adapter_dirs["two"]}
    with serve(*flags, *pool, store=tmp_path / "store", adapters=adapters) as served:
        short = PROMPT[:70]
        for name in ("tiny", "mia"):
            full, told = said(served, name, prompt=short)
            assert told is None
            answer, told = said(served, name, WINDOW, short)
            exact = FULL_ROWS - len(short) + 1
            assert told == {
                "kind": "window",
                "sink": 16,
                "recent": 64,
                "kept_tokens": 129 - 48,
                "dropped_tokens": 48,
                "exact_tokens": exact,
            }
            pairs = [(some["logprobs"]["tokens"], some["logprobs"]["token_logprobs"]) for some in (answer, full)]
            assert [part[:exact] for part in pairs[0]] == [part[:exact] for part in pairs[1]]
            assert pairs[0][1] != pairs[1][1]
        each = [(name, kind) for name in ("tiny", "mia", "tom") for kind in ("window", "select")]
        policies = {"window": WINDOW, "select": SELECT}
        alone = {(name, kind): said(served, name, policies[kind]) for name, kind in each}
        # The first token of `select` comes of the prompt's last one, which sees everything.
        assert [alone["mia", kind][1]["exact_tokens"] for kind in policies] == [0, 1]
        assert alone["mia", "window"][0] != alone["mia", "select"][0] != said(served, "mia")[0]
        with ThreadPoolExecutor(12) as threads:
            storm = list(threads.map(lambda one: (one, said(served, one[0], policies[one[1]])), each * 3))
        assert all(found == alone[one] for one, found in storm)
        body = {"model": "mia", "prompt": PROMPT, "max_tokens": 9}
        for policy, param, says in (
            ({"kind": "window", "recent": 63}, "kv_policy.recent", "at least 64 tokens"),
            ({"kind": "window", "recent": 64, "sink": 0}, "kv_policy*", ""),
            ({"kind": "window", "recent": 64, "keep": 1}, "kv_policy*", ""),
            ({"kind": "select", "budget": 64}, "kv_policy.budget", "at least 176 tokens"),
        ):
            refused(served.post("/v1/completions", **body, kv_policy=policy), 400, param, says)
        for largest in (
            {"kind": "window", "recent": 2**31 - 1, "sink": 2**31 - 1},
            {"kind": "select", "budget": 2**31 - 1, "every": 2**31 - 1},
        ):
            assert said(served, "mia", largest, max_tokens=9)[1]["dropped_tokens"] == 0
        for more in ({"prompt_logprobs": 1}, {"use_beam_search": True, "best_of": 2}):
            refused(served.post("/v1/completions", **body, **more, kv_policy=WINDOW), 400, "kv_policy", "leave one")
        drafted = served.post("/v1/completions", **body, kv_policy=SELECT).json()["usage"]["lorasrv"]["speculation"]
        assert (drafted["drafted"], drafted["not_drafted"]) == (0, "kv_policy select")
        choices = served.post("/v1/completions", **body, n=3, seed=4, kv_policy=WINDOW).json()
        assert len(choices["choices"]) == 3
        served.calm_down()
