"""Quantized bases behind the real command line: served with an adapter, verified, or refused in one line."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import (
    Tensors,
    base,
    committed,
    convert,
    dense,
    dense_gguf,
    fp8_tensors,
    read_awq,
    read_bitsandbytes,
    read_fp8,
    with_config,
)
from peft_adapters import peft_adapter
from safetensors.torch import load_file, save_file
from served import lorasrv, serve
from tiny_checkpoints import write_gguf
from torch import Tensor

from lorasrv.models.loader.gguf_file import GgufFile
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource

pytestmark = pytest.mark.long
PROMPT = [5, 9, 60, 33, 120, 7]
NEW = 12
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return committed("autoawq-gemm", tmp_path / "tiny-awq")


def greedy(model: torch.nn.Module) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(NEW):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_the_base_and_an_adapter_say_what_transformers_and_peft_say(folder: Path, tmp_path: Path) -> None:
    floats = dense(folder, tmp_path / "dense", lambda m, t: read_awq(t, 32) if "qweight" in t else None)
    adapted = peft_adapter(floats, tmp_path / "mia", r=6)
    vocabulary = TokenizerJson((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer = Tokenizer.from_source(TokenizerSource(vocabulary, None, (2,), 1))
    flags = ("--model", folder, "--quantize", "awq", "--kernels", "torch", "--dtype", "float32")
    with serve(*flags, "--pool-bytes", "16MiB", adapters={"mia": tmp_path / "mia"}) as served:
        cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
        # torch has no kernel for packed codes: each has a byte.
        held = {"format": "awq", "method": "awq", "bits": [4], "bits_per_weight": 9.0, "error": 0.0, "exact": True}
        assert cards["tiny-awq"]["weights"] == cards["mia"]["weights"] == held
        assert served.log.count("weights: awq, 4 bits, 14 linears: kept exactly as the file has them") == 1
        texts = {}
        for name in ("mia", "tiny-awq"):
            body = {"model": name, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
            texts[name] = served.post("/v1/completions", **body).json()["choices"][0]["text"]
        assert texts["mia"] == tokenizer.decode(greedy(adapted))
        with adapted.disable_adapter():
            assert texts["tiny-awq"] == tokenizer.decode(greedy(adapted))
        done = lorasrv("verify", "mia", "--server", served.url)
        assert (done.returncode, "exact" in done.stdout) == (0, True), done.stdout + done.stderr


def gguf_of(root: Path, kinds: Mapping[str, str]) -> tuple[Path, Path]:
    """A GGUF file of these types, and a directory of what it holds as floats."""
    source = base(root / "source", hidden_size=256, intermediate_size=512)
    return write_gguf(source, root / "tiny.gguf", kinds), dense_gguf(source, root / "floats", kinds)


def fp8_linear(module: str, weight: Tensor) -> Tensors | None:
    return None if module == "lm_head" else fp8_tensors(weight, (len(weight), 1))


K_QUANTS = {"embed": "Q8_0", "lm_head": "Q8_0", "v_proj": "Q5_K", "gate_proj": "IQ4_XS", "": "Q4_K"}


@pytest.mark.parametrize(
    ("kind", "bits", "exact", "line"),
    [
        ("gguf", [4, 5], True, "weights: gguf, 4 and 5 bits, 14 linears: kept exactly as the file has them"),
        (
            "bitsandbytes",
            [4],
            False,
            "weights: bitsandbytes, 4 bits, 14 linears: the 16 values of a code are held in 8",
        ),
        pytest.param(
            *(
                "fp8",
                [8],
                False,
                "weights: fp8, 8 bits, 14 linears: stored in 8 bits, with a scale for every 32 inputs",
            ),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_other_formats_and_an_adapter(tmp_path: Path, kind: str, bits: list[int], exact: bool, line: str) -> None:
    """With the CPU's kernels; `verify` compares with PEFT on the served weights."""
    if kind == "gguf":
        path, floats = gguf_of(tmp_path, K_QUANTS)
    elif kind == "fp8":
        path = convert(base(tmp_path / "base"), tmp_path / "tiny", {"quant_method": "fp8"}, fp8_linear)
        floats = dense(path, tmp_path / "floats", lambda m, t: read_fp8(t) if len(t) > 1 else None)
    else:
        path = committed("bitsandbytes-nf4", tmp_path / "tiny")
        floats = dense(path, tmp_path / "floats", lambda m, t: read_bitsandbytes(t) if "weight.absmax" in t else None)
    peft_adapter(floats, tmp_path / "mia", r=6)
    flags = ("--model", path, "--dtype", "float32", "--pool-bytes", "16MiB", "--served-model-name", "tiny")
    with serve(*flags, adapters={"mia": tmp_path / "mia"}) as served:
        cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
        held = {"format": "int8" if kind == "fp8" else kind, "method": kind, "bits": bits, "exact": exact}
        assert held.items() <= cards["tiny"]["weights"].items()
        assert cards["tiny"]["batch_invariant"]
        assert served.log.count(line) == 1
        done = lorasrv("verify", "mia", "--server", served.url)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_tgis_names_round_floats_at_the_start(model: Path, tmp_path: Path) -> None:
    peft_adapter(model, tmp_path / "mia", r=6)
    for asked, held in (("bitsandbytes-nf4", "nf4"), ("eetq", "int8"), ("fp8", "int8")):
        flags = ("--model", model, "--dtype", "float32", "--pool-bytes", "16MiB", "--quantize", asked)
        with serve(*flags, adapters={"mia": tmp_path / "mia"}) as served:
            told = served.http.get("/v1/models").json()["data"][0]["weights"]
            assert (told["format"], told["exact"]) == (held, False)
            assert 0.003 < told["error"] < (0.12 if held == "nf4" else 0.008)
            said = "fp8: cpu multiplies no e4m3" if asked == "fp8" else f"--quantization {asked}: served as {held}"
            assert served.log.count(said) == 1
            done = lorasrv("verify", "mia", "--server", served.url)
            assert done.returncode == 0, done.stdout + done.stderr


def test_formats_by_part_are_served_as_what_was_chosen(cli: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    """Rounded at the start, and chosen for a number of bits; of these `verify` compares with PEFT what is served."""
    peft_adapter(model, tmp_path / "mia", r=6)
    made = cli("quantize", tmp_path / "tiny.safetensors", "--model", model, "--bits", "4.2")
    assert made.code == 0, made.err
    assert [line.split("\t")[0] for line in made.out.splitlines()[1:7]] == [
        *("site", "qkv", "o", "gate_up", "down", "all")
    ]
    assert "measuring what rounding does to the model done" in made.err
    for flags, weights in (
        (("--quantization", "attn=int4,mlp=q3h"), {"format": "attn=int4,mlp=q3h"}),
        (("--quantized-weights", tmp_path / "tiny.safetensors"), {"format": "mixed", "method": "mixed", "exact": True}),
    ):
        common = ("--model", model, "--dtype", "float32", "--pool-bytes", "16MiB")
        with serve(*common, *flags, adapters={"mia": tmp_path / "mia"}) as served:
            card = served.http.get("/v1/models").json()["data"][0]
            assert weights.items() <= card["weights"].items()
            if card["weights"]["format"] == "mixed":
                done = cli("verify", "mia", "--server", served.url)
                assert done.code == 0, done.out + done.err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            ("serve", "--quantization", "attn=int4,ffn=q3h"),
            "--quantization 'attn=int4,ffn=q3h': 'ffn' is no part of a layer; "
            "choose from attn, mlp, qkv, o, gate_up, down",
        ),
        (
            ("serve", "--quantization", "attn=int4,mlp=q2"),
            "--quantization 'attn=int4,mlp=q2': 'q2' is no format of a part; choose from int8, int4, q3h",
        ),
        (
            ("quantize", "x.safetensors", "--quantization", "attn=int4"),
            "--quantization 'attn=int4' leaves out gate_up, down",
        ),
        (
            ("quantize", "x.safetensors", "--quantization", "mlp=q3h:32,attn=int4"),
            "--quantization 'mlp=q3h:32,attn=int4': q3h has no groups of '32'; choose from 64, 128",
        ),
        (("quantize", "x.safetensors", "--bits", "3"), "--bits 3: choose from 3.5 to 8 for this model"),
        (
            ("quantize", "x.safetensors", "--bits", "4", "--quantization", "q3h"),
            "--bits chooses formats and groups; leave out --quantization and --quantization-group",
        ),
    ],
)
def test_formats_that_are_none_end_with_one_line(
    refused: Callable[..., Any],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    where = ("--store", tmp_path / "store", "--port", "0", "--kernels", "torch") if command[0] == "serve" else ()
    done = refused(*command, "--model", model, *where)
    assert (done.code, done.errors) == (2, [f"lorasrv: {says}"])
    assert not list(tmp_path.glob("x*"))


def damaged(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def gptq(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    """The same of a checkpoint of GPTQ in place of the folder."""

    def apply(folder: Path) -> None:
        shutil.rmtree(folder)
        damaged(change)(committed("autogptq", folder))

    return apply


SCALES = "model.layers.1.mlp.down_proj.scales"


def test_damaged_blocks_end_with_one_line(refused: Callable[..., Any], tmp_path: Path) -> None:
    """A scale that is no number, and half a tensor."""
    path, _ = gguf_of(tmp_path, K_QUANTS)
    raw = path.read_bytes()
    with closing(GgufFile(path)) as file:
        at = file.tensors["blk.1.ffn_down.weight"].offset
    for damaged, says in (
        (raw[:at] + b"\x00\x7e" + raw[at + 2 :], "blk.1.ffn_down.weight holds NaN or infinity"),
        (raw[: at + 100], "the GGUF file is truncated: tensor "),
    ):
        path.write_bytes(damaged)
        done = refused("serve", "--model", path, "--store", tmp_path / "store", "--port", "0")
        assert (done.code, says in done.errors[0]) == (1, True), done.err


@pytest.mark.parametrize(
    ("change", "flags", "says"),
    [
        (damaged(lambda t: t[SCALES].fill_(torch.nan)), (), f"{SCALES} holds NaN or infinity"),
        (damaged(lambda t: t.pop(SCALES)), (), f"the checkpoint lacks {SCALES}"),
        (damaged(lambda t: t.update({SCALES: t[SCALES][:-1]})), (), f"{SCALES} is [3, 64], not [4, 64]"),
        (damaged(lambda t: t.update({SCALES: t[SCALES].int()})), (), f"{SCALES} is I32, not F16 or BF16 or F32"),
        (
            gptq(lambda t: t["model.layers.1.mlp.down_proj.g_idx"].fill_(9)),
            (),
            "model.layers.1.mlp.down_proj.g_idx names groups outside 0 to 3",
        ),
        (
            lambda folder: with_config(folder, quantization_config={"quant_method": "exl2"}),
            (),
            "this checkpoint is quantized by 'exl2' (config.json), which is not supported; supported: gptq, awq, "
            "compressed-tensors, bitsandbytes, fp8, hqq, eetq. Give one of these, or the original weights",
        ),
        (
            lambda folder: with_config(folder, quantization_config=AWQ | {"version": "marlin"}),
            (),
            "AWQ in version 'marlin' is not supported, only gemm, gemv, gemv_fast",
        ),
        (
            lambda folder: None,
            ("--quantize", "gptq"),
            "--quantize gptq: this is no GPTQ checkpoint; choose auto, int8, int4 or none",
        ),
    ],
)
def test_what_cannot_be_served_ends_with_one_line(
    refused: Callable[..., Any],
    folder: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    flags: tuple[str, ...],
    says: str,
) -> None:
    change(folder)
    where = ("--model", folder, "--store", tmp_path / "store", "--port", "0", "--kernels", "torch")
    done = refused("serve", *where, *flags)
    # An option that does not fit is wrong usage; a file that does not is not.
    assert (done.code, done.errors) == (2 if flags else 1, [f"lorasrv: {says}"])
