"""What int8 costs: perplexity of the built-in base on a committed public-domain text, int8 against none."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorasrv.batch import build_batch
from lorasrv.device_memory import DeviceMemory
from lorasrv.loaders import open_checkpoint
from lorasrv.models.decoder import Decoder, DecoderLimits
from lorasrv.models.weights import load_weights
from lorasrv.quant import get_format
from lorasrv.request import RequestId, SamplingParams
from lorasrv.step import ScheduledRequest, SchedulerOutput
from lorasrv.tokenizer import Tokenizer
from sgmv_kernels.ops import Ops

TEXT = Path(__file__).parents[1] / "lorasrv" / "data" / "devils_dictionary.txt"
CHUNK, CHUNKS, PAGE_SIZE = 512, 40, 16
CPU = torch.device("cpu")


def perplexity(quantization: str, dtype: torch.dtype) -> float:
    """exp of the mean negative log likelihood over 40 chunks of 512 tokens, each predicted from its own beginning."""
    checkpoint = open_checkpoint("smollm2-135m")
    ids = Tokenizer.from_source(checkpoint.tokenizer_source()).encode(TEXT.read_text(), add_special_tokens=False)
    weights = load_weights(checkpoint, get_format(quantization), dtype)
    pages = CHUNK // PAGE_SIZE
    memory = DeviceMemory(checkpoint.spec, pages, PAGE_SIZE, torch.float32, CPU)
    ops = Ops(CPU)
    decoder = Decoder(weights, memory, CHUNK, ops)
    total = 0.0
    for i in range(CHUNKS):
        chunk = ids[i * CHUNK : (i + 1) * CHUNK]
        share = ScheduledRequest(RequestId("p"), tuple(chunk), 0, tuple(range(pages)), None, True, SamplingParams(), 0)
        batch = build_batch(SchedulerOutput((share,), {}, (), (), 0), memory, torch.float32, ops)
        logits = decoder.forward(replace(batch, sample_rows=torch.arange(CHUNK - 1)))
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(chunk[1:]), reduction="sum"))
    return math.exp(total / (CHUNKS * (CHUNK - 1)))


@pytest.mark.long
def test_int8_costs_at_most_two_percent(capsys: pytest.CaptureFixture[str]) -> None:
    exact = perplexity("none", torch.float32)
    int8 = perplexity("int8", torch.bfloat16)
    with capsys.disabled():
        print(f"\nperplexity over {CHUNK * CHUNKS} tokens: none {exact:.4f}, int8 {int8:.4f} ({int8 / exact - 1:+.2%})")
    assert int8 <= 1.02 * exact
    assert int8 != exact, "int8 was not used"
