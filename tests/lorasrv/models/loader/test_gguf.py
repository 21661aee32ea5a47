"""GGUF files of every family and type against the gguf package, and one clear line for every kind of damage."""

import re
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
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
from lorasrv.models.loader.gguf_file import GgufFile, gguf_tokenizer_source
from lorasrv.models.loader.locate import read_tokenizer
from lorasrv.models.quantization import get_format
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.worker.weights import load_weights
from sgmv_kernels.ops import Ops

TYPES = {"F32": 0.0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 8e-3, "Q4_0": 0.12, "Q4_1": 0.12}
"""Decoded here, and how far a weight may be from the original, relative to the largest."""
LEFT_TO_GGUF = (
    *("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL"),
    *("IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4"),
)
GgufWriter = Callable[..., Path]
Tiny = dict[str, Callable[..., Path]]


def state_of(path: Path) -> dict[str, torch.Tensor]:
    with closing(open_checkpoint(str(path))) as checkpoint:
        return state_dict_fp32(checkpoint)


def test_every_type_of_the_gguf_package_has_its_size() -> None:
    """All that it can dequantize, but for NVFP4, whose values are not in its blocks alone."""
    for number, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if number in gguf.quants._type_traits and number.name != "NVFP4":
            kind = ggml_type(int(number), "t")
            assert (kind.name, kind.block_size, kind.block_bytes) == (number.name, block, size)


@pytest.mark.parametrize("kind", [*TYPES, *LEFT_TO_GGUF])
def test_blocks_decode_exactly_as_the_gguf_package_does(kind: str) -> None:
    number, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    ours = ggml_type(int(number), "t")
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


@pytest.mark.parametrize(("kind", "tolerance"), [*TYPES.items(), ("Q5_1", 0.04)])
def test_every_type_loads(llama_dir: Path, write_gguf: GgufWriter, tmp_path: Path, kind: str, tolerance: float) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    want = load_file(llama_dir / "model.safetensors")[name]
    with closing(open_checkpoint(str(write_gguf(llama_dir, tmp_path / "m.gguf", kind)))) as checkpoint:
        got = checkpoint.tensor(name).float()
    assert (got - want).abs().max() <= tolerance * want.abs().max()


def test_a_file_of_q6_k_is_near_the_original(tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path) -> None:
    """Made by hand, as the gguf package only reads it: levels -32 to 31 in blocks of 256, scales of 16."""
    source = tiny_hf_checkpoints["llama"](hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    name, stored_name = "model.layers.0.mlp.up_proj.weight", b"blk.0.ffn_up.weight"
    want = load_file(source / "model.safetensors")[name]
    path = write_gguf(source, tmp_path / "f.gguf", "F32")
    raw, blocks = bytearray(path.read_bytes()), _q6_k(want.numpy())
    # In place of the fp32 tensor, which is longer.
    offset = GgufFile(path).tensors[stored_name.decode()].offset
    raw[offset : offset + len(blocks)] = blocks
    at = raw.index(stored_name) + len(stored_name) + 4 + 2 * 8
    assert struct.unpack_from("<I", raw, at) == (0,)
    struct.pack_into("<I", raw, at, 14)
    path.write_bytes(raw)
    with closing(open_checkpoint(str(path))) as checkpoint:
        assert (checkpoint.tensor(name) - want).norm() < 0.05 * want.norm()


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
ROPE_LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "rope_theta": 10000.0}
ROPE_LONG |= {"short_factor": [1.0 + 0.25 * i for i in range(6)], "long_factor": [2.0] * 6}
ROPE_TWO = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
OF_HEADS = {"query_pre_attn_scalar": 24}
FP32_FACTORS = {"attention_multiplier": 0.375, "residual_multiplier": 0.21875}
"""Numbers that GGUF's float32 holds exactly."""


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"rope_parameters": ROPE_YARN}),
        ("gemma", {}),
        ("gemma2", OF_HEADS),
        ("gemma3", OF_HEADS | {"rope_parameters": ROPE_TWO, "final_logit_softcapping": 10.0}),
        ("ministral3", {}),
        ("phi3", {"sliding_window": 8}),
        ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
        ("granite", FP32_FACTORS),
        ("granite", FP32_FACTORS | {"tie_word_embeddings": True}),
        ("olmo2", {}),
        ("phi3", {"rope_parameters": ROPE_LONG, "original_max_position_embeddings": 64}),
    ],
)
def test_gguf_of_a_family_is_the_same_model(
    tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    """The same description and weights as the directory's: what the decoder makes of them, test_decoder.py shows."""
    source = tiny_hf_checkpoints[family](**changes)
    wanted, ours = map(open_checkpoint, map(str, (source, write_gguf(source, tmp_path / "m.gguf", "F32"))))
    assert ours.spec.rope.attention_factor == pytest.approx(wanted.spec.rope.attention_factor, rel=1e-6)
    less_one, eps = family.startswith("gemma"), wanted.spec.norm_eps
    assert (wanted.spec.norms_less_one, ours.spec.norms_less_one) == (less_one, False)
    assert ours.spec.norm_eps == pytest.approx(eps)
    rope = replace(ours.spec.rope, attention_factor=wanted.spec.rope.attention_factor)
    assert replace(ours.spec, norms_less_one=less_one, rope=rope, norm_eps=eps) == wanted.spec
    fmt = get_format("none", Ops(torch.device("cpu"), "torch"))
    expected, got = (load_weights(c, fmt, torch.float32) for c in (wanted, ours))
    for name in wanted.names():
        assert torch.equal(got.dequantized(name), expected.dequantized(name)), name
    wanted.close()
    ours.close()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "granite", "olmo2"])
def test_gguf_undoes_the_permutation_of_q_and_k(
    tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path, family: str
) -> None:
    source = tiny_hf_checkpoints[family](intermediate_size=96, sliding_window=None, attention_bias=family != "mistral")
    expected, got = map(state_of, (source, write_gguf(source, tmp_path / "m.gguf", "F32")))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"), [("gemma2", 46, 32), ("gemma2", 42, 16), ("gemma3", 62, 32)]
)
def test_gemma_scores_of_the_largest_models_are_divided_by_more(architecture: str, layers: int, scalar: int) -> None:
    """Their GGUF files do not say it; llama.cpp knows them by their layers."""
    keys = {"block_count": layers, "embedding_length": 128, "feed_forward_length": 96, "context_length": 256}
    keys |= {"attention.head_count": 4, "attention.key_length": 16, "attention.layer_norm_rms_epsilon": 1e-5}
    meta = {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a"]}
    meta |= {f"{architecture}.{key}": value for key, value in keys.items()}
    assert detect(architecture).spec_from_gguf(meta).query_scalar == scalar


def test_gguf_rope_factors_reach_the_spec(
    llama_dir: Path, write_gguf: GgufWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))
        original(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    with closing(open_checkpoint(str(write_gguf(llama_dir, tmp_path / "m.gguf", "F32")))) as checkpoint:
        rope = checkpoint.spec.rope
    assert (rope.kind, rope.factors) == ("factors", tuple(range(1, 9)))


def test_metadata_equals_the_gguf_packages_reader(llama_gguf: Path) -> None:
    file, reader = GgufFile(llama_gguf), gguf.GGUFReader(llama_gguf)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert {t.name: (tuple(t.shape[::-1]), t.data_offset) for t in reader.tensors} == {
        name: (info.shape, info.offset) for name, info in file.tensors.items()
    }


def test_gguf_and_directory_tokenize_alike(llama_dir: Path, llama_gguf: Path, corpus: list[str]) -> None:
    wanted, ours = (open_checkpoint(str(path)).tokenizer_source() for path in (llama_dir, llama_gguf))
    assert ours.special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    one, other = map(Tokenizer.from_source, (ours, wanted))
    assert [one.encode(text) for text in corpus] == [other.encode(text) for text in corpus]


# Damage.


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
    message = ""
    try:
        with closing(open_checkpoint(str(path))) as checkpoint:
            checkpoint.tokenizer_source()
    except ModelError as error:  # anything else is a bug
        message = str(error)
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
        (
            "tensor",
            TYPE,
            "<I",
            15,
            UnsupportedModel,
            rf"'{UP}' has GGUF type Q8_K, which is not .*known: F32, F16, Q4_0, .*Q6_K",
        ),
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


def counted(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


MISSING = r"1 of 30 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (counted(UP), counted(DOWN), CorruptModel, rf"tensor '{DOWN}' appears twice"),
        (counted("llama.context_length"), counted("tokenizer.ggml.tokens"), CorruptModel, "appears twice"),
        (b"blk.1.ffn_up", b"blk.1.ffn_xx", CorruptModel, MISSING),
        (b"llama", b"mamba", UnsupportedModel, "architecture 'mamba'"),
    ],
    ids=["tensor twice", "key twice", "missing tensor", "architecture"],
)
def test_wrong_names(llama_gguf: Path, tmp_path: Path, old: bytes, new: bytes, error: type[Exception], message) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(llama_gguf.read_bytes().replace(old, new))
    with pytest.raises(error, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("family", "key", "value", "error", "message"),
    [
        *(
            ("llama", "general.alignment", value, CorruptModel, f"alignment must be a power of two, not {value!r}")
            for value in (0, 24, "x")
        ),
        ("llama", "split.count", 2, UnsupportedModel, "split over several files"),
        ("gemma3", "gemma3.attn_logit_softcapping", 50.0, UnsupportedModel, r"attn_logit_softcapping 50\.0 is not"),
        ("llama", "llama.residual_scale", 0.5, UnsupportedModel, r"residual_scale 0\.5 is not supported"),
        ("granite", "granite.attention.clamp_kqv", 8.0, UnsupportedModel, r"attention\.clamp_kqv 8\.0 is not"),
        ("granite", "granite.rope.scaling.finetuned", False, UnsupportedModel, "finetuned False is not supported"),
        ("olmo2", "olmo2.attention.sliding_window", 4096, UnsupportedModel, "sliding_window 4096 is not supported"),
        (
            "phi3",
            "phi3.rope.scaling.type",
            "longrope",
            CorruptModel,
            r"m\.gguf: the .* tensor rope_factors_short\.weight",
        ),
    ],
)
def test_wrong_metadata(
    tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path, family: str, key, value, error, message: str
) -> None:
    path = write_gguf(tiny_hf_checkpoints[family](), tmp_path / "m.gguf", "F32", **{key: value})
    with pytest.raises(error, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "blk.1.attn_q.bias"),
        ("llama", "blk.0.ffn_up.bias"),
        ("llama", "blk.2.attn_q_norm.weight"),
        ("llama", "output.bias"),
        ("llama", "rope_factors_long.weight"),
        ("qwen3", "blk.3.attn_norm.weight"),
    ],
)
def test_a_tensor_that_nothing_reads_is_refused_by_name(
    tiny_hf_checkpoints: Tiny, write_gguf: GgufWriter, tmp_path: Path, monkeypatch, family: str, name: str
) -> None:
    """llama.cpp refuses them, too."""
    write = gguf.GGUFWriter.write_header_to_file

    def with_another(self: gguf.GGUFWriter) -> None:
        self.add_tensor(name, np.ones(32, np.float32))
        write(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_another)
    path = write_gguf(tiny_hf_checkpoints[family](), tmp_path / "more.gguf", "F32")
    named = rf"more\.gguf: .* no {family} model of 3 layers reads here: {re.escape(name)}; serve"
    with pytest.raises(UnsupportedModel, match=named):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"gpt2", b"spm!", "tokenizer model 'spm!'"),
        (b"qwen2", b"qwen9", "pre-tokenizer 'qwen9'"),
        (b"{% for", b"{% fur", "chat template is not valid Jinja"),
    ],
)
def test_a_refused_tokenizer_names_its_file(
    llama_gguf: Path, tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(llama_gguf.read_bytes().replace(old, new))

    def build() -> None:
        with closing(open_checkpoint(str(path))) as checkpoint:
            source = checkpoint.tokenizer_source()
        Tokenizer.from_source(source)
        ChatTemplate.from_source(source)

    for act in (build, lambda: read_tokenizer(str(path))) if b"{%" not in old else (build,):
        with pytest.raises(ModelError, match=rf"^odd\.gguf: [^\n]*{message}[^\n]*\Z"):
            act()


def test_kinds_of_tokens_are_those_of_all_tokens(llama_gguf: Path) -> None:
    with closing(open_checkpoint(str(llama_gguf))) as checkpoint, closing(GgufFile(llama_gguf)) as file:
        for types, error, says in (
            ([3, 1], CorruptModel, r"tokenizer\.ggml\.token_type has 2 entries for 384 tokens"),
            ([], CorruptModel, r"token_type has 0 entries"),
            (["3"] * 384, CorruptModel, r"token_type that is no list of numbers"),
            (None, UnsupportedModel, r"lacks tokenizer\.ggml\.token_type, which tells control tokens from text"),
        ):
            with pytest.raises(error, match=says):
                gguf_tokenizer_source(file.metadata | {"tokenizer.ggml.token_type": types}, checkpoint.spec)


def test_the_template_of_conversations_with_tools(llama_gguf: Path) -> None:
    key = gguf.Keys.Tokenizer.CHAT_TEMPLATE_N.format(name="tool_use")
    with closing(open_checkpoint(str(llama_gguf))) as checkpoint, closing(GgufFile(llama_gguf)) as file:
        read = partial(gguf_tokenizer_source, spec=checkpoint.spec)
        assert read(file.metadata).tool_template is None
        assert read(file.metadata | {key: "{{ tools }}"}).tool_template == "{{ tools }}"
        with pytest.raises(CorruptModel, match="chat_template that is no text"):
            read(file.metadata | {key: 3})


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 3000, -1, -4000])
def test_truncated_gguf(llama_gguf: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama_gguf.read_bytes()[:keep])
    with pytest.raises(CorruptModel, match=r"truncated|empty|begin with GGUF") as caught:
        open_checkpoint(str(path))
    assert str(tmp_path) not in str(caught.value)


def test_unreadable_file(llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(llama_gguf))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorruptModel, match="cannot be read: Permission denied"):
        open_checkpoint(str(llama_gguf))
