"""`lorasrv quantize` and its files, on tiny models; `tests/e2e/test_perplexity.py` says what it gains on a real one."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_engine import GREEDY, offline_engine
from typer.testing import CliRunner

from api.cli.program import app
from lorasrv.config import ModelOptions
from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedFormat
from lorasrv.models.code_format import LEVELS
from lorasrv.models.loader import Checkpoint, open_checkpoint
from lorasrv.models.loader.quantized import QuantizedCheckpoint, linear_names, write_codes
from lorasrv.models.quantization import FORMATS, get_format
from lorasrv.models.quantization.grouped import GroupQuantFormat
from lorasrv.offline.quantize import Quantized, moments_of_layers, quantize, read_formats
from lorasrv.worker.base_format import choose_format
from lorasrv.worker.weights import ModelWeights, load_weights
from sgmv_kernels.formats.weight_codes import INT4_LEVELS
from sgmv_kernels.ops import Ops

OPS = Ops(torch.device("cpu"))
TEXTS = [[(7 * i + 3 * j) % 380 for i in range(60)] for j in range(4)]
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module", params=["int4", "q3h"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def floats(model: Path) -> Iterator[Checkpoint]:
    with closing(open_checkpoint(str(model))) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def weights(floats: Checkpoint) -> ModelWeights:
    return load_weights(floats, get_format("none", OPS), torch.float32)


@pytest.fixture(scope="module")
def made(floats: Checkpoint, weights: ModelWeights, kind: str) -> Quantized:
    return quantize(weights, read_formats(floats, kind, 64), TEXTS, lambda *_: None)


@pytest.fixture(scope="module")
def file(floats: Checkpoint, made: Quantized, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("codes") / "tiny.safetensors"
    write_codes(path, floats, made.formats, made.codes)
    return path


@pytest.fixture
def damaged(file: Path, tmp_path: Path) -> Callable[..., Path]:
    """damaged(change of tensors, **header facts) -> another file."""

    def write(change: Change = lambda tensors: None, **facts: str) -> Path:
        tensors = load_file(file)
        change(tensors)
        with safe_open(file, framework="pt") as reader:
            save_file(tensors, tmp_path / "bad.safetensors", {**reader.metadata(), **facts})
        return tmp_path / "bad.safetensors"

    return write


def opened(model: Path, file: Path) -> QuantizedCheckpoint:
    checkpoint = open_checkpoint(str(model), quantized_weights=file)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    return checkpoint


def test_moments_are_those_of_the_inputs(model: Path, weights: ModelWeights) -> None:
    from transformers import AutoModelForCausalLM

    found = dict(moments_of_layers(weights, TEXTS, OPS))
    oracle = AutoModelForCausalLM.from_pretrained(model)
    layer = oracle.model.layers[2]
    seen: list[list[torch.Tensor]] = [[] for _ in range(4)]
    watched = layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj
    for module, inputs in zip(watched, seen, strict=True):
        module.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0][0]))
    with torch.no_grad():
        for text in TEXTS:
            oracle(torch.tensor([text]))
    for moments, inputs in zip(found[2], seen, strict=True):
        x = torch.cat(inputs)
        torch.testing.assert_close(moments, x.T @ x, rtol=1e-4, atol=1e-3)


def test_watching_few_layers_at_a_time_gives_the_same(weights: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(moments_of_layers(weights, TEXTS, OPS))
    monkeypatch.setattr("lorasrv.offline.quantize.MAX_MOMENT_BYTES", 1)
    for layer, moments in moments_of_layers(weights, TEXTS, OPS):
        assert all(torch.equal(one, other) for one, other in zip(moments, whole[layer], strict=True))


def test_linears_change_less_than_by_rounding_alone(made: Quantized) -> None:
    assert 0 < made.error < made.error_of_rounding / 1.5


def test_what_is_served_is_what_was_rounded(model: Path, made: Quantized, file: Path, kind: str) -> None:
    with closing(opened(model, file)) as checkpoint:
        fmt = choose_format(ModelOptions(quantized_weights=file), checkpoint, OPS)
        assert fmt.name == kind
        weights = load_weights(checkpoint, fmt, torch.float32)
    for name in linear_names(checkpoint.spec):
        assert torch.equal(weights.dequantized(name), made.codes[name].dequantize())


def test_it_answers_and_another_format_answers_otherwise(model: Path, file: Path, kind: str) -> None:
    def answers(quantization: str, quantized: Path | None) -> list[list[int]]:
        with offline_engine(model, quantization=quantization, quantized_weights=quantized) as llm:
            return [done.token_ids for done in llm.generate(TEXTS, GREEDY)]

    assert answers("auto", file) == answers("auto", file) != answers("int8", None)


@pytest.mark.parametrize("family", ["llama", "phi3", "mpt"])
def test_a_file_of_any_family_is_served_in_its_own_format(
    tiny_hf_checkpoints: dict[str, Callable[..., Path]], tmp_path: Path, family: str
) -> None:
    """Its linears have names of their own in mpt."""
    folder, path = tiny_hf_checkpoints[family](), tmp_path / "codes.safetensors"
    with closing(open_checkpoint(str(folder))) as checkpoint:
        floats = load_weights(checkpoint, get_format("none", OPS), torch.float32)
        done = quantize(floats, read_formats(checkpoint, "int4", 64), TEXTS[:1], lambda *_: None)
        write_codes(path, checkpoint, done.formats, done.codes)
    with closing(opened(folder, path)) as checkpoint:
        fmt = choose_format(ModelOptions(quantized_weights=path), checkpoint, OPS)
        assert fmt.name == "int4"
        assert load_weights(checkpoint, fmt, torch.float32).kept_codes == len(linear_names(checkpoint.spec))


def test_another_format_than_the_files_is_refused(model: Path, file: Path, kind: str) -> None:
    with closing(opened(model, file)) as checkpoint:
        for name, group in (("int8", None), ("none", None), (kind, 128)):
            options = ModelOptions(quantization=name, quantization_group=group, quantized_weights=file)
            with pytest.raises(UnsupportedFormat, match="--quantized-weights"):
                choose_format(options, checkpoint, OPS)
        named = ModelOptions(quantization=kind, quantization_group=64, quantized_weights=file)
        assert choose_format(named, checkpoint, OPS).name == kind


DOWN, UP = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"


def cut(name: str, *parts: str, rows: int | None = None, columns: int | None = None) -> Change:
    """Takes rows or columns away from a linear's tensors."""
    return lambda t: t.update({f"{name}.{part}": t[f"{name}.{part}"][:rows, :columns].contiguous() for part in parts})


class TestFiles:
    def test_of_another_model(self, file: Path, tiny_hf_checkpoints: dict[str, Callable[..., Path]]) -> None:
        for changes, says in (
            ({"seed": 1}, "made from other weights"),
            ({"num_hidden_layers": 4}, r"lacks \d+ linears"),
        ):
            with pytest.raises(CorruptModel, match=says):
                opened(tiny_hf_checkpoints["llama"](**changes), file)

    def test_that_is_something_else(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"no file .*x\.safetensors"):
            opened(model, tmp_path / "x.safetensors")
        with pytest.raises(CorruptModel, match="not written by lorasrv quantize"):
            opened(model, model / "model.safetensors")

    @pytest.mark.parametrize("length", [None, 0, 7, 100, -1])
    def test_that_is_no_safetensors_file(self, model: Path, file: Path, tmp_path: Path, length: int | None) -> None:
        data = b"hello, this is no safetensors file" if length is None else file.read_bytes()[:length]
        (tmp_path / "cut.safetensors").write_bytes(data)
        for path in (tmp_path / "cut.safetensors", tmp_path):
            with pytest.raises(CorruptModel, match="cannot be read"):
                opened(model, path)

    @pytest.mark.parametrize(
        ("change", "facts", "says"),
        [
            (dict, {"kind": "lorasrv codes 3"}, "another version"),
            (cut(DOWN, "scales", columns=0), {}, "scales"),
            *((dict, {"group": group}, "which is no format and group") for group in ("48", "0", "x", "")),
            (dict, {"group": "128"}, "scales as"),
            (dict, {"quantization": "int3"}, "codes in 'int3:64'"),
            (lambda tensors: tensors.update({f"{DOWN}.codes": torch.zeros(3, 3)}), {}, "codes as"),
            (cut(UP, "codes", "scales", "minima", rows=-1), {}, "up_proj"),
        ],
    )
    def test_with_wrong_facts_or_shapes(self, model: Path, damaged, change: Change, facts: Any, says: str) -> None:
        with pytest.raises(CorruptModel, match=says):
            opened(model, damaged(change, **facts))

    def test_with_codes_above_their_levels(self, model: Path, damaged: Callable[..., Path], kind: str) -> None:
        path = damaged(lambda tensors: tensors[f"{DOWN}.codes"].fill_(0xFF))
        says = pytest.raises(CorruptModel, match="codes above 10") if kind == "q3h" else nullcontext()
        with closing(opened(model, path)) as checkpoint, says:
            checkpoint.codes(DOWN)

    def test_a_disk_that_refuses_leaves_nothing(
        self, floats: Checkpoint, made: Quantized, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(tensors: object, path: Path, facts: object) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("lorasrv.models.loader.quantized.save_file", full)
        with pytest.raises(OSError, match="No space"):
            write_codes(tmp_path / "out.safetensors", floats, made.formats, made.codes)
        assert not list(tmp_path.iterdir())


def test_eight_bit_files_are_rounded_where_fewer_bits_are_asked_for(
    llama_dir: Path, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_gguf(llama_dir, tmp_path / "q8.gguf", "Q8_0")
    with closing(open_checkpoint(str(file))) as checkpoint:
        held = checkpoint.codes("model.layers.0.mlp.down_proj.weight")
        assert held is not None
        for quantization, keeps in (("auto", True), ("int8", True), ("int4", False)):
            fmt = choose_format(ModelOptions(quantization=quantization), checkpoint, OPS)
            assert fmt.keeps(held) == keeps
    q4 = write_gguf(llama_dir, tmp_path / "q4.gguf", "Q4_1")
    with closing(open_checkpoint(str(q4))) as checkpoint:
        fmt = choose_format(ModelOptions(), checkpoint, OPS)
        assert (fmt.name, fmt.keeps(held)) == ("int4", True)


class TestCommand:
    @pytest.fixture
    def run(self, model: Path) -> Callable[..., Any]:
        return lambda *args: CliRunner().invoke(app, ["quantize", "--model", str(model), *map(str, args)])

    def test_writes_a_file_that_serves(self, run, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "tiny.safetensors"
        done = run(out, "--json")
        assert done.exit_code == 0, done.output
        facts = json.loads(done.stdout)
        assert facts["bytes"] == out.stat().st_size
        assert facts["output_error"] < facts["output_error_of_rounding"]
        with closing(opened(model, out)) as checkpoint:
            codes = checkpoint.codes("model.layers.2.self_attn.q_proj.weight")
        assert codes is not None
        assert (codes.levels, codes.group) == (INT4_LEVELS, 64)

    def test_reads_a_text_and_says_what_it_did(self, run, model: Path, corpus: list[str], tmp_path: Path) -> None:
        out, text = tmp_path / "tiny.safetensors", tmp_path / "some.txt"
        text.write_text("\n".join(corpus) * 40, "utf-8")
        arguments = (out, "--text", text, "--quantization", "q3h")
        done = run(*arguments)
        assert done.exit_code == 0, done.output
        assert "plain rounding" in done.stdout
        assert "100" not in done.stdout
        with closing(opened(model, out)) as checkpoint:
            assert {str(form) for forms in checkpoint.formats.values() for form in forms} == {"q3h:64"}
        assert isinstance(run(*arguments).exception, Exception), "it is there now"
        assert run(*arguments, "--force").exit_code == 0

    @pytest.mark.parametrize(
        ("out", "arguments", "said"),
        [
            ("x", ["--quantization", "int8"], "choose from int4, q3h"),
            ("x", ["--quantization-group", "48"], "choose from 32, 64, 128"),
            ("x", ["--quantization-group", "128"], "do not divide the 64 inputs"),
            ("x", ["--model", "/nowhere"], "not found"),
            ("no/x", [], "not a writable folder"),
            ("", ["--force"], "folder"),
            ("x", ["--text", "short"], "tokens"),
            ("x", ["--text", "not-utf8"], "UTF-8"),
        ],
    )
    def test_wrong_arguments(
        self, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, arguments: list[str], said: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("short").write_text("hello")
        Path("not-utf8").write_bytes(b"\xff\xfe\x00")
        assert said in str(run(tmp_path / out, *arguments).exception)
        assert {path.name for path in tmp_path.iterdir()} == {"short", "not-utf8"}

    def test_a_missing_text_is_wrong_usage(self, run, tmp_path: Path) -> None:
        done = run(tmp_path / "x", "--text", str(tmp_path / "none"))
        assert (done.exit_code, "--text" in done.output) == (2, True)
        assert not any(tmp_path.iterdir())


def test_levels_are_named_once() -> None:
    served = {name: fmt for name, fmt in FORMATS.items() if issubclass(fmt, GroupQuantFormat)}
    assert {name: served[name].levels for name in LEVELS} == LEVELS
