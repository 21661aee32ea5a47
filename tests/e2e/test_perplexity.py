"""What formats of the base cost: perplexity of the built-in model on a committed public-domain text."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorasrv.batch import build_batch
from lorasrv.device_memory import DeviceMemory
from lorasrv.loaders import open_checkpoint
from lorasrv.models.decoder import Decoder, DecoderLimits
from lorasrv.models.weights import ModelWeights, load_weights
from lorasrv.quant import get_format
from lorasrv.quant.int4 import Int4Format
from lorasrv.request import RequestId, SamplingParams
from lorasrv.step import ScheduledRequest, SchedulerOutput
from lorasrv.tokenizer import Tokenizer
from sgmv_kernels.ops import INT4_LEVELS, GroupCodes, Ops

TEXT = Path(__file__).parents[1] / "lorasrv" / "data" / "devils_dictionary.txt"
CHUNK, CHUNKS, PAGE_SIZE = 512, 40, 16
CPU = torch.device("cpu")


def perplexity(quantization: str, dtype: torch.dtype = torch.float32, group: int | None = None) -> tuple[float, int]:
    """exp of the mean negative log likelihood over 40 chunks of 512 tokens, each from its own beginning; the bytes."""
    checkpoint = open_checkpoint("smollm2-135m")
    ids = Tokenizer.from_source(checkpoint.tokenizer_source()).encode(TEXT.read_text(), add_special_tokens=False)
    ops = Ops(CPU)
    weights = load_weights(checkpoint, get_format(quantization, ops, group), dtype)
    return _perplexity(weights, ids, ops), weights.nbytes


def _perplexity(weights: ModelWeights, ids: list[int], ops: Ops) -> float:
    pages = CHUNK // PAGE_SIZE
    memory = DeviceMemory(weights.spec, pages, PAGE_SIZE, torch.float32, CPU)
    decoder = Decoder(weights, memory, DecoderLimits(CHUNK, CHUNK, CHUNK, torch.float32), ops)
    total = 0.0
    for i in range(CHUNKS):
        chunk = ids[i * CHUNK : (i + 1) * CHUNK]
        share = ScheduledRequest(RequestId("p"), tuple(chunk), 0, tuple(range(pages)), None, True, SamplingParams(), 0)
        batch = build_batch(SchedulerOutput((share,), {}, (), (), 0), memory, torch.float32, ops)
        tables = replace(batch.tables, sample_rows=torch.arange(CHUNK - 1))
        logits = decoder.forward(replace(batch, tables=tables))
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(chunk[1:]), reduction="sum"))
    return math.exp(total / (CHUNKS * (CHUNK - 1)))


def three_bit_weights() -> float:
    """Perplexity of plain 3-bit groups of 64 between smallest and largest: what q3h must beat."""
    checkpoint = open_checkpoint("smollm2-135m")
    ids = Tokenizer.from_source(checkpoint.tokenizer_source()).encode(TEXT.read_text(), add_special_tokens=False)
    ops = Ops(CPU)

    class ThreeBit(Int4Format):
        """int4 that uses eight of its sixteen levels, one range a group."""

        def round(self, weight: Tensor) -> GroupCodes:
            groups = weight.float().view(len(weight), -1, self.group)
            low = groups.amin(-1, keepdim=True).half()
            step = ((groups.amax(-1, keepdim=True) - low.float()) / 7).clamp_min(1e-7).half()
            codes = ((groups - low.float()) / step.float()).round().clamp(0, 7).to(torch.uint8)
            return GroupCodes(codes.view(weight.shape), step[..., 0], low[..., 0], INT4_LEVELS)

    weights = load_weights(checkpoint, ThreeBit(ops, 64), torch.float32)
    return _perplexity(weights, ids, ops)


@pytest.mark.long
def test_what_each_format_costs(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "none": perplexity("none"),
        "none, bf16": perplexity("none", torch.bfloat16),
        "int8": perplexity("int8"),
        "int4, the file's": perplexity("int4"),
        "int4, group 64": perplexity("int4", group=64),
        "q3h": perplexity("q3h"),
    }
    three = three_bit_weights()
    exact = found["none"][0]
    with capsys.disabled():
        print(f"\nperplexity over {CHUNK * CHUNKS} tokens; plain 3 bits {three:.3f} ({three / exact - 1:+.2%})")
        for name, (value, nbytes) in found.items():
            print(f"| {name} | {value:.3f} | {value / exact - 1:+.2%} | {nbytes / 1e6:.0f} |")
    cost = {name: value / exact for name, (value, _) in found.items()}
    assert cost["int8"] <= 1.02
    assert cost["int8"] != 1.0, "int8 was not used"
    assert cost["int4, the file's"] <= 1.02, "only activations are rounded"
    assert cost["int4, group 64"] < cost["q3h"] < three / exact


@pytest.mark.long
@pytest.mark.xfail(reason="27 % over 3,072 tokens: the file's 4-bit weights are rounded again, by ranges alone")
def test_four_bits_in_groups_of_64_cost_at_most_six_percent() -> None:
    assert perplexity("int4", group=64)[0] <= 1.06 * perplexity("none")[0]
