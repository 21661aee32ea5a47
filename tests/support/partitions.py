"""Comparison of one replica in several ranks with one process: the same tokens, and the same logits to the bit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rank_threads import ThreadLauncher
from tiny_engine import GREEDY, LONG, engine_config

from lorasrv.config import PartitionOptions
from lorasrv.distributed import model_processes
from lorasrv.llm import LLM
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.model_runner import ModelRunner

ONE = PartitionOptions()
THREE_HEADS: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
"""Changes of a tiny configuration: heads for three ranks; two ranks have [2, 1] of them."""
SHORT = replace(GREEDY, max_tokens=6)
PROMPTS = [LONG[:45], LONG[:20], LONG[5:33]]


def ranks(text: str, tp_exchange: str = "columns") -> PartitionOptions:
    """Return the options that "0&1;2" or "cp=2" describe."""
    name, _, count = text.partition("=")
    options: dict[str, Any] = {name: int(count)} if count else {"partition": text, "tp_exchange": tp_exchange}
    return PartitionOptions(**options)


@dataclass
class Told:
    """The output of an engine: tokens by request, and the logits of every pass."""

    tokens: list[Sequence[int]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@contextmanager
def replica(model: Path, options: PartitionOptions, **engine: Any) -> Iterator[LLM]:
    """Start an engine of a tiny model whose ranks are threads."""
    config = engine_config(model, **{"quantization": "int8", "kernels": "numba"} | engine)
    threads = torch.get_num_threads()
    # Ranks that wait for each other would also wait for each other's teams.
    torch.set_num_threads(1)
    try:
        with (
            patch.object(model_processes, "ProcessLauncher", ThreadLauncher),
            LLM(str(model), replace(config, partition=options)) as llm,
        ):
            yield llm
    finally:
        torch.set_num_threads(threads)


@contextmanager
def told_logits(told: Told) -> Iterator[None]:
    """Keep the logits of every pass of engines in the `with` block."""
    compute = ModelRunner._logits

    def kept(runner: ModelRunner, step: Any, last: Any) -> Any:
        found = compute(runner, step, last)
        told.logits.append(found[0].clone())
        return found

    with patch.object(ModelRunner, "_logits", kept):
        yield


def answers(
    model: Path,
    options: PartitionOptions,
    adapters: Mapping[str, Path] | None = None,
    asked: Sequence[str | None] = (None, None, None),
    sampling: SamplingParams = SHORT,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    then: Callable[[LLM], object] = lambda llm: None,
    before: Callable[[LLM], object] = lambda llm: None,
    **engine: Any,
) -> Told:
    """Return a replica's answers to the prompts.

    Args:
        then, before: called with the engine, after and before the requests.
    """
    told = Told()
    with replica(model, options, **engine) as llm, told_logits(told):
        before(llm)
        for name, folder in (adapters or {}).items():
            llm.add_adapter(name, folder)
        told.tokens = [answer.token_ids for answer in llm.generate(prompts, sampling, asked)]
        llm.engine.check_integrity()
        then(llm)
    return told


def assert_same(told: Told, alone: Told) -> None:
    """Check that tokens are the same, and logits the same to the bit."""
    assert told.tokens == alone.tokens
    assert len(told.logits) == len(alone.logits)
    assert all(map(torch.equal, told.logits, alone.logits))
