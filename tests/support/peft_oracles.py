"""PEFT's models of adapters that an engine serves, and of the base, to compare the engine's logits and answers with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft_adapters import peft_adapter
from served_logits import last_logits


class PeftOracles:
    """Adapters made by PEFT, one below `folder` for each name, and the models with them.

    Args:
        adapters: the configuration of each.
        common: defaults of all configurations.
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
        """Check that every token is the likeliest one after the preceding tokens."""
        with torch.no_grad():
            logits = self.models[name](torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits.argmax(-1).tolist(), name

    def answer(self, name: str | None, prompt: list[int], count: int) -> list[int]:
        """Return the likeliest tokens, one after another."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(last_logits(self.models[name], ids).argmax()))
        return ids[len(prompt) :]
