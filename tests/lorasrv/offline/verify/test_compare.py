"""A right adapter passes `verify` on every family and file, and each way of serving it wrongly is found."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from multimodal import LANGUAGE, WHOLE, multimodal_adapter, write_multimodal
from peft_adapters import gptq_layers, peft_adapter
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
from sgmv_kernels.ops import Ops

Tiny = dict[str, Callable[..., Path]]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "ministral3", "mpt", "phi3", "smollm3")
FAMILIES += ("granite", "olmo2")
PROMPTS = (tuple(range(5, 30)), tuple(range(300, 311)), (7,))
FOR_EVER = "(.*[a-z_.]){40}X"
EXACT = {"quantization": "none", "dtype": "float32"}
ROUNDED = {"quantization": "int8", "dtype": "bfloat16"}
FOUR_BITS = {"quantization": "int4", "dtype": "float32"}
EVERYTHING = {"use_dora": True, "bias": "lora_only", "modules_to_save": ["norm"], "use_rslora": True}
HEAD_COPY = {
    "target_modules": ["q_proj", "v_proj"],
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [5, 9, 70],
}
BASES_COPY = {"target_modules": ["q_proj", "embed_tokens"], "save_embedding_layers": True}
TIED = {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True}


def long(*values: object, **how: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long, **how)


def shapes(model: Path) -> Any:
    with closing(open_checkpoint(str(model))) as checkpoint:
        return base_shapes(checkpoint.spec)


@pytest.fixture(scope="module")
def job_of(tiny_hf_checkpoints: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VerifyJob]:
    """job_of(family, file of the model, options) with PEFT's own adapter of all linears: random, or untrained."""

    @cache
    def adapter(folder: Path, trained: bool) -> Path:
        target, is_mpt = tmp_path_factory.mktemp("adapter"), "mpt" in folder.name
        peft_adapter(
            folder,
            target,
            seed=1,
            strength=0.3,  # of the size of what the base computes, as a trained one, not ten times that
            lora_alpha=6,
            init_lora_weights=not trained,
            rank_pattern={"blocks.1.attn.out_proj" if is_mpt else "layers.1.self_attn.o_proj": 7},
            alpha_pattern={"blocks.2.ffn.down_proj" if is_mpt else "layers.2.mlp.down_proj": 3},
        )
        return target

    def make(
        family: str = "llama",
        file: Callable[[Path], Path] = lambda folder: folder,
        *,
        changes: Mapping[str, Any] = MappingProxyType({}),
        source: Path | None = None,
        trained: bool = True,
        stored: str = "bf16",
        **options: Any,
    ) -> VerifyJob:
        folder = tiny_hf_checkpoints[family](**changes)
        source, model = source or adapter(folder, trained), file(folder)
        config, weights = json.loads((source / "adapter_config.json").read_text()), source / "adapter_model.safetensors"
        checked = check_files(config, weights, shapes(model), 64, stored=stored)
        return VerifyJob(
            model=ModelOptions(model=str(model), device="cpu", **{"kernels": "torch", **EXACT, **options}),
            kv_dtype="auto",
            max_lora_rank=64,
            key=checked.spec.key,
            config=config,
            weights=weights,
            weights_digest=checked.spec.weights_digest,
            stored=checked.spec.stored,
            prompts=PROMPTS,
            new_tokens=4,
        )

    return make


def run(asked: VerifyJob) -> Verified:
    done = verify(asked, lambda *_: None)
    json.dumps(done.verdict.to_dict(), allow_nan=False)
    return done


def expect(outcome: ComparisonOutcome, asked: VerifyJob) -> Verified:
    done = run(asked)
    assert (done.verdict.outcome, done.verdict.reasons) == (outcome, ())
    return done


ROPES = {
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "yarn": (
        "llama",
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "partial": ("phi3", {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}),
}


class TestRight:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_is_exact_in_float32(self, job_of, family: str) -> None:
        verdict = expect(ComparisonOutcome.EXACT, job_of(family)).verdict
        figures = verdict.figures
        assert verdict.notes == ()
        assert figures.adapter.greedy_equal == figures.adapter.positions == 15
        assert figures.linears.compared == figures.linears.adapted
        assert figures.effect.rms > 0.1 * figures.base.spread, "the adapter was meant to change something"
        assert figures.effect.tokens_changed
        assert figures.shows_in_logits

    @pytest.mark.parametrize(("family", "own"), [("qwen2", {}), ("llama", {"use_dora": True})])
    def test_a_lightly_trained_adapter_is_exact(
        self, job_of, tiny_hf_checkpoints: Tiny, tmp_path: Path, family: str, own: dict[str, Any]
    ) -> None:
        """Of two outputs that are compared, with the adapter and without, rounding is a part of the difference."""
        light = {"strength": 1e-4, "target_modules": ["q_proj"]}
        peft_adapter(tiny_hf_checkpoints[family](), tmp_path, seed=1, **light, **own)
        expect(ComparisonOutcome.EXACT, job_of(family, source=tmp_path))

    @pytest.mark.parametrize(
        ("family", "own"),
        [
            ("qwen2", EVERYTHING),
            ("gemma3", EVERYTHING),
            ("llama", HEAD_COPY),
            ("qwen2", BASES_COPY),
            ("qwen2", TIED),
            *((family, {"alora_invocation_tokens": [5, 9]}) for family in ("llama", "qwen2", "mpt")),
        ],
    )
    @pytest.mark.filterwarnings("ignore:.*ensure_weight_tying", "ignore:Careful, disabling adapter layers")
    def test_what_an_adapter_has_beside_lora(
        self, job_of, tiny_hf_checkpoints: Tiny, tmp_path: Path, family: str, own: dict[str, Any]
    ) -> None:
        peft_adapter(tiny_hf_checkpoints[family](), tmp_path, seed=1, strength=0.3, **own)
        expect(ComparisonOutcome.EXACT, job_of(family, source=tmp_path))
        expect(ComparisonOutcome.WITHIN, job_of(family, source=tmp_path, quantization="int8", kernels="numba"))

    @pytest.mark.parametrize(("family", "table"), [("qwen2", "model.embed_tokens"), ("mpt", "transformer.wte")])
    def test_tied_copies(self, job_of, tiny_hf_checkpoints: Tiny, tmp_path: Path, family: str, table: str) -> None:
        own = {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "ensure_weight_tying": True}
        peft_adapter(tiny_hf_checkpoints[family](), tmp_path, strength=0.3, **own)
        config = tmp_path / "adapter_config.json"
        saved = json.loads(config.read_text())
        # PEFT saves the embedding's name in place of the head's, and does not know mpt's.
        assert saved["modules_to_save"] == [table]
        config.write_text(json.dumps(saved | {"modules_to_save": [table, "lm_head"]}))
        expect(ComparisonOutcome.EXACT, job_of(family, source=tmp_path))

    @pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")
    def test_a_copy_beside_the_table_of_another_base(self, job_of, tiny_hf_checkpoints: Tiny, tmp_path: Path) -> None:
        """PEFT writes the table over the tied one, also where the embedding, whose name that has, has a copy."""
        own = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "save_embedding_layers": True}
        peft_adapter(tiny_hf_checkpoints["qwen2"](), tmp_path, strength=0.3, **own)
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        tensors["base_model.model.lm_head.weight"] *= 1.1
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        expect(ComparisonOutcome.EXACT, job_of("qwen2", source=tmp_path))

    def test_pooled_inputs(self, job_of, tiny_hf_checkpoints: Tiny, tmp_path: Path) -> None:
        with gptq_layers():
            peft_adapter(tiny_hf_checkpoints["llama"](), tmp_path, lora_alpha=3, use_qalora=True, qalora_group_size=32)
        expect(ComparisonOutcome.EXACT, job_of(source=tmp_path))
        expect(ComparisonOutcome.EXACT, job_of(source=tmp_path, stored="int8"))

    @pytest.mark.parametrize("kind", WHOLE)
    def test_the_language_part_of_a_multimodal_model(self, job_of, tmp_path: Path, kind: str) -> None:
        directory = write_multimodal(tmp_path / "model", kind)
        config = json.loads((directory / "config.json").read_text())
        config["text_config"]["tie_word_embeddings"] = True  # only the whole model's counts
        (directory / "config.json").write_text(json.dumps(config))
        multimodal_adapter(directory, tmp_path / "mia", LANGUAGE)
        expect(ComparisonOutcome.EXACT, job_of(file=lambda _: directory, source=tmp_path / "mia"))

    @pytest.mark.parametrize(
        ("family", "changes"),
        [
            *((family, {}) for family in ("llama", "gemma3")),
            *(long(family, {}) for family in ("qwen2", "qwen3", "gemma", "gemma2", "phi3")),
            *((family, {}) for family in ("ministral3", "granite", "olmo2")),
            ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "mlp_bias": True}),
            *((family, {"rope_parameters": rope, "num_key_value_heads": 4}) for family, rope in ROPES.values()),
        ],
        ids=lambda value: value if isinstance(value, str) else value.get("rope_parameters", {}).get("rope_type", ""),
    )
    def test_gguf_files_too(
        self, job_of, write_gguf: Callable[..., Path], tmp_path: Path, family: str, changes
    ) -> None:
        """The oracle is built from what we read in the file: nothing of the folder is there."""
        asked = job_of(family, lambda folder: write_gguf(folder, tmp_path / "tiny.gguf", "F32"), changes=changes)
        expect(ComparisonOutcome.EXACT, asked)

    @pytest.mark.parametrize(
        ("family", "kernels", "quantization"),
        [
            *((family, "numba", "int8") for family in ("llama", "qwen2", "gemma3", "phi3")),
            *(long(family, "torch", "int8") for family in ("llama", "qwen2", "gemma3", "phi3")),
            *(("llama", "torch", few) for few in ("int4", "q3h")),
        ],
    )
    def test_rounding_is_within(self, job_of, family: str, kernels: str, quantization: str) -> None:
        """The oracle has the rounded weights: what they cost the base is another matter (docs/quantization.md)."""
        asked = job_of(family, kernels=kernels, quantization=quantization, dtype="bfloat16")
        done = expect(ComparisonOutcome.WITHIN, asked)
        assert (done.quantization, done.kernels) == (quantization, kernels)
        assert done.verdict.figures.adapter.rms > 0

    @pytest.mark.parametrize("kernels", ["torch", "numba"])
    def test_int8_is_peft_with_the_matrices_of_the_codes(self, job_of, kernels: str) -> None:
        expect(ComparisonOutcome.EXACT, job_of(stored="int8", kernels=kernels))

    @pytest.mark.parametrize("family", ["llama", "granite", long("qwen2"), long("gemma2")])
    @pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")  # PEFT's advice for tied weights
    def test_the_head_and_the_embedding_too(self, job_of, tiny_hf_checkpoints, tmp_path: Path, family: str) -> None:
        targets, model = ["q_proj", "lm_head", "embed_tokens"], tiny_hf_checkpoints[family]()
        peft_adapter(model, tmp_path / "x", strength=0.3, target_modules=targets, save_embedding_layers=False)
        expect(ComparisonOutcome.EXACT, job_of(family, source=tmp_path / "x"))

    def test_an_adapter_of_the_head_alone_has_an_effect(self, job_of, tiny_hf_checkpoints, tmp_path: Path) -> None:
        model = tiny_hf_checkpoints["llama"]()
        options = {"target_modules": ["lm_head"], "save_embedding_layers": False}
        peft_adapter(model, tmp_path / "x", strength=0.3, **options)
        done = expect(ComparisonOutcome.EXACT, job_of(source=tmp_path / "x"))
        assert (done.verdict.notes, done.verdict.figures.linears.adapted) == ((), 1)

    def test_an_untrained_adapter_is_told(self, job_of) -> None:
        verdict = expect(ComparisonOutcome.EXACT, job_of(trained=False)).verdict
        assert verdict.figures.effect.max_abs == 0
        assert "no effect" in verdict.notes[0]

    @pytest.mark.parametrize(
        "fields",
        [
            {"target_modules": f"{FOR_EVER}|.*_proj"},
            {"exclude_modules": FOR_EVER},
            {"layers_to_transform": [0, 1, 2], "layers_pattern": f"{FOR_EVER}|model.layers"},
            {"layers_to_transform": [0, 1, 2], "layers_pattern": [FOR_EVER, "layers"]},
        ],
        ids=lambda fields: max(fields),
    )
    def test_no_pattern_of_modules_is_matched(
        self, job_of, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
    ) -> None:
        """One that takes for ever would otherwise cost the whole time limit."""
        asked = job_of()
        named = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
        config = {**asked.config, **named, **fields}
        check_files(config, asked.weights, shapes(Path(asked.model.model)), 64)
        compiled = re._compiler.compile  # type: ignore[attr-defined]

        def compiling(pattern: Any, flags: int) -> Any:
            assert FOR_EVER not in str(pattern), "an uploaded expression is about to be run"
            return compiled(pattern, flags)

        monkeypatch.setattr(re._compiler, "compile", compiling)  # type: ignore[attr-defined]
        expect(ComparisonOutcome.EXACT, replace(asked, config=config))

    def test_no_pattern_of_ranks_is_matched(
        self, job_of, tiny_hf_checkpoints: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python's engine would match it for years, and let no other thread run: not the one that ends the process."""
        ranks = {r".*\.0\.self_attn\.(q|k)_proj": 3, "q_proj": 5, "o_p(r)oj": 2}
        peft_adapter(tiny_hf_checkpoints["llama"](), tmp_path, seed=1, strength=0.3, rank_pattern=ranks)
        alphas = {FOR_EVER: 9, "layers.1.mlp.down_proj": 3, r"mlp\.(up|down)_proj": 5}
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        config |= {"rank_pattern": {FOR_EVER: 9, **ranks}, "alpha_pattern": alphas}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        asked = job_of(source=tmp_path)

        def matching(pattern: Any, *given: Any) -> Any:
            assert FOR_EVER not in str(pattern), "an uploaded expression is about to be run"
            return matched(pattern, *given)

        matched = re.match
        monkeypatch.setattr(re, "match", matching)
        expect(ComparisonOutcome.EXACT, asked)

    def test_peft_is_told_what_is_honoured_and_nothing_else(self, job_of) -> None:
        """`megatron_core` names a module to import, and what training needed PEFT might still compute."""
        asked = job_of()
        config = {**asked.config, "megatron_config": {"a": 1}, "megatron_core": "no.such.module", "runtime_config": 5}
        expect(ComparisonOutcome.EXACT, replace(asked, config=config))

    def test_the_job_survives_the_way(self, job_of) -> None:
        asked = job_of()
        for one in (asked, replace(asked, model=replace(asked.model, quantized_weights=Path("x")))):
            assert VerifyJob.from_line(one.to_line()) == one


Site = tuple[int, str]
SABOTAGE: dict[str, Callable[[Site, LoraTensors], LoraTensors]] = {
    "2x": lambda _, t: replace(t, scaling=2 * t.scaling),
    "transposed": lambda _, t: replace(t, a=t.a.reshape(t.a.shape[::-1]).T.copy()),
    "missing": lambda site, t: replace(t, b=0 * t.b) if site == (1, "self_attn.o_proj") else t,
    "alpha": lambda site, t: replace(t, scaling=6 / 4) if site == (2, "mlp.down_proj") else t,
    "ranks": lambda _, t: replace(t, b=t.b[:, ::-1].copy()),
}
"""What may happen to an adapter's tensors, and where it happens to one linear only, which."""
WHERE = {"missing": ("layers.1.self_attn.o_proj",), "alpha": ("layers.2.mlp.down_proj",)}


class TestWrong:
    @pytest.mark.parametrize("sabotage", SABOTAGE)
    @pytest.mark.parametrize("family", ["llama", long("gemma2"), long("phi3")])
    @pytest.mark.parametrize(
        "options", [pytest.param({}, id="torch-float32"), long({"kernels": "numba", **ROUNDED}, id="numba-int8-bf16")]
    )
    def test_panels(self, job_of, monkeypatch: pytest.MonkeyPatch, sabotage: str, family: str, options: Any) -> None:
        pack, change = served.pack_adapter, SABOTAGE[sabotage]

        def wrong(spec: ModelSpec, layout: Any, weights: AdapterWeights, dtype: torch.dtype) -> Any:
            tensors = {site: change(site, weights[site]) for site in weights}
            return pack(spec, layout, AdapterWeights(weights.spec, tensors), dtype)

        monkeypatch.setattr(served, "pack_adapter", wrong)
        verdict = run(job_of(family, **options)).verdict
        assert verdict.outcome is ComparisonOutcome.DIFFERS
        assert "linears are off" in verdict.reasons[0]
        linears = verdict.figures.linears
        if sabotage in WHERE:
            assert linears.wrong == WHERE[sabotage]
        else:
            assert linears.num_wrong == linears.compared

    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    @pytest.mark.parametrize("options", [{}, {"kernels": "numba", **ROUNDED}], ids=["torch-float32", "numba-int8-bf16"])
    def test_a_site_that_the_forward_pass_leaves_out(
        self, job_of, monkeypatch: pytest.MonkeyPatch, family: str, options: Any
    ) -> None:
        """Its panels are right, so that only the logits can tell."""
        linear = Decoder._linear

        def without_down(self: Decoder, weights: Any, x: torch.Tensor, layer: int, site: int, tables: Any) -> Any:
            return weights(x) if site == 3 else linear(self, weights, x, layer, site, tables)

        monkeypatch.setattr(Decoder, "_linear", without_down)
        verdict = run(job_of(family, **options)).verdict
        assert verdict.figures.linears.num_wrong == 0
        assert (verdict.outcome, len(verdict.reasons)) == (ComparisonOutcome.DIFFERS, 1)
        assert "logits with the adapter" in verdict.reasons[0]

    def test_a_gain_that_is_left_out(
        self, job_of, tiny_hf_checkpoints: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peft_adapter(tiny_hf_checkpoints["llama"](), tmp_path, seed=1, strength=0.3, use_dora=True)
        affine = Ops.affine_

        def wrong(self: Ops, y: torch.Tensor, slab: torch.Tensor, plan: Any, layer: int, place: int) -> None:
            if place != 1:
                affine(self, y, slab, plan, layer, place)

        monkeypatch.setattr(Ops, "affine_", wrong)
        verdict = run(job_of(source=tmp_path, quantization="int8")).verdict
        assert verdict.outcome == ComparisonOutcome.DIFFERS
        assert "o_proj" in str(verdict.reasons)

    @pytest.mark.parametrize("options", [EXACT, long(ROUNDED), long(FOUR_BITS)], ids=["float32", "int8-bf16", "int4"])
    @pytest.mark.parametrize(
        ("family", "end", "kind"),
        [
            *(("llama", "lm_head", kind) for kind in ("lora", "modules_to_save")),
            *(("llama", "model.embed_tokens", kind) for kind in ("lora", "modules_to_save", "trainable_tokens")),
            ("gemma2", "lm_head", "trainable_tokens"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")  # PEFT's advice for tied weights
    def test_an_end_that_is_lost_is_named(
        self,
        job_of,
        tiny_hf_checkpoints,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        family: str,
        end: str,
        kind: str,
        options: Any,
    ) -> None:
        """Whatever the logits of these prompts show."""
        own: dict[str, dict[str, Any]] = {
            "lora": {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "save_embedding_layers": False},
            "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
            "trainable_tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 300, 11]},
        }
        peft_adapter(tiny_hf_checkpoints[family](), tmp_path / "x", strength=0.3, **own[kind])
        asked = job_of(family, source=tmp_path / "x", **options)
        right = run(asked).verdict
        assert (right.reasons, right.figures.linears.num_wrong) == ((), 0)
        if end == "lm_head":
            monkeypatch.setattr(Decoder, "adapted_logits", lambda _, logits, *__: logits)
        else:
            monkeypatch.setattr(Decoder, "embedded", lambda self, batch: self._weights.embed(batch.token_ids))
        verdict = run(asked).verdict
        assert (verdict.outcome, verdict.figures.linears.wrong) == (ComparisonOutcome.DIFFERS, (end,))
        assert f"the worst, {end}, by" in verdict.reasons[0]

    def test_a_base_that_gets_the_adapter(self, job_of, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its large error is no licence for the adapter's."""
        right = served.ServedModel.logits

        def mixed_up(self: Any, prompt: Any, new_tokens: int) -> Any:
            answer = right(self, prompt, new_tokens)
            return replace(answer, plain=answer.adapted)

        monkeypatch.setattr(served.ServedModel, "logits", mixed_up)
        verdict = run(job_of(**ROUNDED)).verdict
        assert verdict.outcome is ComparisonOutcome.DIFFERS
        assert "the base itself" in verdict.reasons[0]


class TestRefused:
    @pytest.mark.long
    def test_logits_that_are_no_numbers(self, job_of, tmp_path: Path) -> None:
        source = job_of()
        tensors = {n: t * 1e30 if "lora_B" in n else t for n, t in load_file(source.weights).items()}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps(source.config))
        with pytest.raises(CannotVerify, match="the adapter overflows"):
            run(job_of(source=tmp_path))

    def test_logits_of_a_base_that_are_no_numbers(self, job_of, monkeypatch: pytest.MonkeyPatch) -> None:
        right = served.ServedModel.logits

        def overflowing(self: served.ServedModel, prompt: Any, new_tokens: int) -> Any:
            answer = right(self, prompt, new_tokens)
            return replace(answer, plain=answer.plain * float("inf"), adapted=answer.adapted * float("inf"))

        monkeypatch.setattr(served.ServedModel, "logits", overflowing)
        with pytest.raises(CannotVerify, match="the base overflows"):
            run(job_of())

    def test_another_file_than_was_stored(self, job_of, tmp_path: Path) -> None:
        asked = job_of()
        data = bytearray(asked.weights.read_bytes())
        data[-1] ^= 1
        (tmp_path / "blob").write_bytes(data)
        damaged = replace(asked, weights=tmp_path / "blob")
        with pytest.raises(AdapterCorrupt):
            run(damaged)
        with pytest.raises(AdapterCorrupt, match="not what its name says"):
            run(replace(damaged, weights_digest=hashlib.sha256(data).hexdigest()))

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


def test_a_file_of_mistral_small_is_mistral_whatever_it_calls_itself() -> None:
    spec = ModelSpec("ministral3", 2, 8, 16, 2, 1, 4, 32, 64, 1e-5, rope=RopeSpec())
    assert config_from_spec(spec).model_type == "mistral"
    scaled = RopeSpec(kind="yarn", factor=4.0, original_max_position=64, max_position=64)
    assert config_from_spec(replace(spec, rope=scaled)).model_type == "ministral3"


@pytest.fixture
def child(job_of) -> Iterator["subprocess.Popen[bytes]"]:
    """The real process, given a real job."""
    command = [sys.executable, "-P", "-m", "lorasrv.offline.verify.worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(job_of().to_line())
    process.stdin.flush()
    yield process
    process.kill()
    process.communicate()


class TestProcess:
    def test_it_ends_when_its_input_ends(self, child: "subprocess.Popen[bytes]") -> None:
        """As when the server was killed."""
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 1
        assert b"result" not in out

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux")
    def test_its_priority_is_the_lowest(self, child: "subprocess.Popen[bytes]") -> None:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["progress"][1] == 0.0
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[16]) == 19
