"""Compute the reference of a verification with transformers and PEFT, from the served weights in float32.

No other module imports these packages, and only the worker process imports this one.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import initialization

from adapter_store.formats.adapter_config import FIELD_RULES, Decision
from adapter_store.formats.int8_codes import CodedTensors
from adapter_store.formats.name_pattern import NamePattern, parse_pattern
from adapter_store.formats.peft_dir import CONFIG_NAME, WEIGHTS_NAME
from adapter_store.formats.safetensors_file import widen
from adapter_store.formats.tensor_names import EMBEDDING_MATRICES
from adapter_store.formats.weights import AdapterWeights, Array, pooling_factor
from adapter_store.spec import INT8
from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader import Checkpoint
from lorasrv.models.spec import ModelSpec
from lorasrv.offline.verify.hf_config import config_from_spec
from lorasrv.offline.verify.job import CannotVerify, VerifyJob
from lorasrv.worker.adapter_rows import own_tokens
from lorasrv.worker.weights import ModelWeights, Progress

NAME = "default"
WRAPPER = "base_model.model."
PATTERNS = ("rank_pattern", "alpha_pattern")
SELECTING = frozenset({"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"})
READ_FIELDS = frozenset(name for name, rule in FIELD_RULES.items() if rule.decision is Decision.HONOURED)
READ_FIELDS -= SELECTING | {"added_tokens"}


class PeftReference:
    """Hold a float32 transformers model over dequantized weights, with the adapter as PEFT reads it."""

    def __init__(
        self, job: VerifyJob, checkpoint: Checkpoint, weights: ModelWeights, adapter: AdapterWeights, progress: Progress
    ) -> None:
        self._layers, self._is_activated = checkpoint.spec.names.layers, bool(adapter.spec.invocation_tokens)
        base = _base(job, checkpoint.spec)
        _fill(base, checkpoint, weights, progress)
        with tempfile.TemporaryDirectory(prefix="lorasrv-verify-") as folder:
            _write_adapter(Path(folder), job, adapter, weights)
            # PEFT writes the file's biases and copies of the base's tables over the base's, for good.
            replaced = (".bias", *(f"{own.module}.weight" for own in adapter.spec.rows if own.frozen))
            named = base.named_parameters(remove_duplicate=False)
            parameters = {name: parameter for name, parameter in named if name.endswith(replaced)}
            own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            self._model: Any = peft.PeftModel.from_pretrained(base, folder, adapter_name=NAME)
        self._replaced = [(parameter, own[name], parameter.detach().clone()) for name, parameter in parameters.items()]
        self._model.eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], positions: int, active_from: int) -> tuple[Tensor, Tensor]:
        """Return the [positions, V] fp32 logits of the last tokens, with the adapter and without.

        Args:
            active_from: the first token that the adapter acts on.
        """
        ids, active = torch.tensor([list(tokens)]), self._active(1, len(tokens) - active_from)
        # As PEFT's `generate`; its `forward` leaves the adapter out of an mpt.
        with self._model._enable_peft_forward_hooks(**active):
            return self._both(lambda: self._model.base_model(ids, use_cache=False).logits[0, -positions:])

    @torch.inference_mode()
    def end(self, module: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the head makes of x [T, H], or the embedding of x int64 [T], with the adapter and without; the
        latter without a factor that is part of the module, as in Gemma.
        """
        end = self._model.get_base_model().get_submodule(module)
        scale = next((part.scalar_embed_scale for part in end.modules() if hasattr(part, "scalar_embed_scale")), 1.0)
        return self._both(lambda: end(x, **self._rows(end, x)) / scale)

    def _active(self, sequences: int, tokens: int) -> dict[str, list[int]]:
        """Return PEFT's argument for an aLoRA that acts on the last tokens of each sequence; {} for other adapters."""
        return {"alora_offsets": [tokens] * sequences} if self._is_activated else {}

    def _rows(self, module: Any, x: Tensor) -> dict[str, list[int]]:
        """Return PEFT's argument for an aLoRA that acts on all rows x of a module; {} if none is there."""
        return self._active(len(x), 1) if NAME in getattr(module, "lora_variant", ()) else {}

    def _both(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Compute with the adapter and without."""
        adapted = compute().clone()
        for parameter, base, _ in self._replaced:
            parameter.copy_(base)
        with self._model.disable_adapter():
            plain = compute().clone()
        for parameter, _, trained in self._replaced:
            parameter.copy_(trained)
        return adapted, plain

    @torch.inference_mode()
    def delta(self, layer: int, module: str, x: Tensor) -> tuple[Tensor, float]:
        """Return what PEFT changes at one linear, x [T, in] -> [T, out], zeros where it changes nothing; and the norm
        of the output that it is a difference of, 0 if it is none.
        """
        lora = self._model.get_base_model().get_submodule(f"{self._layers}{layer}.{module}")
        base = getattr(lora, "base_layer", lora)
        bias = next((own for parameter, own, _ in self._replaced if parameter is base.bias), None)
        has_variant = NAME in getattr(lora, "lora_variant", {}) and not self._is_activated
        is_plain = bias is None and NAME in getattr(lora, "lora_A", {}) and not has_variant
        if is_plain:
            added: Tensor = lora.lora_B[NAME](lora.lora_A[NAME](x)) * lora.scaling[NAME]
            return added, 0.0
        output: Tensor = lora(x, **self._rows(lora, x))
        return output - torch.nn.functional.linear(x, base.weight, bias), float(output.double().norm())


def _base(job: VerifyJob, spec: ModelSpec) -> Any:
    """Build an empty model, from config.json where there is one, so that our parser does not affect the comparison."""
    folder = Path(job.model.model).expanduser()
    if job.model.load_format != "dummy" and folder.is_dir():
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
        if spec.names.text_part:
            # The whole model's setting counts, and transformers unties a head that the file has.
            config.tie_word_embeddings = spec.tied_head
    else:
        config = config_from_spec(spec)
    # Initialising weights that are replaced anyway would take longer than everything else.
    with initialization.no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    if config.tie_word_embeddings:
        model.tie_weights()
    return model.eval()


@torch.no_grad()
def _fill(model: Any, checkpoint: Checkpoint, weights: ModelWeights, progress: Progress) -> None:
    """Copy the served weights into the model, one tensor at a time.

    Raises:
        CannotVerify: the model has other tensors than the checkpoint.
    """
    spec = weights.spec
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    canonical = {spec.names.in_file(name): name for name in tensor_shapes(spec)}
    for i, (own, parameter) in enumerate(parameters.items()):
        progress("filling the reference model", i / len(parameters))
        name = canonical.get(own, own)
        try:
            value = checkpoint.tensor(name).float() if name.endswith(".bias") else weights.dequantized(name)
        except KeyError:
            raise CannotVerify(f"the {spec.family} model of transformers has {name}, which this base lacks") from None
        if spec.norms_add_one and "norm" in name:
            # Served norms are the factors themselves.
            value = value - 1
        parameter.copy_(value)
    progress("filling the reference model", 1.0)
    tied = {"lm_head.weight"} if spec.tied_head else set()
    filled = {canonical.get(own, own) for own in parameters}
    if missing := sorted(set(checkpoint.names()) - filled - tied):
        raise CannotVerify(f"the {spec.family} model of transformers lacks {missing[0]}, which this base has")


def _write_adapter(folder: Path, job: VerifyJob, adapter: AdapterWeights, weights: ModelWeights) -> None:
    """Write the adapter for PEFT: the stored file itself, unless PEFT would ignore its tensor names, its form is int8,
    it has pooled inputs or rows of the vocabulary; then the matrices as served, and tables of which only own rows
    differ from the base's.

    The config holds only the fields that PEFT should honour. PEFT would find the adapted modules, and their ranks, with
    uploaded regular expressions, which may take exponential time to match; here they are the modules that have weights.
    """
    spec, rows = weights.spec, adapter.spec.rows
    config = {name: value for name, value in job.config.items() if name in READ_FIELDS}
    modules = {
        m: f"{spec.names.layers}{m.layer}.{m.module}" if m.layer < spec.num_layers else m.module
        for m in adapter.spec.modules
    }
    config["target_modules"] = sorted(modules.values())
    for field in PATTERNS:
        config[field] = _spelled_out(config.get(field), sorted(modules.values()))
    saved = adapter.spec.saved
    norms = [s.parameter.removesuffix(".weight") for s in saved if s.parameter.endswith(".weight")]
    copies = [own.module for own in rows if own.token_ids is None and not own.frozen]
    config["modules_to_save"] = [*norms, *copies] or None
    (folder / CONFIG_NAME).write_text(json.dumps(config, default=dict))
    names: dict[str, str] = {}
    for m, module in modules.items():
        stem = WRAPPER + module
        suffixes = EMBEDDING_MATRICES if module == spec.names.embedding else (".lora_A.weight", ".lora_B.weight")
        names |= {m.a_name: stem + suffixes[0], m.b_name: stem + suffixes[1]}
        names |= {m.magnitude: f"{stem}.lora_magnitude_vector"} if m.magnitude else {}
        names |= {m.b_bias: f"{stem}.lora_B.bias"} if m.b_bias else {}
    names |= {s.name: WRAPPER + s.parameter for s in saved} | {r.name: WRAPPER + r.parameter for r in rows}
    is_changed = adapter.spec.stored == INT8 or any(m.group_size > 1 for m in modules)
    if all(own == wanted for own, wanted in names.items()) and not is_changed and not rows:
        os.symlink(job.weights.absolute(), folder / WEIGHTS_NAME)
        return
    tensors = load_file(job.weights)
    if is_changed:
        tensors |= {name: torch.from_numpy(matrix) for name, matrix in _matrices(adapter)}
    tensors |= dict(_tables(tensors, adapter, weights, getattr(torch, job.model.dtype)))
    save_file({wanted: tensors[own] for own, wanted in names.items()}, folder / WEIGHTS_NAME)


def _spelled_out(patterns: Any, modules: Sequence[str]) -> dict[str, Any]:
    """Return keys of rank_pattern or alpha_pattern with the names that an expression matches in its place."""
    found: dict[str, Any] = {}
    for key, value in (patterns or {}).items():
        pattern = parse_pattern(key)
        for name in [key] if isinstance(pattern, NamePattern) else filter(pattern.matches, modules):
            found.setdefault(name, value)
    return found


def _tables(
    tensors: Mapping[str, Tensor], adapter: AdapterWeights, weights: ModelWeights, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and rows of every tensor of rows; where they are not the adapter's own, the base's served ones."""
    if not adapter.spec.rows:
        return
    head, embedding = map(torch.from_numpy, own_tokens(weights, adapter, dtype))
    for own in adapter.spec.rows:
        is_embedding = own.module == weights.spec.names.embedding
        table = (weights.embed if is_embedding else weights.head).dequantize().clone()
        ids = torch.arange(len(table)) if own.token_ids is None else torch.tensor(own.token_ids)
        is_own = torch.isin(ids, embedding if is_embedding else head)
        table[ids[is_own]] = tensors[own.name][is_own].float()
        yield own.name, table[ids]


def _matrices(adapter: AdapterWeights) -> Iterator[tuple[str, Array]]:
    """Yield the name and fp32 matrix of every lora_A and lora_B as served: of codes, and without pooling."""
    for m in adapter.spec.modules:
        own = adapter[m.layer, m.module]
        if adapter.spec.stored == INT8:
            a, b = CodedTensors(own, adapter.dtype).dequantized()
        else:
            a, b = widen(own.a, adapter.dtype), widen(own.b, adapter.dtype)
        yield m.a_name, a * np.float32(pooling_factor(a.shape[1], m.group_size))
        yield m.b_name, np.ascontiguousarray(b)
