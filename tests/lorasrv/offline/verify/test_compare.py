"""A right adapter passes `verify` on every family and file, and each way of serving it wrongly is found."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import peft_adapter
from safetensors.torch import load_file, save_file

from adapter_store.errors import AdapterCorrupt
from adapter_store.formats.weights import AdapterWeights, LoraTensors
from adapter_store.validation.validate import check_files
from lorasrv.config import ModelOptions
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.models.spec import ModelSpec, RopeSpec
from lorasrv.offline.verify import served
from lorasrv.offline.verify.compare import Verified, verify
from lorasrv.offline.verify.hf_config import config_from_spec
from lorasrv.offline.verify.job import CannotVerify, VerifyJob
from lorasrv.offline.verify.verdict import ComparisonOutcome
from lorasrv.worker.decoder import Decoder

Tiny = dict[str, Callable[..., Path]]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
PROMPTS = (tuple(range(5, 30)), tuple(range(300, 311)), (7,))
FOR_EVER = "(.*[a-z_.]){40}X"
EXACT = {"quantization": "none", "dtype": "float32"}
ROUNDED = {"quantization": "int8", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def adapters(tiny_hf_checkpoints: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """PEFT's own adapter of all linears for a Hugging Face folder: random, or untrained."""
    made: dict[tuple[Path, bool], Path] = {}

    def make(model: Path, trained: bool = True) -> Path:
        if (model, trained) not in made:
            folder = made[model, trained] = tmp_path_factory.mktemp("adapter")
            peft_adapter(
                model,
                folder,
                seed=1,
                strength=0.3,  # of the size of what the base computes, as a trained one, not ten times that
                lora_alpha=6,
                init_lora_weights=not trained,
                rank_pattern={"layers.1.self_attn.o_proj": 7},
                alpha_pattern={"layers.2.mlp.down_proj": 3},
            )
        return made[model, trained]

    return make


def job(model: Path, adapter: Path, **options: Any) -> VerifyJob:
    checkpoint = open_checkpoint(str(model))
    checkpoint.close()
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = adapter / "adapter_model.safetensors"
    checked = check_files(config, weights, base_shapes(checkpoint.spec), 64)
    return VerifyJob(
        model=ModelOptions(model=str(model), device="cpu", **{"kernels": "torch", **EXACT, **options}),
        kv_dtype="auto",
        max_lora_rank=64,
        key=checked.spec.key,
        config=config,
        weights=weights,
        weights_digest=checked.spec.weights_digest,
        prompts=PROMPTS,
        new_tokens=4,
    )


def run(asked: VerifyJob) -> Verified:
    done = verify(asked, lambda *_: None)
    json.dumps(done.verdict.to_dict(), allow_nan=False)
    return done


class TestRight:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_is_exact_in_float32(self, tiny_hf_checkpoints: Tiny, adapters, family: str) -> None:
        model = tiny_hf_checkpoints[family]()
        verdict = run(job(model, adapters(model))).verdict
        figures = verdict.figures
        assert (verdict.outcome, verdict.reasons, verdict.notes) == (ComparisonOutcome.EXACT, (), ())
        assert figures.adapter.greedy_equal == figures.adapter.positions == 15
        assert figures.linears.compared == figures.linears.adapted
        assert figures.effect.rms > 0.1 * figures.base.spread, "the adapter was meant to change something"
        assert figures.effect.tokens_changed
        assert figures.shows_in_logits

    @pytest.mark.parametrize(
        "family",
        [
            pytest.param(f, marks=() if f in ("llama", "gemma3") else pytest.mark.long)
            for f in FAMILIES
            if f != "mistral"
        ],
    )
    def test_gguf_files_too(
        self, tiny_hf_checkpoints: Tiny, adapters, write_gguf: Callable[..., Path], tmp_path: Path, family: str
    ) -> None:
        """The oracle is built from what we read in the file: nothing of the folder is there."""
        model = tiny_hf_checkpoints[family]()
        file = write_gguf(model, tmp_path / "tiny.gguf", "F32")
        verdict = run(job(file, adapters(model))).verdict
        assert (verdict.outcome, verdict.reasons) == (ComparisonOutcome.EXACT, ())

    @pytest.mark.parametrize(
        ("family", "rope"),
        [
            ("llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
            (
                "llama",
                {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
            ),
            ("phi3", {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}),
        ],
    )
    def test_gguf_files_with_other_ropes(
        self, tiny_hf_checkpoints: Tiny, adapters, write_gguf, tmp_path: Path, family: str, rope: dict[str, Any]
    ) -> None:
        model = tiny_hf_checkpoints[family](rope_parameters=rope, num_key_value_heads=4)
        verdict = run(job(write_gguf(model, tmp_path / "tiny.gguf", "F32"), adapters(model))).verdict
        assert verdict.outcome is ComparisonOutcome.EXACT

    @pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3"])
    @pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.long), "numba"])
    def test_rounding_is_within(self, tiny_hf_checkpoints: Tiny, adapters, family: str, kernels: str) -> None:
        model = tiny_hf_checkpoints[family]()
        done = run(job(model, adapters(model), kernels=kernels, **ROUNDED))
        assert (done.verdict.outcome, done.verdict.reasons) == (ComparisonOutcome.WITHIN, ())
        assert (done.quantization, done.kernels) == ("int8", kernels)
        assert done.verdict.figures.adapter.rms > 0

    @pytest.mark.parametrize("quantization", ["int4", "q3h"])
    def test_few_levels_are_no_error(self, tiny_hf_checkpoints: Tiny, adapters, quantization: str) -> None:
        """The oracle has the rounded weights: what they cost the base is another matter (docs/quantization.md)."""
        model = tiny_hf_checkpoints["llama"]()
        verdict = run(job(model, adapters(model), quantization=quantization, dtype="bfloat16")).verdict
        assert (verdict.outcome, verdict.reasons) == (ComparisonOutcome.WITHIN, ())

    def test_an_untrained_adapter_is_told(self, tiny_hf_checkpoints: Tiny, adapters) -> None:
        model = tiny_hf_checkpoints["llama"]()
        verdict = run(job(model, adapters(model, trained=False))).verdict
        assert verdict.outcome is ComparisonOutcome.EXACT
        assert verdict.figures.effect.max_abs == 0
        assert "no effect" in verdict.notes[0]

    @pytest.mark.parametrize(
        "fields",
        [
            {"target_modules": FOR_EVER},
            {"exclude_modules": FOR_EVER},
            {"layers_to_transform": [0, 1, 2], "layers_pattern": FOR_EVER},
            {"layers_to_transform": [0, 1, 2], "layers_pattern": [FOR_EVER]},
        ],
        ids=lambda fields: max(fields),
    )
    def test_no_pattern_of_modules_is_matched(
        self, tiny_hf_checkpoints: Tiny, adapters, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
    ) -> None:
        """One that takes for ever would otherwise cost the whole time limit."""
        model = tiny_hf_checkpoints["llama"]()
        asked = job(model, adapters(model))
        named = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
        config = {**asked.config, **named, **fields}
        base = open_checkpoint(str(model))
        base.close()
        check_files(config, asked.weights, base_shapes(base.spec), 64)
        compiled = re._compiler.compile  # type: ignore[attr-defined]

        def compiling(pattern: Any, flags: int) -> Any:
            assert FOR_EVER not in str(pattern), "an uploaded expression is about to be run"
            return compiled(pattern, flags)

        monkeypatch.setattr(re._compiler, "compile", compiling)  # type: ignore[attr-defined]
        assert run(replace(asked, config=config)).verdict.outcome is ComparisonOutcome.EXACT

    def test_peft_is_told_what_is_honoured_and_nothing_else(self, tiny_hf_checkpoints: Tiny, adapters) -> None:
        """`megatron_core` names a module to import, and what training needed PEFT might still compute."""
        model = tiny_hf_checkpoints["llama"]()
        asked = job(model, adapters(model))
        config = {**asked.config, "megatron_config": {"a": 1}, "megatron_core": "no.such.module", "runtime_config": 5}
        assert run(replace(asked, config=config)).verdict.outcome is ComparisonOutcome.EXACT

    def test_the_job_survives_the_way(self, tiny_hf_checkpoints: Tiny, adapters) -> None:
        model = tiny_hf_checkpoints["llama"]()
        asked = job(model, adapters(model))
        assert VerifyJob.from_line(asked.to_line()) == asked
        other = replace(asked, model=replace(asked.model, quantized_weights=Path("x")))
        assert VerifyJob.from_line(other.to_line()) == other


def _changed(change: Callable[[tuple[int, str], LoraTensors], LoraTensors]) -> Callable[..., Any]:
    """`pack_adapter`, given other tensors than the file has."""
    pack = served.pack_adapter

    def wrong(spec: ModelSpec, layout: Any, weights: AdapterWeights, dtype: torch.dtype) -> Any:
        tensors = {site: change(site, weights[site]) for site in weights}
        return pack(spec, layout, AdapterWeights(weights.spec, tensors), dtype)

    return wrong


def _twice_as_strong(_: tuple[int, str], t: LoraTensors) -> LoraTensors:
    return replace(t, scaling=2 * t.scaling)


def _a_transposed(_: tuple[int, str], t: LoraTensors) -> LoraTensors:
    return replace(t, a=t.a.reshape(t.a.shape[::-1]).T.copy())


def _one_missing(site: tuple[int, str], t: LoraTensors) -> LoraTensors:
    return replace(t, b=0 * t.b) if site == (1, "self_attn.o_proj") else t


def _one_without_its_alpha(site: tuple[int, str], t: LoraTensors) -> LoraTensors:
    return replace(t, scaling=6 / 4) if site == (2, "mlp.down_proj") else t


def _reversed_ranks_of_b(_: tuple[int, str], t: LoraTensors) -> LoraTensors:
    return replace(t, b=t.b[:, ::-1].copy())


SABOTAGE = {
    "2x": _twice_as_strong,
    "transposed": _a_transposed,
    "missing": _one_missing,
    "alpha": _one_without_its_alpha,
    "ranks": _reversed_ranks_of_b,
}


class TestWrong:
    @pytest.mark.parametrize("sabotage", SABOTAGE)
    @pytest.mark.parametrize(
        "family",
        ["llama", pytest.param("gemma2", marks=pytest.mark.long), pytest.param("phi3", marks=pytest.mark.long)],
    )
    @pytest.mark.parametrize(
        ("kernels", "options"),
        [
            pytest.param("torch", EXACT, id="torch-float32"),
            pytest.param("numba", ROUNDED, id="numba-int8-bf16", marks=pytest.mark.long),
        ],
    )
    def test_panels(
        self,
        tiny_hf_checkpoints: Tiny,
        adapters,
        monkeypatch: pytest.MonkeyPatch,
        sabotage: str,
        family: str,
        kernels: str,
        options: dict[str, str],
    ) -> None:
        model = tiny_hf_checkpoints[family]()
        monkeypatch.setattr(served, "pack_adapter", _changed(SABOTAGE[sabotage]))
        verdict = run(job(model, adapters(model), kernels=kernels, **options)).verdict
        assert verdict.outcome is ComparisonOutcome.DIFFERS
        assert "linears are off" in verdict.reasons[0]
        wrong, where = (
            verdict.figures.linears,
            {"missing": "layers.1.self_attn.o_proj", "alpha": "layers.2.mlp.down_proj"},
        )
        if sabotage in where:
            assert wrong.wrong == (where[sabotage],)
        else:
            assert wrong.num_wrong == wrong.compared

    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    @pytest.mark.parametrize(("kernels", "options"), [("torch", EXACT), ("numba", ROUNDED)])
    def test_a_site_that_the_forward_pass_leaves_out(
        self,
        tiny_hf_checkpoints: Tiny,
        adapters,
        monkeypatch: pytest.MonkeyPatch,
        family: str,
        kernels: str,
        options: dict[str, str],
    ) -> None:
        """Its panels are right, so that only the logits can tell."""
        linear = Decoder._linear

        def without_down(self: Decoder, weights: Any, x: torch.Tensor, layer: int, site: int, tables: Any) -> Any:
            return weights(x) if site == 3 else linear(self, weights, x, layer, site, tables)

        monkeypatch.setattr(Decoder, "_linear", without_down)
        model = tiny_hf_checkpoints[family]()
        verdict = run(job(model, adapters(model), kernels=kernels, **options)).verdict
        assert verdict.figures.linears.num_wrong == 0
        assert (verdict.outcome, len(verdict.reasons)) == (ComparisonOutcome.DIFFERS, 1)
        assert "logits with the adapter" in verdict.reasons[0]

    def test_a_base_that_gets_the_adapter(
        self, tiny_hf_checkpoints: Tiny, adapters, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its large error is no licence for the adapter's."""
        right = served.ServedModel.logits

        def mixed_up(self: Any, prompt: Any, new_tokens: int) -> Any:
            answer = right(self, prompt, new_tokens)
            return replace(answer, plain=answer.adapted)

        monkeypatch.setattr(served.ServedModel, "logits", mixed_up)
        model = tiny_hf_checkpoints["llama"]()
        verdict = run(job(model, adapters(model), **ROUNDED)).verdict
        assert verdict.outcome is ComparisonOutcome.DIFFERS
        assert "the base itself" in verdict.reasons[0]


class TestRefused:
    @pytest.mark.long
    def test_logits_that_are_no_numbers(self, tiny_hf_checkpoints: Tiny, adapters, tmp_path: Path) -> None:
        model = tiny_hf_checkpoints["llama"]()
        source = adapters(model)
        tensors = load_file(source / "adapter_model.safetensors")
        save_file(
            {n: t * 1e30 if "lora_B" in n else t for n, t in tensors.items()}, tmp_path / "adapter_model.safetensors"
        )
        (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
        with pytest.raises(CannotVerify, match="overflows"):
            run(job(model, tmp_path))

    def test_another_file_than_was_stored(self, tiny_hf_checkpoints: Tiny, adapters, tmp_path: Path) -> None:
        model = tiny_hf_checkpoints["llama"]()
        asked = job(model, adapters(model))
        damaged = tmp_path / "blob"
        data = bytearray(asked.weights.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(AdapterCorrupt):
            run(replace(asked, weights=damaged))
        digest = hashlib.sha256(data).hexdigest()
        with pytest.raises(AdapterCorrupt, match="not what its name says"):
            run(replace(asked, weights=damaged, weights_digest=digest))

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"family": "falcon"}, "falcon"),
            ({"qkv_bias": True}, "biases"),
            ({"sliding_window": 4, "windowed_layers": (True, False)}, "window on some layers"),
        ],
    )
    def test_a_base_that_transformers_has_not(self, changes: dict[str, Any], named: str) -> None:
        spec = ModelSpec("llama", 2, 8, 16, 2, 1, 4, 32, 64, 1e-5, rope=RopeSpec())
        with pytest.raises(CannotVerify, match=named):
            config_from_spec(replace(spec, **changes))


@pytest.fixture
def child(tiny_hf_checkpoints: Tiny, adapters) -> Iterator["subprocess.Popen[bytes]"]:
    """The real process, given a real job."""
    model = tiny_hf_checkpoints["llama"]()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lorasrv.offline.verify.worker"],
        stdin=-1,
        stdout=-1,
        stderr=-1,
        env={**os.environ},
    )
    assert process.stdin is not None
    process.stdin.write(job(model, adapters(model)).to_line())
    process.stdin.flush()
    yield process
    process.kill()
    process.communicate()


class TestProcess:
    def test_it_ends_when_nobody_listens_any_more(self, child: "subprocess.Popen[bytes]") -> None:
        """As when the server was killed."""
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 1
        assert b"result" not in out

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux")
    def test_it_gives_way(self, child: "subprocess.Popen[bytes]") -> None:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["progress"][1] == 0.0
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[16]) == 19
