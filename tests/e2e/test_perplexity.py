"""What formats of the base cost: perplexity of the built-in model on a committed public-domain text."""

import importlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from whole_files import FILES, GGUF_FILES, write_file, write_gguf_file

from lorasrv.config import ModelOptions
from lorasrv.llm import LLM
from lorasrv.models.loader import Checkpoint, open_checkpoint
from lorasrv.models.loader.locate import builtin_file
from lorasrv.models.quantization import get_format
from lorasrv.models.quantization.grouped import Int4Format
from lorasrv.models.quantization.rounding import byte_table
from lorasrv.models.quantization.tables import Nf4Format, TableFormat
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import ScheduledRequest, SchedulerOutput
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.base_format import choose_format
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.weights import ModelWeights, load_weights
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.weight_codes import INT4_LEVELS
from sgmv_kernels.ops import Ops

TEXT = Path(__file__).parents[1] / "lorasrv" / "data" / "devils_dictionary.txt"
CHUNK, PAGE_SIZE = 512, 16
CHUNKS = int(os.environ.get("LORASRV_TEST_CHUNKS", "12"))
CPU = torch.device("cpu")
PERSONA_BOTS = Path(__file__).parents[2] / "examples" / "persona_bots"
BUILTIN = "GGUF, Q4_1 (built in)"


def perplexity(options: ModelOptions, dtype: torch.dtype = torch.float32, chunks: int = CHUNKS) -> tuple[float, int]:
    """exp of the mean negative log likelihood over chunks of 512 tokens, each from its own beginning; the bytes."""
    with closing(open_checkpoint("smollm2-135m", quantized_weights=options.quantized_weights)) as checkpoint:
        ops = Ops(CPU)
        weights = load_weights(checkpoint, choose_format(options, checkpoint, ops), dtype)
        return _perplexity(weights, _text(checkpoint), ops, chunks), weights.nbytes


def _text(checkpoint: Checkpoint) -> list[int]:
    return Tokenizer.from_source(checkpoint.tokenizer_source()).encode(TEXT.read_text(), add_special_tokens=False)


def _perplexity(weights: ModelWeights, ids: list[int], ops: Ops, chunks: int = CHUNKS) -> float:
    total = 0.0
    for i, logits in enumerate(_logits(weights, ids, ops, chunks)):
        chunk = ids[i * CHUNK : (i + 1) * CHUNK]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(chunk[1:]), reduction="sum"))
    return math.exp(total / (chunks * (CHUNK - 1)))


def _logits(
    weights: ModelWeights, ids: list[int], ops: Ops, chunks: int, kv_format: str = "float32"
) -> Iterator[Tensor]:
    """Yield the logits [CHUNK - 1, V] of each chunk, valid until the next."""
    pages = CHUNK // PAGE_SIZE
    memory = DevicePool(weights.spec, pages, PAGE_SIZE, KV_FORMATS[kv_format], CPU)
    decoder = Decoder(weights, memory, DecoderLimits(CHUNK, CHUNK, CHUNK, torch.float32), ops)
    for i in range(chunks):
        chunk = ids[i * CHUNK : (i + 1) * CHUNK]
        share = ScheduledRequest(RequestId("p"), tuple(chunk), 0, tuple(range(pages)), None, True, SamplingParams(), 0)
        batch = build_batch(SchedulerOutput((share,), {}, (), (), 0), memory, torch.float32, ops)
        tables = replace(batch.tables, sample_rows=torch.arange(CHUNK - 1))
        yield decoder.forward(replace(batch, tables=tables))


def kv_costs(name: str, chunks: int = CHUNKS, reference: str = "bfloat16") -> tuple[float, float, float, float]:
    """Perplexity with pages in the reference format and in another, and over the same tokens, from the one to the
    other: mean KL divergence in nats, and the share of tokens whose most likely one is the same.

    Linears are those of `--quantization none`: where activations are rounded, float16 pages alone cost 0.005 nats.
    """
    with closing(open_checkpoint("smollm2-135m")) as checkpoint:
        ops, options = Ops(CPU), ModelOptions(quantization="none")
        weights = load_weights(checkpoint, choose_format(options, checkpoint, ops), torch.float32)
        ids = _text(checkpoint)
        losses, divergence, same, count = [0.0, 0.0], 0.0, 0, chunks * (CHUNK - 1)
        both = zip(*(_logits(weights, ids, ops, chunks, kind) for kind in (reference, name)), strict=True)
        for i, pair in enumerate(both):
            wanted = torch.tensor(ids[i * CHUNK + 1 : (i + 1) * CHUNK])
            known, other = (logits.log_softmax(-1) for logits in pair)
            losses = [
                loss - float(found[torch.arange(len(wanted)), wanted].sum())
                for loss, found in zip(losses, (known, other), strict=True)
            ]
            divergence += float((known.exp() * (known - other)).sum())
            same += int((known.argmax(-1) == other.argmax(-1)).sum())
    exact, found = (math.exp(loss / count) for loss in losses)
    return exact, found, divergence / count, same / count


def three_bits() -> float:
    """Perplexity of plain 3-bit groups of 64 between smallest and largest: what q3h must beat."""

    class ThreeBit(Int4Format):
        """int4 that uses eight of its sixteen levels, one range a group."""

        def round(self, weight: Tensor) -> GroupQuantizedWeight:
            groups = weight.float().view(len(weight), -1, self.group)
            low = groups.amin(-1, keepdim=True).half()
            step = ((groups.amax(-1, keepdim=True) - low.float()) / 7).clamp_min(1e-7).half()
            codes = ((groups - low.float()) / step.float()).round().clamp(0, 7).to(torch.uint8)
            return GroupQuantizedWeight(codes.view(weight.shape), step[..., 0], low[..., 0], INT4_LEVELS)

    with closing(open_checkpoint("smollm2-135m")) as checkpoint:
        ops = Ops(CPU)
        weights = load_weights(checkpoint, ThreeBit(ops, 64, keep_int8_codes=True), torch.float32)
        return _perplexity(weights, _text(checkpoint), ops)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any]) -> dict[str, Path]:
    """What `lorasrv quantize` makes of the built-in model, by format."""
    folder = tmp_path_factory.mktemp("quantized")
    files = {kind: folder / f"{kind}.safetensors" for kind in ("int4", "q3h")}
    for kind, file in files.items():
        done = cli("quantize", str(file), "--quantization", kind, timeout=900)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
    return files


@pytest.mark.long
def test_int8_and_the_files_own_codes_cost_little() -> None:
    wanted = {"none": "none", "int8": "int8", "the file's own": "auto"}
    found = {name: perplexity(ModelOptions(quantization=kind), chunks=2)[0] for name, kind in wanted.items()}
    for name in ("int8", "the file's own"):
        assert found[name] <= 1.02 * found["none"], found
        assert found[name] != found["none"], "it was not used"


@pytest.mark.exhaustive
def test_what_each_format_costs(quantized: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "none": perplexity(ModelOptions(quantization="none")),
        "none, bf16": perplexity(ModelOptions(quantization="none"), torch.bfloat16),
        "int8": perplexity(ModelOptions(quantization="int8")),
        "int4, the file's own groups of 32": perplexity(ModelOptions()),
        "int4, groups of 64": perplexity(ModelOptions(quantized_weights=quantized["int4"])),
        "int4, groups of 64, rounded at the start": perplexity(
            ModelOptions(quantization="int4", quantization_group=64)
        ),
        "q3h": perplexity(ModelOptions(quantized_weights=quantized["q3h"])),
        "q3h, rounded at the start": perplexity(ModelOptions(quantization="q3h")),
    }
    three = three_bits()
    exact = found["none"][0]
    with capsys.disabled():
        print(f"\nperplexity over {CHUNK * CHUNKS} tokens; plain 3 bits {three:.3f} ({three / exact - 1:+.2%})")
        for name, (value, nbytes) in found.items():
            print(f"| {name} | {value:.3f} | {value / exact - 1:+.2%} | {nbytes / 1e6:.0f} |")
    cost = {name: value / exact for name, (value, _) in found.items()}
    assert cost["int8"] <= 1.02
    assert cost["int8"] != 1.0, "int8 was not used"
    assert cost["int4, the file's own groups of 32"] <= 1.02, "only activations are rounded"
    assert cost["int4, groups of 64"] <= 1.06
    assert cost["int4, groups of 64"] < cost["q3h"] < three / exact
    for kind in ("int4, groups of 64", "q3h"):
        assert cost[kind] < cost[f"{kind}, rounded at the start"]


PARTS = {
    "int4": ("--quantization", "int4"),
    "q3h": ("--quantization", "q3h"),
    "attn=int4,mlp=q3h": ("--quantization", "attn=int4,mlp=q3h"),
    "by site": ("--quantization", "qkv=int4,o=q3h,gate_up=q3h,down=int4"),
    "--bits 3.8": ("--bits", "3.8"),
}
"""Options of `lorasrv quantize`: one format, the published rule, its correction by site, a choice by measure."""


@pytest.mark.exhaustive
def test_what_formats_by_part_cost(cli: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, tuple[float, float, float]] = {}
    ops = Ops(CPU)
    with closing(open_checkpoint("smollm2-135m")) as checkpoint:
        ids = _text(checkpoint)
        floats = load_weights(checkpoint, get_format("none", ops), torch.float32)
        exact = [logits.log_softmax(-1) for logits in _logits(floats, ids, ops, CHUNKS)]
    for name, flags in PARTS.items():
        file = tmp_path / "parts.safetensors"
        done = cli("quantize", str(file), *flags, "--force", "--json", timeout=1800)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        options = ModelOptions(quantized_weights=file)
        with closing(open_checkpoint("smollm2-135m", quantized_weights=file)) as checkpoint:
            weights = load_weights(checkpoint, choose_format(options, checkpoint, ops), torch.float32)
        log_likelihood, divergence = 0.0, 0.0
        for i, logits in enumerate(_logits(weights, ids, ops, CHUNKS)):
            said, wanted = logits.log_softmax(-1), exact[i]
            following = torch.tensor(ids[i * CHUNK + 1 : (i + 1) * CHUNK])
            log_likelihood += float(said.gather(1, following[:, None]).sum())
            divergence += float((wanted.exp() * (wanted - said)).sum())
        rows = CHUNKS * (CHUNK - 1)
        bits = report["sites"][-1]["bits"]
        found[name] = bits, math.exp(-log_likelihood / rows), divergence / rows
        with capsys.disabled():
            line = f"| {name} | {bits:.3f} | {weights.nbytes / 1e6:.1f} | {found[name][1]:.3f} | {found[name][2]:.4f} |"
            print(f"\n{line} {report['seconds']:.0f} s |\n{json.dumps(report['sites'])}")
    kl = {name: divergence for name, (_, _, divergence) in found.items()}
    assert kl["int4"] < kl["by site"] < kl["q3h"]
    assert kl["int4"] < kl["attn=int4,mlp=q3h"] < kl["q3h"]
    assert kl["int4"] < kl["--bits 3.8"] < kl["by site"]


MOST_KV_COST = {"int8": (0.001, 1.002), "k8v4": (0.012, 1.02)}
"""Bounds of the KL divergence, and of the perplexity against that of bfloat16 pages."""


@pytest.mark.long
@pytest.mark.parametrize("name", MOST_KV_COST)
def test_pages_of_codes_cost_little(name: str) -> None:
    exact, found, divergence, same = kv_costs(name, chunks=2)
    assert 0 < divergence <= MOST_KV_COST[name][0]
    assert found <= 1.02 * exact
    assert same > 0.9


@pytest.mark.exhaustive
def test_what_each_kv_format_costs(capsys: pytest.CaptureFixture[str]) -> None:
    found = {name: kv_costs(name) for name in ("float16", "float32", *MOST_KV_COST)}
    with capsys.disabled():
        print(f"\nover {CHUNK * CHUNKS} tokens, against pages in bfloat16")
        for name, (exact, perplexity, divergence, same) in found.items():
            print(f"| {name} | {perplexity:.3f} | {perplexity / exact - 1:+.2%} | {divergence:.5f} | {same:.1%} |")
    for name, (most, worst) in MOST_KV_COST.items():
        exact, perplexity, divergence, _ = found[name]
        assert divergence <= most
        assert perplexity <= worst * exact


class HeldValues:
    """The built-in model with linears rounded to one of 16 values, as floats; see `Checkpoint`."""

    def __init__(self, base: Checkpoint, kind: type[TableFormat]) -> None:
        self._base, self._kind = base, kind
        self.name, self.spec, self.packing = base.name, base.spec, None
        self.names, self.tokenizer_source, self.close = base.names, base.tokenizer_source, base.close

    def tensor(self, name: str) -> Tensor:
        weight = self._base.tensor(name)
        if "layers" not in name or weight.dim() == 1:
            return weight
        held, values = self._kind(Ops(CPU), 64, keep_int8_codes=False).round(weight), torch.tensor(self._kind.values)
        # The table has whole numbers of a unit, and so have its scales.
        largest = held.scales / byte_table(tuple(values.tolist()))[1]
        return values[held.codes.long()] * largest.repeat_interleave(64, 1)

    def codes(self, name: str) -> GroupQuantizedWeight | None:
        return None if "layers" in name else self._base.codes(name)


class Floats:
    """A quantized checkpoint whose weights are read as floats; see `Checkpoint`."""

    def __init__(self, base: Checkpoint) -> None:
        self.name, self.spec, self.packing = base.name, base.spec, None
        self.names, self.tensor = base.names, base.tensor
        self.tokenizer_source, self.close = base.tokenizer_source, base.close

    def codes(self, name: str) -> GroupQuantizedWeight | None:
        return None


@dataclass(frozen=True)
class Held:
    """What a model that is held in codes does, beside the same numbers as floats."""

    perplexity: float
    exact_perplexity: float
    # Mean divergence in nats a token, and the share of tokens whose most likely one is the same.
    divergence: float
    same: float
    nbytes: int

    def row(self, name: str) -> str:
        said = f"{self.exact_perplexity:.3f} | {self.perplexity:.3f} | {self.divergence:.5f} | {self.same:.2%}"
        return f"| {name} | {said} | {self.nbytes / 1e6:.0f}"


def held(codes: Checkpoint, floats: Checkpoint, quantization: str, ids: list[int], chunks: int = CHUNKS) -> Held:
    """Compare a checkpoint in a format with another one as floats."""
    ops = Ops(CPU)
    weights = load_weights(codes, choose_format(ModelOptions(quantization=quantization), codes, ops), torch.float32)
    exact = load_weights(floats, get_format("none", ops), torch.float32)
    losses, divergence, same, rows = [0.0, 0.0], 0.0, 0, chunks * (CHUNK - 1)
    both = zip(_logits(exact, ids, ops, chunks), _logits(weights, ids, ops, chunks), strict=True)
    for i, pair in enumerate(both):
        following = torch.tensor(ids[i * CHUNK + 1 : (i + 1) * CHUNK])[:, None]
        wanted, found = (logits.log_softmax(-1) for logits in pair)
        for place, said in enumerate((wanted, found)):
            losses[place] -= float(said.gather(1, following).sum())
        divergence += float((wanted.exp() * (wanted - found)).sum())
        same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
    exact_perplexity, perplexity = (math.exp(loss / rows) for loss in losses)
    return Held(perplexity, exact_perplexity, divergence / rows, same / rows, weights.nbytes)


@pytest.mark.exhaustive
def test_a_table_of_bytes_costs_little_beside_exact_values(capsys: pytest.CaptureFixture[str]) -> None:
    """NF4 as bitsandbytes computes it, in floats, against its values in bytes, with rounded activations."""
    with closing(open_checkpoint("smollm2-135m")) as checkpoint:
        found = held(checkpoint, HeldValues(checkpoint, Nf4Format), Nf4Format.name, _text(checkpoint))
    with capsys.disabled():
        print("", found.row(Nf4Format.name) + " |", sep="\n")
    assert abs(found.perplexity / found.exact_perplexity - 1) < 0.01
    assert found.divergence < 0.01


def shares_in_style(model: str, personas: Mapping[str, Path], prompts: Sequence[str]) -> dict[str, float]:
    """Share of a persona's greedy answers that are in its style, over a base as it is served."""
    score = importlib.import_module("score")
    with LLM(model) as llm:
        assert llm.chat_template is not None
        for name, folder in personas.items():
            llm.add_adapter(name, folder)
        asked = [(name, prompt) for name in personas for prompt in prompts]
        chats = [llm.chat_template.encode([{"role": "user", "content": p}], llm.tokenizer) for _, p in asked]
        greedy = SamplingParams(max_tokens=score.MAX_NEW_TOKENS, temperature=0)
        said = llm.generate(chats, greedy, [name for name, _ in asked])
    good = Counter(name for (name, _), one in zip(asked, said, strict=True) if score.style_score(name, one.text))
    return {name: good[name] / len(prompts) for name in personas}


MOST_EXACT_COST, MOST_HELD_COST = 0.003, 0.01
"""Divergence in nats of files that are held exactly, beside the built-in one's, and of those that are not."""
USELESS = ("GPTQ, 2 bits", "GPTQ, 3 bits")
"""Files that plain rounding leaves without a meaning: any change of a logit is large, and so is their perplexity."""


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_what_holding_a_quantized_file_costs(
    tmp_path: Path,
    personas: Mapping[str, Path],
    heldout: Sequence[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each file's own weights in floats against its codes: what is exact costs what rounded activations cost."""
    monkeypatch.syspath_prepend(str(PERSONA_BOTS))
    found: dict[str, Held] = {}
    with closing(open_checkpoint("smollm2-135m")) as builtin:
        ids = _text(builtin)
        files = {BUILTIN: lambda _: "smollm2-135m"}
        files |= {kind: lambda kind: str(write_file(builtin, tmp_path / "file", kind)) for kind in FILES}
        files |= {kind: lambda kind: str(_gguf(tmp_path / "file.gguf", kind)) for kind in GGUF_FILES}
        with capsys.disabled():
            print(
                "\n| file | as floats | as served | KL, nats | same token | MB",
                *personas,
                "",
                sep=" | ",
            )
            print("|---" * (6 + len(personas)) + "|")
        for kind, write in files.items():
            model = write(kind)
            with closing(open_checkpoint(model)) as checkpoint:
                found[kind] = held(checkpoint, Floats(checkpoint), "auto", ids)
                is_rounded = checkpoint.packing is not None and bool(checkpoint.packing.rounding)
            shares = shares_in_style(model, personas, heldout)
            shutil.rmtree(tmp_path / "file", ignore_errors=True)
            with capsys.disabled():
                print(found[kind].row(kind), *(f"{share:.1%}" for share in shares.values()), "", sep=" | ")
            if kind in USELESS:
                continue
            most = MOST_HELD_COST if is_rounded else found[BUILTIN].divergence + MOST_EXACT_COST
            assert found[kind].divergence <= most, kind
            assert abs(found[kind].perplexity / found[kind].exact_perplexity - 1) < 0.02, kind


def _gguf(target: Path, kind: str) -> Path:
    target.unlink(missing_ok=True)
    return write_gguf_file(builtin_file(), target, kind)
