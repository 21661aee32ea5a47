"""GGUF files of every family and type against the gguf package, and one clear line for every kind of damage."""

import re
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lorasrv.errors import CorruptModel, ModelError, UnsupportedModel
from lorasrv.models.families import detect
from lorasrv.models.loader import open_checkpoint, state_dict_fp32
from lorasrv.models.loader.ggml_dequant import decode, ggml_type
from lorasrv.models.loader.gguf_file import GgufFile
from lorasrv.models.quantization import get_format
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.weights import load_weights
from sgmv_kernels.ops import Ops

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
LEFT_TO_GGUF = (
    *("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL"),
    *("IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4"),
)


GgufWriter = Callable[..., Path]


Tiny = dict[str, Callable[..., Path]]


def test_every_type_of_the_gguf_package_has_its_size() -> None:
    """All that it can dequantize, but for NVFP4, whose values are not in its blocks alone."""
    for number, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if number in gguf.quants._type_traits and number.name != "NVFP4":
            kind = ggml_type(int(number), "t")
            assert (kind.name, kind.block_size, kind.block_bytes) == (number.name, block, size)


@pytest.mark.parametrize("kind", [*TYPES, *LEFT_TO_GGUF])
def test_blocks_decode_exactly_as_the_gguf_package_does(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    ours = ggml_type(int(number), "t")
    random = np.random.default_rng(0)
    shape = (7, 2 * ours.block_size if kind in LEFT_TO_GGUF else 96)
    values = random.standard_normal(shape).astype(np.float32)
    values[2] = 0
    try:
        stored = gguf.quants.quantize(values, number)
    except NotImplementedError:
        # Any bytes are a block, but most fp16 scales would be huge or no number: their exponents are made small.
        stored = random.integers(0, 256, (7, 2 * ours.block_bytes), dtype=np.uint8)
        stored[:, 1::2] &= 0xBF
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(stored, number).astype(np.float32)
    got = decode(np.frombuffer(bytearray(stored.tobytes()), np.uint8), ours, shape)
    assert kind in TYPES or got.dtype == torch.float32
    assert np.array_equal(got.float().numpy(), want, equal_nan=True)
    assert np.isfinite(want).mean() > 0.5
    assert want.std() > 0


@pytest.mark.parametrize("kind", ["Q5_1", "Q6_K"])
def test_a_file_of_other_blocks_is_near_the_original(
    tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path, kind: str
) -> None:
    """Q6_K is made by hand, as the gguf package only reads it: levels -32 to 31 in blocks of 256, scales of 16."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 384}
    source = tiny_hf_checkpoints["llama"](**sizes)
    reference = load_file(source / "model.safetensors")
    name, stored_name = "model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"
    if kind == "Q6_K":
        path = write_gguf(source, tmp_path / "f.gguf", "F32")
        info = GgufFile(path).tensors[stored_name]
        # In place of the fp32 tensor, which is longer.
        raw = bytearray(path.read_bytes())
        blocks = _q6_k(reference[name].numpy())
        raw[info.offset : info.offset + len(blocks)] = blocks
        at = raw.index(stored_name.encode()) + len(stored_name) + 4 + 2 * 8
        assert struct.unpack_from("<I", raw, at) == (0,)
        struct.pack_into("<I", raw, at, 14)
        path.write_bytes(raw)
    else:
        path = write_gguf(source, tmp_path / "f.gguf", kind)
    checkpoint = open_checkpoint(str(path))
    got = checkpoint.tensor(name)
    checkpoint.close()
    assert (got - reference[name]).norm() < 0.05 * reference[name].norm()


def _q6_k(values: np.ndarray) -> bytes:
    """ggml's layout: 128 low halves, 64 bytes of upper pairs, 16 int8 scales, an fp16 scale of scales; 256 values."""
    blocks = values.reshape(-1, 2, 4, 32)
    top = np.abs(values).max() / 31
    levels = (np.rint(blocks / top).clip(-32, 31) + 32).astype(np.uint8)
    low = np.concatenate((levels[:, :, 0], levels[:, :, 1]), -1) & 15
    high = np.concatenate((levels[:, :, 2], levels[:, :, 3]), -1) & 15
    pairs = sum((levels[:, :, i] >> 4) << (2 * i) for i in range(4))
    count = len(blocks)
    parts = (
        (low | high << 4).reshape(count, 128),
        np.asarray(pairs, np.uint8).reshape(count, 64),
        np.full((count, 16), 64, np.uint8),
        np.full((count, 1), top / 64, np.float16).view(np.uint8),
    )
    return np.concatenate(parts, axis=1).tobytes()


@pytest.mark.long
def test_the_gguf_package_is_imported_only_for_its_blocks(llama_gguf: Path, write_gguf: GgufWriter) -> None:
    code = (
        "import sys; from lorasrv.models.loader import open_checkpoint, state_dict_fp32;"
        "state_dict_fp32(open_checkpoint(sys.argv[1])); print('gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, llama_gguf], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_gguf_package_that_lacks_a_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModel, match="GGUF type Q6_K needs a newer gguf package: pip install -U gguf"):
        decode(np.zeros(210, np.uint8), ggml_type(14, "t"), (256,))


ROPE_YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}


ROPE_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.25 * i for i in range(6)],
    "long_factor": [2.0] * 6,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
}


ROPE_TWO = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


OF_HEADS = {"query_pre_attn_scalar": 24}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"rope_parameters": ROPE_YARN}),
        ("gemma2", OF_HEADS),
        ("gemma3", OF_HEADS | {"rope_parameters": ROPE_TWO, "final_logit_softcapping": 10.0}),
        ("phi3", {"sliding_window": 8}),
        ("phi3", {"rope_parameters": ROPE_LONG, "original_max_position_embeddings": 64}),
    ],
)
def test_gguf_of_a_family_is_the_same_model(
    tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    """The same description and weights as the directory's: what the decoder makes of them, test_decoder.py shows."""
    source = tiny_hf_checkpoints[family](**changes)
    wanted, ours = open_checkpoint(str(source)), open_checkpoint(str(write_gguf(source, tmp_path / "m.gguf", "F32")))
    assert ours.spec.rope.attention_factor == pytest.approx(wanted.spec.rope.attention_factor, rel=1e-6)
    rope = replace(ours.spec.rope, attention_factor=wanted.spec.rope.attention_factor)
    less_one = family.startswith("gemma")
    assert (wanted.spec.norms_less_one, ours.spec.norms_less_one) == (less_one, False)
    eps = wanted.spec.norm_eps
    assert ours.spec.norm_eps == pytest.approx(eps)
    assert replace(ours.spec, norms_less_one=less_one, rope=rope, norm_eps=eps) == wanted.spec
    fmt = get_format("none", Ops(torch.device("cpu"), "torch"))
    expected, got = (load_weights(c, fmt, torch.float32) for c in (wanted, ours))
    for name in wanted.names():
        assert torch.equal(got.dequantized(name), expected.dequantized(name)), name
    wanted.close()
    ours.close()


def test_gemma_scores_of_the_largest_models_are_divided_by_more() -> None:
    """Their GGUF files do not say it; llama.cpp knows them by their layers."""
    for architecture, layers, scalar in (("gemma2", 46, 32.0), ("gemma2", 42, 16.0), ("gemma3", 62, 32.0)):
        keys = {
            "block_count": layers,
            "embedding_length": 128,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.key_length": 16,
            "context_length": 256,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        meta = {f"{architecture}.{key}": value for key, value in keys.items()}
        meta |= {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a"]}
        assert detect(architecture).spec_from_gguf(meta).query_scalar == scalar


def test_longrope_without_its_factors(tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path) -> None:
    extra = {"phi3.rope.scaling.type": "longrope"}
    path = write_gguf(tiny_hf_checkpoints["phi3"](), tmp_path / "m.gguf", "F32", **extra)
    with pytest.raises(CorruptModel, match=r"m\.gguf: the GGUF file lacks the tensor rope_factors_short\.weight"):
        open_checkpoint(str(path))


def _refusal(path: Path) -> str:
    """What is wrong with a file, "" if nothing is. Anything but a ModelError is a bug."""
    try:
        checkpoint = open_checkpoint(str(path))
        checkpoint.tokenizer_source()
        checkpoint.close()
    except ModelError as error:
        return str(error)
    return ""


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_gguf_headers_raise_only_model_errors(
    llama_gguf: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(llama_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, 12_000))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    message = _refusal(path)
    assert "\n" not in message
    assert len(message) < 500


def tensor_entry(raw: bytearray, name: str) -> int:
    """Where the dimensions of a two-dimensional tensor's entry begin: two of 8 bytes, 4 of type, 8 of offset."""
    return raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4


UP, DOWN = "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"


TYPE, OFFSET = 16, 20


BLOCKS = b"llama.block_count"


@pytest.mark.parametrize(
    ("place", "at", "fmt", "value", "error", "message"),
    [
        ("header", 4, "<I", 1, UnsupportedModel, "GGUF version 1 .*known: 2, 3"),
        ("header", 4, ">I", 3, UnsupportedModel, "byte order"),
        ("header", 0, "<I", 0, CorruptModel, "not a GGUF file: it does not begin with GGUF"),
        ("header", 8, "<Q", 1 << 60, CorruptModel, r"the GGUF file is damaged or truncated: \d+ tensors and"),
        ("header", 16, "<Q", 1 << 60, CorruptModel, r"damaged or truncated: 30 tensors and \d+ keys claimed in \d+ by"),
        ("header", 24, "<Q", 1 << 62, CorruptModel, "truncated in its header"),
        ("key", 0, "<I", 77, CorruptModel, r"metadata of unknown kind 77 \(in key 'llama\.block_count'\)"),
        ("tensor", 0, "<Q", 0, CorruptModel, rf"tensor '{UP}' is \[96, 0\], which is empty"),
        ("tensor", 0, "<Q", 1 << 62, CorruptModel, rf"truncated: tensor '{UP}' ends at byte \d+ of \d+"),
        ("tensor", -4, "<I", 77, CorruptModel, rf"tensor '{UP}' claims 77 dimensions, more than 4"),
        ("tensor", TYPE, "<I", 15, UnsupportedModel, rf"'{UP}' has GGUF type Q8_K, which is not supported; known: F32"),
        ("tensor", TYPE, "<I", 999, UnsupportedModel, rf"tensor '{UP}' has GGUF type number 999, .*known: F32"),
        ("tensor", TYPE, "<I", 14, CorruptModel, rf"tensor '{UP}': \[96, 64\] is not a multiple of Q6_K blocks"),
        ("tensor", OFFSET, "<Q", 1 << 50, CorruptModel, rf"truncated: tensor '{UP}' ends at byte"),
        ("tensor", OFFSET, "<Q", 7, CorruptModel, rf"tensor '{UP}' begins at 7, which is no multiple of 32"),
        ("tensor", OFFSET, "<Q", 64, CorruptModel, "tensors '.*' and '.*' overlap in the file"),
    ],
)
def test_wrong_numbers(
    llama_gguf: Path, tmp_path: Path, place: str, at: int, fmt: str, value: int, error: type[Exception], message: str
) -> None:
    raw, path = bytearray(llama_gguf.read_bytes()), tmp_path / "bad.gguf"
    begin = {"header": 0, "key": raw.index(BLOCKS) + len(BLOCKS), "tensor": tensor_entry(raw, UP)}[place]
    struct.pack_into(fmt, raw, begin + at, value)
    path.write_bytes(raw)
    with pytest.raises(error, match=r"^bad\.gguf: ") as caught:
        open_checkpoint(str(path))
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (UP, DOWN, rf"tensor '{DOWN}' appears twice"),
        ("llama.context_length", "tokenizer.ggml.tokens", "appears twice"),
    ],
)
def test_names_that_are_there_twice(llama_gguf: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "bad.gguf"
    entry, other = (struct.pack("<Q", len(name)) + name.encode() for name in (old, new))
    path.write_bytes(llama_gguf.read_bytes().replace(entry, other))
    with pytest.raises(CorruptModel, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.alignment": 0}, "general.alignment must be a power of two, not 0"),
        ({"general.alignment": 24}, "general.alignment must be a power of two, not 24"),
        ({"general.alignment": "x"}, "general.alignment must be a power of two, not 'x'"),
    ],
)
def test_wrong_alignment(llama_dir: Path, write_gguf: GgufWriter, tmp_path: Path, extra: Any, message: str) -> None:
    with pytest.raises(CorruptModel, match=message):
        open_checkpoint(str(write_gguf(llama_dir, tmp_path / "m.gguf", "F32", **extra)))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_gguf_undoes_the_permutation_of_q_and_k(
    tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path, family: str
) -> None:
    source = tiny_hf_checkpoints[family](intermediate_size=96, sliding_window=None)
    wanted, ours = open_checkpoint(str(source)), open_checkpoint(str(write_gguf(source, tmp_path / "m.gguf", "F32")))
    expected, got = state_dict_fp32(wanted), state_dict_fp32(ours)
    wanted.close()
    ours.close()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", TYPES)
def test_every_supported_type_loads(llama_dir: Path, write_gguf: GgufWriter, tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(str(write_gguf(llama_dir, tmp_path / "m.gguf", kind)))
    reference = load_file(llama_dir / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tolerance = {"F32": 0.0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 8e-3}.get(kind, 0.12)
    error = (checkpoint.tensor(name).float() - reference[name]).abs().max() / reference[name].abs().max()
    checkpoint.close()
    assert error <= tolerance


def test_gguf_rope_factors_reach_the_spec(
    llama_dir: Path, write_gguf: GgufWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))
        original(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    checkpoint = open_checkpoint(str(write_gguf(llama_dir, tmp_path / "m.gguf", "F32")))
    checkpoint.close()
    assert (checkpoint.spec.rope.kind, checkpoint.spec.rope.factors) == ("factors", tuple(range(1, 9)))


def test_unknown_tensor_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'blk\.0\.x' has GGUF type Q8_K.*known: F32, F16, Q4_0, .*Q6_K"):
        ggml_type(15, "blk.0.x")
    with pytest.raises(UnsupportedModel, match="number 999"):
        ggml_type(999, "t")


def test_metadata_equals_the_gguf_packages_reader(llama_gguf: Path) -> None:
    file, reader = GgufFile(llama_gguf), gguf.GGUFReader(llama_gguf)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert {t.name: (tuple(t.shape[::-1]), t.data_offset) for t in reader.tensors} == {
        name: (info.shape, info.offset) for name, info in file.tensors.items()
    }


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 3000, -1, -4000])
def test_truncated_gguf(llama_gguf: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama_gguf.read_bytes()[:keep])
    with pytest.raises(CorruptModel, match=r"truncated|empty|begin with GGUF") as caught:
        open_checkpoint(str(path))
    assert str(tmp_path) not in str(caught.value)


def test_gguf_of_another_architecture_and_split_files(llama_dir: Path, write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(llama_dir, tmp_path / "m.gguf", "F32")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(UnsupportedModel, match="architecture 'mamba'"):
        open_checkpoint(str(path))
    split = write_gguf(llama_dir, tmp_path / "s.gguf", "F32", **{"split.count": 2})
    with pytest.raises(UnsupportedModel, match="split over several files"):
        open_checkpoint(str(split))


def test_gguf_missing_tensors_are_named(llama_dir: Path, write_gguf: GgufWriter, tmp_path: Path) -> None:
    path = write_gguf(llama_dir, tmp_path / "m.gguf", "F32")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"))
    with pytest.raises(CorruptModel, match=r"1 of 30 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(str(path))


def test_unreadable_file(llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(llama_gguf))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorruptModel, match="cannot be read: Permission denied"):
        open_checkpoint(str(llama_gguf))


def test_gguf_and_directory_tokenize_alike(llama_dir: Path, llama_gguf: Path, corpus: list[str]) -> None:
    a, b = open_checkpoint(str(llama_dir)), open_checkpoint(str(llama_gguf))
    ours, wanted = (Tokenizer.from_source(c.tokenizer_source()) for c in (b, a))
    assert [ours.encode(text) for text in corpus] == [wanted.encode(text) for text in corpus]
    assert b.tokenizer_source().special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    a.close()
    b.close()
