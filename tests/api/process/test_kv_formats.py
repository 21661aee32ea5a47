"""Pages of codes in a real server, through the real command line: with adapters, drafts and prefix hits."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from answers import error_of
from served import Served, serve

from sgmv_kernels.formats.kv_format import KV_FORMATS, CodesKV

CODES = [name for name, kv_format in KV_FORMATS.items() if isinstance(kv_format, CodesKV)]
PROMPT = list(range(20, 60))
KERNELS = ("--kernels", "numba", "--quantization", "int4")


def said(served: Served, model: str, prompt: Sequence[int] = PROMPT) -> tuple[str, dict[str, Any]]:
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    response = served.post("/v1/completions", **body)
    assert response.status_code == 200, error_of(response)
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]


# Keys of k8v4 are those of int8.
@pytest.mark.parametrize("name", ["k8v4", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_adapters_say_the_same_with_drafts_and_without(
    name: str, model: Path, adapter_dirs: dict[str, Path], tmp_path: Path
) -> None:
    flags = ("--model", model, "--served-model-name", "tiny", "--pool-bytes", "16MiB", *KERNELS)
    adapters, texts = {"mia": adapter_dirs["one"], "tom": adapter_dirs["two"]}, []
    for speculation in ("auto", "off"):
        options = ("--kv-cache-dtype", name, "--speculation", speculation)
        with serve(*flags, *options, store=tmp_path / speculation, adapters=adapters) as served:
            once = {model: said(served, model) for model in ("tiny", "mia", "tom")}
            again = {model: said(served, model) for model in ("tiny", "mia", "tom")}
            assert all(usage["prompt_tokens_details"]["cached_tokens"] == 32 for _, usage in again.values())
            drafted = sum(usage["lorasrv"].get("speculation", {}).get("drafted", 0) for _, usage in again.values())
            assert (drafted > 0) == (speculation == "auto")
            texts += [{model: text for model, (text, _) in some.items()} for some in (once, again)]
            assert served.http.get("/v1/models").json()["data"][0]["batch_invariant"]
    assert all(some == texts[0] for some in texts)
    assert len(set(texts[0].values())) == 3, "adapters change what is said"


def test_a_pool_of_one_size_has_pages_for_more_tokens(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORASRV_STORE", str(tmp_path))
    pages = {}
    for name in ("bfloat16", *CODES):
        monkeypatch.setenv("LORASRV_KV_CACHE_DTYPE", name)
        done = cli("doctor", "--pool-bytes", "256MiB", "--port", "0", "--json")
        memory = next(check["text"] for check in json.loads(done.out)["checks"] if check["name"] == "memory")
        pages[name] = int(memory.partition("(")[2].split()[0])
    assert pages["int8"] >= 1.85 * pages["bfloat16"] > 1000
    assert pages["k8v4"] >= 2.4 * pages["bfloat16"]


def test_an_unknown_format_is_one_line(refused: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    done = refused("serve", "--model", model, "--store", tmp_path / "store", "--kv-cache-dtype", "int3")
    assert done.code == 2
    assert all(name in done.errors[0] for name in ("int3", "auto", *KV_FORMATS))
