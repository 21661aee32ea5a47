"""Families behind the real command line, with an adapter on every linear: what transformers and PEFT say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import peft_adapter
from served import lorasrv, serve

from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource

pytestmark = pytest.mark.long
PROMPT = [10 + (7 * i) % 300 for i in range(50)]
NEW = 16


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mpt", {}),
        pytest.param("gemma", {}, marks=pytest.mark.exhaustive),
        pytest.param("gemma", {"num_key_value_heads": 4}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_answers_in_chunks_behind_a_cached_prefix_and_with_draft_trees(
    tiny_hf_checkpoints: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    folder = tiny_hf_checkpoints[family](**changes)
    adapted = peft_adapter(folder, tmp_path / "mia", r=6, strength=0.5)
    vocabulary = TokenizerJson((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer = Tokenizer.from_source(TokenizerSource(vocabulary, None, (2,), 1))
    common = ("--model", folder, "--served-model-name", "base", "--dtype", "float32", "--pool-bytes", "16MiB")
    steps = ("--max-num-batched-tokens", "12", "--max-num-seqs", "4", "--draft-trees", "--draft-layers", "1")
    with serve(*common, *steps, "--quantization", "none", adapters={"mia": tmp_path / "mia"}) as served:
        for prompt in (PROMPT, [*PROMPT[:40], 7, 8, 9], PROMPT):
            texts = {}
            for name in ("mia", "base"):
                body = {"model": name, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
                texts[name] = served.post("/v1/completions", **body).json()["choices"][0]["text"]
            assert texts["mia"] == tokenizer.decode(greedy(adapted, prompt))
            with adapted.disable_adapter():
                assert texts["base"] == tokenizer.decode(greedy(adapted, prompt))
            assert texts["mia"] != texts["base"]
    few = ("--quantization", "attn=int4,mlp=q3h", "--kv-cache-dtype", "int8")
    with serve(*common, *few, adapters={"mia": tmp_path / "mia"}) as served:
        done = lorasrv("verify", "mia", "--server", served.url)
        assert done.returncode == 0, done.stdout + done.stderr
