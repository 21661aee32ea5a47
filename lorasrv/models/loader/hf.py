"""Read a Hugging Face directory as a checkpoint: config.json and safetensors, in one file or sharded by an index.

Quantized linears are read by the package `packed`.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from adapter_store.spec import AddedToken
from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedModel
from lorasrv.models.families import TEXT_PART, detect, tensor_shapes, token_ids
from lorasrv.models.loader.checkpoint import StoredPacking, check_num_layers, check_shapes
from lorasrv.models.loader.packed.config import QuantizationSettings, find_quantization
from lorasrv.models.spec import TEXT_PARTS, ModelSpec, ModuleNames
from lorasrv.text.tokenizer import TokenizerJson, TokenizerSource

if TYPE_CHECKING:
    from torch import Tensor

    from lorasrv.models.loader.packed.packed_modules import PackedModules
    from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


class HfCheckpoint:
    """Read a Hugging Face directory; see `Checkpoint`. Files stay memory-mapped until `close`.

    Args:
        path: the directory.
        name: default served name; None for the folder's.
    Raises:
        ModelNotFound, CorruptModel, UnsupportedModel: a file is missing, damaged, or of an unknown kind.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self._path = path
        self.name = name or path.resolve().name
        self.spec = read_spec(path)
        self._files = ExitStack()
        self._readers: dict[str, Any] = {}
        try:
            self._open_weights()
            self.spec = replace(self.spec, names=self._names())
            check_num_layers(self.spec, len(self._readers))
            self._canonical = {self.spec.names.in_file(name): name for name in tensor_shapes(self.spec)}
            settings = _quantization(path, _read_json(path / "config.json"))
            if settings is not None and self.spec.names.sites:
                raise UnsupportedModel(f"quantized checkpoints of family {self.spec.family} are not supported")
            self._packed = None if settings is None else _packed_modules(settings, self._readers, self.spec.names)
            check_shapes(self.spec, dict(self._shapes()))
            self.packing = None if settings is None else self._packing(settings.method)
            self._check_biases()
            self._check_head()
        except BaseException:
            self.close()
            raise

    def _names(self) -> ModuleNames:
        """Return the spec's module names; for the language part of a multimodal model, those used in the file."""
        names = self.spec.names
        parts = TEXT_PARTS if names.text_part else ()
        known = (replace(names, text_part=part) for part in parts)
        return next((each for each in known if each.in_file("model.norm.weight") in self._readers), names)

    def _check_head(self) -> None:
        """Check that the file has no separate head if the configuration ties the head to the embedding.

        Raises:
            UnsupportedModel: the file has a different head, for example after merging an adapter with its own head.
        """
        names = [self.spec.names.in_file(f"{module}.weight") for module in ("lm_head", "model.embed_tokens")]
        if not self.spec.tied_head or not all(name in self._readers for name in names):
            return
        head, embedding = (self._readers[name].get_tensor(name) for name in names)
        if head.shape != embedding.shape or not (head == embedding).all():
            raise UnsupportedModel(
                "config.json ties the head to the embedding, but the file has another head: set tie_word_embeddings "
                "to false, or remove lm_head.weight"
            )

    def names(self) -> Iterable[str]:
        return tensor_shapes(self.spec).keys()

    def tensor(self, name: str) -> "Tensor":
        module = self._quantized_module(name)
        if module is not None and self._packed is not None:
            return self._packed.weight(module)
        own = self.spec.names.in_file(name)
        weight: Tensor = self._readers[own].get_tensor(own)
        return weight

    def codes(self, name: str) -> "GroupQuantizedWeight | None":
        module = self._quantized_module(name)
        return None if module is None or self._packed is None else self._packed.codes(module)

    def _quantized_module(self, name: str) -> str | None:
        """Return the file's name of the module whose weight this is, if it is quantized."""
        own = self.spec.names.in_file(name)
        module = own.removesuffix(".weight")
        is_packed = self._packed is not None and module != own and module in self._packed.bits
        return module if is_packed else None

    def tokenizer_source(self) -> TokenizerSource:
        return hf_tokenizer_source(self._path, self.spec)

    def close(self) -> None:
        self._readers.clear()
        self._files.close()

    def _open_weights(self) -> None:
        index = self._index()
        holders: dict[str, str] = {}
        for file in self._weight_files(index):
            try:
                reader = self._files.enter_context(safe_open(self._path / file, framework="pt"))
            except (SafetensorError, OSError) as e:
                raise CorruptModel(f"{file} cannot be read: {_reason(e)}") from None
            for name in reader.keys():  # noqa: SIM118 - a safetensors reader is no mapping
                if name in holders:
                    raise CorruptModel(f"tensor {name!r:.80} is in two files: {holders[name]} and {file}")
                holders[name], self._readers[name] = file, reader
        _check_index(index, holders)

    def _index(self) -> dict[str, str]:
        """Return the file of each tensor, as the index of sharded weights has it; empty without an index.

        Also empty if all weights are in one file, which transformers then reads; an index is from an older save.
        """
        if (self._path / _WEIGHTS).is_file() or not (self._path / _INDEX).is_file():
            return {}
        index = _read_json(self._path / _INDEX).get("weight_map")
        good = isinstance(index, dict) and all(isinstance(f, str) and Path(f).name == f for f in index.values())
        if not index or not isinstance(index, dict) or not good:
            raise CorruptModel(f"{_INDEX} has no weight_map of file names")
        return index

    def _weight_files(self, index: dict[str, str]) -> list[str]:
        """Return the names of the safetensors files; all exist."""
        shards = sorted(set(index.values())) or [_WEIGHTS]
        unlisted = sorted(file.name for file in self._path.glob("model-*-of-*.safetensors") if file.name not in shards)
        if index and unlisted:
            raise CorruptModel(f"{_INDEX} does not name {', '.join(unlisted[:3])}, which is in the same folder")
        missing = [shard for shard in shards if not (self._path / shard).is_file()]
        if missing and any(self._path.glob("pytorch_model*.bin")):
            raise UnsupportedModel("the model directory holds pickled weights (.bin); convert them to safetensors")
        if missing:
            raise CorruptModel(f"the model directory {self._path.name} lacks {', '.join(missing[:3])}")
        return shards

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the shapes of the float tensors that the model needs, and of the weights of quantized modules."""
        packed = {} if self._packed is None else {f"{m}.weight": self._packed.shape(m) for m in self._packed.bits}
        for own, name in self._canonical.items():
            # Skip other tensors: some are never read, and quantized modules also have tensors of integers.
            if own in packed:
                yield name, packed[own]
            elif own in self._readers:
                yield name, self._shape(own)

    def _packing(self, method: str) -> StoredPacking | None:
        """Describe the quantization; None if all linears are floats."""
        bits = {} if self._packed is None else self._packed.bits
        shapes = tensor_shapes(self.spec)
        names = {module: self._canonical.get(f"{module}.weight") for module in bits}
        sizes = {module: math.prod(shapes[name]) for module, name in names.items() if name is not None}
        if not sizes:
            return None
        rounding = "" if self._packed is None else self._packed.rounding
        held = {} if self._packed is None else self._packed.held
        mean = sum(held[module] * size for module, size in sizes.items()) / sum(sizes.values())
        return StoredPacking(method, tuple(sorted({bits[module] for module in sizes})), mean, rounding)

    def _check_biases(self) -> None:
        """Check that quantized modules have no bias that the family lacks, except zeros, which some exports have."""
        for module in () if self._packed is None else self._packed.bits:
            name, known = f"{module}.bias", self._canonical
            is_unknown = f"{module}.weight" in known and name in self._readers and name not in known
            if is_unknown and self._readers[name].get_tensor(name).any():
                raise UnsupportedModel(f"{name} is not 0, but {self.spec.family} models have no such bias")

    def _shape(self, name: str) -> tuple[int, ...]:
        view = self._readers[name].get_slice(name)
        if view.get_dtype() not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise UnsupportedModel(f"tensor {name!r:.80} is {view.get_dtype()}, which is not supported; known: {known}")
        return tuple(view.get_shape())


def _packed_modules(settings: QuantizationSettings, readers: dict[str, Any], names: ModuleNames) -> "PackedModules":
    # These import torch.
    from lorasrv.models.loader.packed.packed_modules import open_modules
    from lorasrv.models.loader.packed.stored_tensors import StoredTensors

    return open_modules(settings, StoredTensors(readers, names))


def _quantization(folder: Path, config: dict[str, Any]) -> QuantizationSettings | None:
    part = config.get(TEXT_PART)
    if isinstance(part, dict):
        config = part | {key: value for key, value in config.items() if value}
    return find_quantization(config, lambda file: _read_json(folder / file, missing_ok=True))


def _check_index(index: dict[str, str], holders: dict[str, str]) -> None:
    """Check that every tensor of the index is in the file that the index names."""
    missing = [name for name in index if name not in holders]
    if missing:
        raise CorruptModel(f"{index[missing[0]]} lacks {missing[0]!r:.80}, which {_INDEX} says is there")
    elsewhere = [name for name, file in index.items() if holders[name] != file]
    if elsewhere:
        name = elsewhere[0]
        raise CorruptModel(f"{name!r:.80} is in {holders[name]}, but {_INDEX} says {index[name]}")


def _spec(config: dict[str, Any]) -> ModelSpec:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CorruptModel("config.json names no architectures")
    part = config.get(TEXT_PART)
    text_type = part.get("model_type") if isinstance(part, dict) else None
    return detect(str(architectures[0]), text_type).spec_from_hf(config)


def read_spec(folder: Path) -> ModelSpec:
    """Read config.json, and generation_config.json, which often lists end-of-turn tokens that the other lacks.

    Raises:
        ModelNotFound, CorruptModel, UnsupportedModel: a file is missing, damaged, or of an unknown kind.
    """
    config = _read_json(folder / "config.json")
    spec = _spec(config)
    _quantization(folder, config)
    extra = _read_json(folder / "generation_config.json", missing_ok=True).get("eos_token_id")
    return replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *token_ids(extra)))))


_STANDARD_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Names of special tokens. Transformers adds those missing from the vocabulary first, in this order."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_AS_IN_TOKENIZER_JSON = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of tokenizers that transformers builds from tokenizer.json alone; others read add_prefix_space, too."""


def hf_tokenizer_source(folder: Path, spec: ModelSpec) -> TokenizerSource:
    """Return what describes the tokenizer in a directory.

    Raises:
        UnsupportedModel, CorruptModel: tokenizer.json is missing, a file is damaged, or a setting is not supported.
    """
    vocabulary = folder / "tokenizer.json"
    if not vocabulary.is_file():
        raise UnsupportedModel("the model directory has no tokenizer.json; save it with a fast tokenizer")
    config = _read_json(folder / "tokenizer_config.json", missing_ok=True)
    # As in transformers: the older file is read only without added_tokens_decoder, and then takes precedence.
    older = {} if "added_tokens_decoder" in config else _read_json(folder / "special_tokens_map.json", missing_ok=True)
    if config.get("split_special_tokens"):
        raise UnsupportedModel("tokenizer_config.json: split_special_tokens is not supported, only false")
    named, listed = _special_tokens(config) | _special_tokens(older), (*_extra_special(config), *_extra_special(older))
    order = dict.fromkeys(key for key in (*_STANDARD_TOKENS, *named) if key in named)
    special = {key: _token_text(named[key]) for key in order}
    extra = tuple(dict.fromkeys(map(_token_text, listed)))
    templates = _chat_templates(folder, config)
    template, template_file = templates.get("default", (None, ""))
    tool_template, tool_template_file = templates.get("tool_use", (None, ""))
    return TokenizerSource(
        vocabulary=TokenizerJson(_read_text(vocabulary)),
        chat_template=template,
        tool_template=tool_template,
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
        special=special,
        extra_special=extra,
        special_flags={_token_text(token): _flags(token) for token in (*listed, *named.values())},
        adds_prefix_space=_adds_prefix_space(config),
        added=tuple(_declared_tokens(folder, config, frozenset((*special.values(), *extra)))),
        template_file=template_file,
        tool_template_file=tool_template_file,
    )


def _adds_prefix_space(config: dict[str, Any]) -> bool | None:
    """Return the setting; None if transformers does not read it."""
    value = config.get("add_prefix_space")
    return None if config.get("tokenizer_class") in _AS_IN_TOKENIZER_JSON or value is None else bool(value)


def _declared_tokens(folder: Path, config: dict[str, Any], special: frozenset[str]) -> Iterator[AddedToken]:
    """Yield the added tokens of tokenizer_config.json; without any, those of added_tokens.json, as in transformers.

    Raises:
        CorruptModel: an entry is not a token.
    """
    declared = config.get("added_tokens_decoder")
    if declared is None:
        others = _read_json(folder / "added_tokens.json", missing_ok=True)
        declared = {number: {"content": text, "special": text in special} for text, number in others.items()}
    if not isinstance(declared, dict):
        raise CorruptModel("tokenizer_config.json: added_tokens_decoder must be an object")
    for number, token in declared.items():
        text = token.get("content") if isinstance(token, dict) else None
        if not isinstance(text, str) or not str(number).isdecimal():
            raise CorruptModel(f"tokenizer_config.json: {number!r:.60} of added_tokens_decoder is no added token")
        flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        normalized = bool(token.get("normalized", not flags["special"]))
        yield AddedToken(int(number), text, normalized=normalized, **flags)


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the chat templates and their files: name -> (template, file).

    They are in separate files, or else in tokenizer_config.json, as a text or a list of named templates. As in
    transformers, "default" is for conversations, and "tool_use" for those with tools.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (default := folder / "chat_template.jinja").is_file():
        files["default"] = default
    if files:
        return {name: (_read_text(path), path.relative_to(folder).as_posix()) for name, path in files.items()}
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    named = found if isinstance(found, dict) else {"default": found}
    return {name: (text, "tokenizer_config.json") for name, text in named.items() if isinstance(text, str)}


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens by name, from keys such as eos_token and from the table extra_special_tokens."""
    extra = config.get("extra_special_tokens")
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    return {key: value for key, value in named.items() if _is_token(value)}


def _extra_special(config: dict[str, Any]) -> list[Any]:
    """Return the special tokens without a name, also from the older key additional_special_tokens."""
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return [value for value in listed if _is_token(value)] if isinstance(listed, list) else []


def _is_token(value: Any) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _token_text(value: Any) -> str:
    """Return the text of a token: the value itself, or `content` if the value is a table."""
    text: str = value["content"] if isinstance(value, dict) else value
    return text


def _flags(value: Any) -> dict[str, bool]:
    """Return the flags of a token; only tokens that are tables have any."""
    return {name: bool(value[name]) for name in _FLAGS if name in value} if isinstance(value, dict) else {}


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as e:
        raise CorruptModel(f"{path.name} is not valid JSON: {e.msg} in line {e.lineno}") from None
    if not isinstance(value, dict):
        raise CorruptModel(f"{path.name} is not a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        what = f"the model directory {path.parent.name} lacks {path.name}"
        raise ModelNotFound(f"{what}; give the folder that save_pretrained() wrote") from None
    except (OSError, UnicodeDecodeError) as e:
        raise CorruptModel(f"{path.name} cannot be read: {_reason(e)}") from None


def _reason(error: BaseException) -> str:
    """Return the error's text, without the path that an OSError contains."""
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
