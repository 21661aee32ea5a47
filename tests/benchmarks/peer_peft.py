"""Run PEFT as a server would have to: a batch of prompts with `adapter_names`, generated to its end, then the next.

Requests of a batch begin and end together. A stopping criterion that never stops records the time of each step;
so TTFT, TPOT and ITL mean what they mean for a stream.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from api.cli.bench.client import BenchRequest, RequestOutcome
from api.cli.bench.load import Load
from api.cli.bench.prompts import Ruler, counted_texts

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NO_ADAPTER = "__base__"


class StaticBatches:
    """One model in this process, with its adapters in memory."""

    def __init__(self, assets: Path, names: Sequence[str], dtype: str) -> None:
        base = assets / "base"
        self._tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype])
        for number, name in enumerate(names):
            folder = assets / "adapters" / name
            if number == 0:
                self._model = PeftModel.from_pretrained(self._model, folder, adapter_name=name)
            else:
                self._model.load_adapter(folder, adapter_name=name)
        # PEFT loads adapters in fp32 unless told otherwise.
        self._model.to(DTYPES[dtype]).eval()
        self._has_adapters = bool(names)

    def ruler(self) -> Ruler:
        return Ruler.of(*(len(self._tokenizer(text)["input_ids"]) for text in counted_texts()))

    def run(self, requests: Sequence[BenchRequest], batch: int) -> Load:
        """Generate the answers of all requests, `batch` at a time."""
        self._generate(requests[:1])
        load = Load(begun_s=time.perf_counter())
        for some in _batches(requests, batch):
            load.outcomes += self._generate(some)
        load.ended_s = time.perf_counter()
        return load

    def _generate(self, requests: Sequence[BenchRequest]) -> list[RequestOutcome]:
        wanted = requests[0].max_tokens
        sent_s, clock = time.perf_counter(), _Clock()
        inputs = self._tokenizer([request.prompt for request in requests], return_tensors="pt", padding=True)
        names = [request.model if request.has_adapter else NO_ADAPTER for request in requests]
        base_only = self._has_adapters and not any(request.has_adapter for request in requests)
        with torch.inference_mode(), self._model.disable_adapter() if base_only else nullcontext():
            made = self._model.generate(
                **inputs,
                **({"adapter_names": names} if self._has_adapters and not base_only else {}),
                max_new_tokens=wanted,
                min_new_tokens=wanted,
                do_sample=False,
                pad_token_id=self._tokenizer.pad_token_id,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        lengths = inputs["attention_mask"].sum(1).tolist()
        new = made.shape[1] - inputs["input_ids"].shape[1]
        return [
            _outcome(one, sent_s, clock.times_s, int(length), new)
            for one, length in zip(requests, lengths, strict=True)
        ]


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Records when each step was done."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _outcome(
    request: BenchRequest, sent_s: float, times_s: Iterable[float], prompt_tokens: int, new: int
) -> RequestOutcome:
    outcome = RequestOutcome(
        request.model, request.has_adapter, sent_s, list(times_s), time.perf_counter(), prompt_tokens
    )
    outcome.output_tokens = new
    if new != request.max_tokens:
        outcome.fail("wrong token count", f"{new} tokens instead of {request.max_tokens}")
    return outcome


def _batches(requests: Sequence[BenchRequest], size: int) -> Iterator[Sequence[BenchRequest]]:
    for begin in range(0, len(requests), size):
        yield requests[begin : begin + size]
