"""A tiny engine whose logits are compared with PEFT's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import engine_config

from lorasrv.llm import LLM
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.model_runner import ModelRunner


class ServedLogits:
    """An engine that keeps the logits of every sampled row."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        config = engine_config(directory, **{"kernels": "numba", "pool_bytes": 16 << 20, **options})
        self.llm = LLM(str(directory), config)
        self.close = self.llm.close
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.batches: list[int] = []
        self.greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        sample = ModelRunner._sampled

        def recorded(runner: ModelRunner, step: Any, logits: Any, sampled: Any, *others: Any) -> Any:
            self.batches.append(len({s.adapter_key for s in sampled}))
            counts = [request.num_logit_rows for request in sampled]
            for rows, request in zip(logits[: sum(counts)].split(counts), sampled, strict=True):
                self.rows.setdefault(request.request_id, []).append(rows[-1].clone())
            return sample(runner, step, logits, sampled, *others)

        monkeypatch.setattr(ModelRunner, "_sampled", recorded)

    def first_logits(self, prompts: list[list[int]], adapters: list[str | None]) -> list[torch.Tensor]:
        """Return the logits of the token after each prompt; all prompts are sent at once."""
        self.rows.clear()
        self.llm.generate(prompts, self.greedy, adapters)
        self.llm.engine.check_integrity()
        in_order = sorted(self.rows, key=lambda request_id: int(request_id.rpartition("-")[2]))
        return [self.rows[request_id][0] for request_id in in_order]


def last_logits(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1]
    return found
