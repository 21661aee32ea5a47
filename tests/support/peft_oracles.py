"""PEFT's models of adapters that an engine serves, and the base: what its logits and answers are compared with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft_adapters import peft_adapter
from served_logits import last_logits


class PeftOracles:
    """Adapters made by PEFT, one below `folder` for each name, and the models that have them.

    Args:
        adapters: the configuration of each.
        common: what all have that do not say otherwise.
    """

    def __init__(self, directory: Path, folder: Path, adapters: Mapping[str, dict[str, Any]], **common: Any) -> None:
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.models: dict[str | None, torch.nn.Module] = {None: base.eval()}
        self.folders = {name: folder / name for name in adapters}
        for i, (name, config) in enumerate(adapters.items()):
            self.models[name] = peft_adapter(directory, self.folders[name], seed=i, **common | config)

    def check(self, name: str | None, got: torch.Tensor, prompt: list[int]) -> None:
        want = last_logits(self.models[name], prompt)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=lambda text: f"{name}: {text}")

    def check_answer(self, name: str | None, prompt: list[int], answer: list[int]) -> None:
        """Every token is the likeliest behind those before it."""
        with torch.no_grad():
            logits = self.models[name](torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits.argmax(-1).tolist(), name

    def answer(self, name: str | None, prompt: list[int], count: int) -> list[int]:
        """The likeliest tokens, one after the other."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(last_logits(self.models[name], ids).argmax()))
        return ids[len(prompt) :]
