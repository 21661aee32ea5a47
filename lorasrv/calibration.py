"""What the float model computes on its way through a text: the second moments of every linear's inputs.

The text may be the model's own: then nothing is to be chosen, and it is of the kind that the model writes. Source of
that idea: LLM-QAT (Liu et al. 2023).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lorasrv.batch import build_batch
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.device_memory import DeviceMemory
from lorasrv.llm import LLM
from lorasrv.models.decoder import Decoder, DecoderLimits
from lorasrv.models.weights import LayerWeights, ModelWeights
from lorasrv.quant import Linear
from lorasrv.request import RequestId
from lorasrv.sampling import SamplingParams
from lorasrv.step import AdapterOrders, ScheduledRequest, SchedulerOutput
from sgmv_kernels.ops import Ops

NUM_TEXTS, TEXT_TOKENS = 32, 256
PAGE_SIZE = 16
MAX_MOMENT_BYTES = 2 << 30
CPU = torch.device("cpu")

Progress = Callable[[str, float], None]


def own_texts(model: str, progress: Progress) -> list[list[int]]:
    """What the model says, at temperature 1, after one token each; the same every time."""
    config = EngineConfig(ModelOptions(), MemoryOptions(pool_bytes=1 << 30))
    with LLM(model, config) as llm:
        draw = random.Random(0)
        first = [draw.randrange(llm.spec.vocab_size) for _ in range(NUM_TEXTS)]
        length = min(TEXT_TOKENS, llm.spec.max_position)
        said: list[list[int]] = []
        for begin in range(0, NUM_TEXTS, 8):
            some = range(begin, begin + 8)
            sampling = [
                SamplingParams(max_tokens=length - 1, temperature=1.0, seed=seed, ignore_eos=True) for seed in some
            ]
            done = llm.generate([[first[i]] for i in some], sampling)
            said += [[first[i], *answer.token_ids] for i, answer in zip(some, done, strict=True)]
            progress("the model writes what it is calibrated with", len(said) / NUM_TEXTS)
    return said


def cut(token_ids: Sequence[int]) -> list[list[int]]:
    """A long text as pieces of `TEXT_TOKENS`."""
    return [list(token_ids[i : i + TEXT_TOKENS]) for i in range(0, len(token_ids), TEXT_TOKENS)]


def moments_of_layers(
    weights: ModelWeights, texts: Sequence[Sequence[int]], ops: Ops
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Layer by layer, for each of its sites, [H, H] fp32: the sum of x xᵀ over all rows of all texts.

    As many layers at a time are watched as `MAX_MOMENT_BYTES` allow; each time the texts are read anew.
    """
    of_layer = sum(4 * site.in_features**2 for site in weights.spec.sites())
    at_once = max(1, MAX_MOMENT_BYTES // of_layer)
    for first in range(0, len(weights.layers), at_once):
        watched = range(first, min(first + at_once, len(weights.layers)))
        linears = {i: tuple(_Watched(linear) for linear in weights.layers[i].linears()) for i in watched}
        layers = tuple(_with(layer, linears.get(i)) for i, layer in enumerate(weights.layers))
        _read(replace(weights, layers=layers), texts, ops)
        for i in watched:
            yield i, tuple(linear.moments for linear in linears.pop(i))


class _Watched:
    """A linear that adds up what comes in. See `Linear`."""

    can_be_recorded = False

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.in_features, self.out_features, self.nbytes = linear.in_features, linear.out_features, linear.nbytes
        self.moments = torch.zeros(linear.in_features, linear.in_features)

    def __call__(self, x: Tensor) -> Tensor:
        self.moments.addmm_(x.T, x)
        return self._linear(x)

    def dequantize(self) -> Tensor:
        return self._linear.dequantize()


def _with(layer: LayerWeights, linears: tuple[_Watched, ...] | None) -> LayerWeights:
    if linears is None:
        return layer
    qkv, o, gate_up, down = linears
    return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)


def _read(weights: ModelWeights, texts: Sequence[Sequence[int]], ops: Ops) -> None:
    longest = max(map(len, texts))
    pages = -(-longest // PAGE_SIZE)
    memory = DeviceMemory(weights.spec, pages, PAGE_SIZE, torch.float32, CPU)
    decoder = Decoder(weights, memory, DecoderLimits(longest, longest, 1, torch.float32), ops)
    for text in texts:
        share = ScheduledRequest(
            RequestId("text"), tuple(text), 0, tuple(range(pages)), None, False, SamplingParams(), 0
        )
        decoder.forward(build_batch(SchedulerOutput((share,), {}, (), AdapterOrders(), 0), memory, torch.float32, ops))
