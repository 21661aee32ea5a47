"""Read model families from data: a TOML file maps a checkpoint's configuration and tensor names to a `ModelSpec`.

The rules are explained in specs/llama.toml. Canonical tensor names and row orders are Hugging Face's.
"""

import math
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lorasrv.errors import ConfigError, CorruptModel, UnsupportedModel
from lorasrv.models.rope_config import Ropes, rope_from_config, rope_from_gguf
from lorasrv.models.spec import LLAMA_LAYERS, TEXT_PARTS, ModelSpec, ModuleNames

_KINDS = {"sliding_attention": True, "full_attention": False}
_ONLY = {"is_causal": True}
"""Values that settings of config.json may have in every family."""
TEXT_PART = "text_config"
"""Key of config.json with the configuration of a multimodal model's language part."""
_OF_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
"""Settings of a multimodal model that apply to its language part; if missing, the part's own ones apply."""
_GGUF_ONLY = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "embedding_scale": [0.0, 1.0],
    "expert_count": 0,
    "logit_scale": [0.0, 1.0],
    "residual_scale": [0.0, 1.0],
    "use_parallel_residual": False,
}
"""The same for GGUF metadata: the only accepted values of keys that families do not read."""
_GGUF_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})
"""Texts of control tokens that end an answer, as in llama.cpp, because GGUF files name only one or two of them.
<|endoftext|> is not included, because not every model that has it in its vocabulary ends answers with it."""
_GGUF_CONTROL = 3


def _gguf_ends(meta: Mapping[str, Any], tokens: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: those that the file names, and control tokens with a text that does."""
    named = token_ids([meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")])
    types = meta.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, list):
        return named
    pairs = enumerate(zip(tokens, types, strict=False))
    known = (i for i, (text, kind) in pairs if kind == _GGUF_CONTROL and text in _GGUF_ENDS)
    return tuple(dict.fromkeys((*named, *known)))


def windowed_layers(
    values: Mapping[str, Any], rules: Mapping[str, Any], num_layers: int, label: str, prefix: str = ""
) -> tuple[bool, ...]:
    """Return for each layer whether it has the sliding window; empty if all layers have it.

    Args:
        values: of the checkpoint; their keys begin with `prefix`.
        rules: a family's section; see specs/llama.toml.
        num_layers: number of layers.
        label: name of the checkpoint's file in messages.
    Raises:
        CorruptModel: a list or a number that does not fit.
        UnsupportedModel: an unknown kind of layer.
    """
    switch, kinds = rules.get("window_switch"), rules.get("window_layer_types")
    if switch and not values.get(switch, False):
        return (False,) * num_layers
    if kinds and isinstance(values.get(kinds), list):
        return _listed(values[kinds], kinds, num_layers, label)
    first, pattern = rules.get("window_first_layer"), rules.get("window_pattern")
    if first is not None:
        start = _number(values, first, label)
        return tuple(layer >= start for layer in range(num_layers))
    if pattern is None:
        return ()
    key = prefix + pattern.get("key", "")
    if isinstance(values.get(key), list):
        flags = values[key]
        if len(flags) != num_layers or not all(type(flag) is bool for flag in flags):
            raise CorruptModel(f"{label}: {key} must be {num_layers} times true or false")
        return tuple(flags)
    every = _number(values, pattern | {"key": key}, label)
    if every < 1:
        raise CorruptModel(f"{label}: {key} must be positive, not {every}")
    return tuple((layer + 1) % every != 0 for layer in range(num_layers))


def _listed(kinds: list[Any], key: str, num_layers: int, label: str) -> tuple[bool, ...]:
    if len(kinds) != num_layers:
        raise CorruptModel(f"{label}: {key} has {len(kinds)} entries for {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise UnsupportedModel(f"{label}: {key} {unknown[0]!r:.60} is not supported; known: {', '.join(_KINDS)}")
    return tuple(_KINDS[kind] for kind in kinds)


def unrotated_layers(
    values: Mapping[str, Any], rules: Mapping[str, Any], num_layers: int, label: str
) -> tuple[bool, ...]:
    """Return for each layer whether its heads have no rotary embedding; empty if all have one.

    Args:
        values: of the checkpoint.
        rules: a family's section; see specs/llama.toml.
        num_layers: number of layers.
        label: name of the checkpoint's file in messages.
    Raises:
        CorruptModel: a list or a number that does not fit.
    """
    if "unrotated" not in rules:
        return ()
    rule = {"list": "", "key": "", **rules["unrotated"]}
    flags = values.get(rule["list"])
    if flags is None:
        every = _number(values, rule, label)
        if every < 1:
            raise CorruptModel(f"{label}: {rule['key']} must be positive, not {every}")
        flags = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if (
        not isinstance(flags, list)
        or len(flags) != num_layers
        or not all(type(f) is int and f in (0, 1) for f in flags)
    ):
        raise CorruptModel(f"{label}: {rule['list']} must be {num_layers} times 0 or 1")
    return () if all(flags) else tuple(not flag for flag in flags)


def kv_source_layers(values: Mapping[str, Any], key: str, fields: Mapping[str, Any], label: str) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads; empty if all read their own.

    Args:
        values: of the checkpoint.
        key: key of the list.
        fields: fields of the spec.
        label: name of the checkpoint's file in messages.
    Raises:
        CorruptModel: this is no list of layers that have keys and values, each no later than the layer that reads them.
    """
    sources = values.get(key)
    if sources is None:
        return ()
    count = fields["num_layers"]
    if not isinstance(sources, list) or len(sources) != count or not all(type(source) is int for source in sources):
        raise CorruptModel(f"{label}: {key} must be {count} layers")
    for layer, source in enumerate(sources):
        if not 0 <= source <= layer or sources[source] != source:
            raise CorruptModel(f"{label}: {key} gives layer {layer} the keys of {source}, which has none by then")
    return () if sources == list(range(count)) else tuple(sources)


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an inner table of config.json; empty if it is missing or null."""
    inner = config.get(key) or {}
    if not isinstance(inner, dict):
        raise CorruptModel(f"config.json: {key} must be an object, not {inner!r:.60}")
    return inner


def _check_only(values: Mapping[str, Any], rules: Mapping[str, Any], label: str, prefix: str = "") -> None:
    """Check settings that have only one or a few accepted values. Missing and null settings are accepted.

    Raises:
        UnsupportedModel: a setting has another value; the message names it.
    """
    for rule, only in rules.items():
        key, allowed = prefix + rule, only if isinstance(only, list) else [only]
        if values.get(key) not in (None, *allowed):
            known = " or ".join(map(repr, allowed)) or "none"
            raise UnsupportedModel(f"{label}: {key} {values[key]!r:.60} is not supported, only {known}")


def _number(values: Mapping[str, Any], rule: Mapping[str, Any], label: str) -> int:
    value = values.get(rule["key"], rule["default"])
    if type(value) is not int:
        raise CorruptModel(f"{label}: {rule['key']} must be a whole number, not {value!r:.60}")
    return value


SPEC_DIR = Path(__file__).parent / "specs"
NORMS = ("rms", "layer")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Maps a checkpoint's name of an activation to the decoder's, for MLPs with a gate."""
PLAIN_ACTIVATIONS = {"gelu": "gelu"}
"""The same for MLPs without a gate."""
_FIELD_TYPES: dict[str, type] = {
    "num_layers": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_heads": int,
    "num_kv_heads": int,
    "head_dim": int,
    "vocab_size": int,
    "max_position": int,
    "norm_eps": float,
    "activation": str,
    "qkv_bias": bool,
    "attn_out_bias": bool,
    "mlp_bias": bool,
    "tied_head": bool,
    "sliding_window": int,
    "qk_norm": bool,
    "wide_qk_norm": bool,
    "pre_norms": bool,
    "post_norms": bool,
    "norms_less_one": bool,
    "norms_add_one": bool,
    "embedding_scale": float,
    "residual_scale": float,
    "logit_divisor": float,
    "fused": bool,
    "gated": bool,
    "alibi_max": float,
    "query_scalar": float,
    "attn_softcap": float,
    "final_softcap": float,
}
_MAX_LAYERS = 4096
"""Limit of counts, so that a damaged one cannot create a tuple of 2^31 entries."""
_MAY_BE_NONE = ("sliding_window", "attn_softcap", "final_softcap")
"""Fields for which null has a meaning."""
_MAY_BE_ZERO = ("head_dim", "vocab_size", "query_scalar", *_MAY_BE_NONE)
_TYPE_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
Rule = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """Hold a parsed TOML file. `config` and `gguf` are its two sections."""

    name: str
    norm: str
    config: Mapping[str, Any]
    gguf: Mapping[str, Any]

    @property
    def text_parts(self) -> tuple[tuple[str, str], ...]:
        """Return the multimodal architectures whose language part may be of this family, with the part's type."""
        kinds = self.config.get("only", {}).get("model_type", ())
        return tuple((whole, kind) for whole in self.config.get("text_of", ()) for kind in kinds)

    def spec_from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        """Read the config.json of a Hugging Face directory.

        Raises:
            CorruptModel: a field is missing or of the wrong type.
            UnsupportedModel: an unknown RoPE kind, activation, storage or setting; the message names it.
        """
        config, is_part = self._text_part(config)
        for table in self.config.get("nested", ()):
            inner = _table(config, table)
            config = {**config, **{f"{table}.{key}": value for key, value in inner.items()}}
        only = self.config.get("only", {}) | (self.config.get("text_only", {}) if is_part else {})
        _check_only(config, _ONLY | only, "config.json")
        fields = self._fields(_Source("config.json", config), self.config["spec"])
        windowed: tuple[bool, ...] = ()
        if fields.get("sliding_window"):
            windowed = windowed_layers(config, self.config, fields["num_layers"], "config.json")
        return self._build(
            fields,
            rope_from_config(config, fields["max_position"], fields["head_dim"], self.config.get("rope", {})),
            windowed_layers=windowed,
            unrotated_layers=unrotated_layers(config, self.config, fields["num_layers"], "config.json"),
            kv_source_layers=kv_source_layers(config, self.config.get("kv_source_layers", ""), fields, "config.json"),
            eos_token_ids=token_ids(config.get("eos_token_id")),
            bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
            names=self._names(TEXT_PARTS[0] if is_part else None),
        )

    def _text_part(self, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        """Return the configuration of a multimodal checkpoint's language part and True; of other checkpoints `config`
        itself and False.
        """
        if not self.text_parts or TEXT_PART not in config:
            return config, False
        _check_only(config, _ONLY, "config.json")
        of_whole = {key: config[key] for key in _OF_WHOLE if config.get(key) is not None}
        return _table(config, TEXT_PART) | of_whole, True

    def _names(self, text_part: tuple[str, str] | None = None) -> ModuleNames:
        names = self.config.get("names", {})
        parts = {"norms": tuple(names["norms"]), "sites": tuple(map(tuple, names["sites"]))} if names else {}
        return ModuleNames(**(names | parts), text_part=text_part)

    def spec_from_gguf(self, meta: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelSpec:
        """Read GGUF metadata.

        Args:
            tensors: names of the file's tensors, because biases appear nowhere else.
        Raises:
            CorruptModel: a key is missing or of the wrong type.
            UnsupportedModel: an unknown RoPE kind or size; the message names it.
        """
        prefix = f"{meta.get('general.architecture')}."
        source = _Source("the GGUF metadata", meta, prefix, tensors)
        read = {rule if isinstance(rule, str) else rule.get("key") for rule in self.gguf["spec"].values()}
        only = _GGUF_ONLY | self.gguf.get("only", {})
        _check_only(meta, {key: value for key, value in only.items() if key not in read}, source.label, prefix)
        fields = self._fields(source, self.gguf["spec"])
        tokens = meta.get("tokenizer.ggml.tokens", [])
        fields["vocab_size"] = fields.get("vocab_size") or (len(tokens) if isinstance(tokens, list) else 0)
        head_dim = fields["head_dim"]
        windowed: tuple[bool, ...] = ()
        if meta.get(f"{prefix}attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel("values of another size than keys (attention.value_length) are not supported")
        if fields.get("sliding_window"):
            windowed = windowed_layers(meta, self.gguf, fields["num_layers"], source.label, prefix)
        return self._build(
            fields,
            rope_from_gguf(meta, prefix, head_dim, self.gguf.get("rope", {}), tensors),
            windowed_layers=windowed,
            unrotated_layers=unrotated_layers(meta, self.gguf, fields["num_layers"], source.label),
            eos_token_ids=_gguf_ends(meta, tokens),
            bos_token_id=next(iter(token_ids(meta.get("tokenizer.ggml.bos_token_id"))), None),
            names=self._names(),
        )

    def gguf_name(self, name: str) -> str:
        """Return GGUF's name of a canonical tensor name.

        Raises:
            KeyError: the family has no such tensor.
        """
        module, _, kind = name.rpartition(".")
        layer, inner = split_layer(module)
        template = self.gguf["tensors"][module if layer is None else f"model.layers.{{i}}.{inner}"]
        return f"{template.replace('{i}', str(layer))}.{kind}"

    def permuted_heads(self, name: str, spec: ModelSpec) -> int | None:
        """Return the number of heads if this family's GGUF files store the tensor's rows as rotated pairs; None if they
        are in Hugging Face's order.
        """
        _, inner = split_layer(name.rpartition(".")[0])
        field = self.gguf["permuted"].get(inner)
        return None if field is None else int(getattr(spec, field))

    def _fields(self, source: "_Source", rules: Mapping[str, Rule]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for field, rule in rules.items():
            fields[field] = source.resolve(field, rule, fields)
        fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // fields["num_heads"]
        return fields

    def _build(self, fields: dict[str, Any], ropes: Ropes, **rest: Any) -> ModelSpec:
        activation = fields["activation"]
        known = ACTIVATIONS if fields.get("gated", True) else PLAIN_ACTIVATIONS
        if activation not in known:
            raise UnsupportedModel(f"activation {activation!r} is not supported; known: {', '.join(known)}")
        windowed = rest.get("windowed_layers", ())
        no_window = windowed and not any(windowed)
        fields |= {
            "activation": known[activation],
            "max_position": min(fields["max_position"], ropes[0].max_position or fields["max_position"]),
            "query_scalar": fields.get("query_scalar") or float(fields["head_dim"]),
            "sliding_window": None if no_window else fields.get("sliding_window") or None,
            "attn_softcap": fields.get("attn_softcap") or None,
            "final_softcap": fields.get("final_softcap") or None,
        }
        if ropes[1] is not None and not fields["sliding_window"] and not no_window:
            raise UnsupportedModel(f"family {self.name} without a sliding window is not supported")
        rest |= {"rope": ropes[0], "rope_local": None if no_window else ropes[1]}
        rest["windowed_layers"] = () if no_window else windowed
        if fields["num_heads"] % fields["num_kv_heads"] or fields["head_dim"] % 2:
            raise CorruptModel("the number of heads must be a multiple of key heads, and a head's size even")
        if not fields["vocab_size"]:
            raise CorruptModel("the checkpoint does not declare its vocabulary size")
        if not fields.get("pre_norms", True) and fields.get("residual_scale", 1.0) != 1:
            raise UnsupportedModel("residual_scale is not supported without norms before attention and MLP")
        for layer, source in enumerate(rest.get("kv_source_layers", ())):
            if fields.get("fused") or (windowed and windowed[layer] != windowed[source]):
                raise UnsupportedModel(
                    f"layer {layer} reads keys of layer {source}, whose attention is of another kind"
                )
        return ModelSpec(family=self.name, norm=self.norm, **fields, **rest)


@dataclass(frozen=True, slots=True)
class _Source:
    """Hold a mapping of values, its name in messages, and the tensor names of its file."""

    label: str
    values: Mapping[str, Any]
    prefix: str = ""
    tensors: Collection[str] = ()

    def resolve(self, field: str, rule: Rule, known: Mapping[str, Any]) -> Any:
        """Return the value of one field by its rule; see specs/llama.toml."""
        table: Mapping[str, Any] = {"key": rule} if isinstance(rule, str) else rule
        if "value" in table:
            return table["value"]
        if "field" in table:
            return (known[table["field"]] * table.get("times", 1)) ** table.get("power", 1)
        if "tensor" in table:
            return table["tensor"] in self.tensors
        if "at_layers" in table:
            return known["hidden_size"] / known["num_heads"] if known["num_layers"] in table["at_layers"] else 0.0
        if "no_tensor" in table:
            return table["no_tensor"] not in self.tensors
        key = self.prefix + table["key"]
        value = self.values.get(key)
        if value is not None:
            checked = self._checked(field, key, value, may_be_zero=field in _MAY_BE_ZERO and "power" not in table)
            if "power" in table:
                return self._power(key, checked, table["power"])
            return table.get("means", {}).get(checked, checked)
        if field in _MAY_BE_NONE and key in self.values:
            return None
        if "null_field" in table and key in self.values:
            return known[table["null_field"]]
        if "default_field" in table:
            return known[table["default_field"]]
        if "default" not in table:
            raise CorruptModel(f"{self.label} lacks {key}")
        return table["default"]

    def _power(self, key: str, value: float, power: float) -> float:
        try:
            result = float(value**power)
        except OverflowError:
            result = math.inf
        if not 0 < result < math.inf:
            raise CorruptModel(f"{self.label}: {key} {value} is too large or too small")
        return result

    def _checked(self, field: str, key: str, value: Any, *, may_be_zero: bool) -> Any:
        wanted = _FIELD_TYPES[field]
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            raise CorruptModel(f"{self.label}: {key} must be {_TYPE_WORDS[wanted]}, not {value!r:.60}")
        if wanted in (int, float):
            self._check_positive(field, key, value, may_be_zero)
        return value

    def _check_positive(self, field: str, key: str, value: Any, may_be_zero: bool) -> None:
        if not (0 < value < math.inf or (value == 0 and may_be_zero)):
            raise CorruptModel(f"{self.label}: {key} must be positive, not {value}")
        if field == "num_layers" and value > _MAX_LAYERS:
            raise CorruptModel(f"{self.label}: {key} {value} is more than {_MAX_LAYERS}")


class Families:
    """Hold the known families."""

    def __init__(self, families: Sequence[Family]) -> None:
        self.families = tuple(families)
        self._hf = {a: family for family in families for a in family.config["architectures"]}
        self._gguf = {a: family for family in families for a in family.gguf["architectures"]}
        self._parts = {part: family for family in families for part in family.text_parts}

    def detect(self, architecture: str, text_type: object = None) -> Family:
        """Return the family of an architecture as config.json or general.architecture spells it.

        Args:
            text_type: `model_type` of the language part, if the architecture is multimodal.
        Raises:
            UnsupportedModel: unknown; the message lists the known architectures.
        """
        of_part = self._parts.get((architecture, str(text_type)))
        family = of_part or self._hf.get(architecture) or self._gguf.get(architecture)
        if family is None and (types := [kind for whole, kind in self._parts if whole == architecture]):
            known = ", ".join(sorted(types))
            raise UnsupportedModel(f"{architecture} of {text_type!r:.80} is not supported; known: {known}")
        if family is None:
            known = ", ".join(sorted({*self._hf, *self._gguf, *(whole for whole, _ in self._parts)}))
            raise UnsupportedModel(f"architecture {architecture!r:.80} is not supported; known: {known}")
        return family


def load_families(extra_dirs: Sequence[Path] = ()) -> Families:
    """Parse the built-in TOML files and those of `extra_dirs`; a later file of the same name wins.

    Raises:
        ConfigError: a file describes no family; the message names the file and the mistake.
    """
    tables: dict[str, dict[str, Any]] = {}
    for directory in (SPEC_DIR, *extra_dirs):
        for path in sorted(directory.glob("*.toml")):
            try:
                table = tomllib.loads(path.read_text("utf-8"))
                tables[table["name"]] = table
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as e:
                raise ConfigError(f"family file {path.name} is not valid: {e}") from None
    return Families([_family(tables, name) for name in tables])


@cache
def builtin_families() -> Families:
    """Return `load_families()`, parsed once."""
    return load_families()


def detect(architecture: str, text_type: object = None) -> Family:
    """Return the built-in family of an architecture; arguments and errors are those of `Families.detect`."""
    return builtin_families().detect(architecture, text_type)


def _family(tables: Mapping[str, dict[str, Any]], name: str) -> Family:
    table = _inherit(tables, name, ())
    if table.get("norm") not in NORMS:
        raise ConfigError(f"family {name}: norm {table.get('norm')!r} is unknown; choose from {', '.join(NORMS)}")
    for section in ("config", "gguf"):
        unknown = table[section]["spec"].keys() - _FIELD_TYPES.keys()
        if unknown:
            raise ConfigError(f"family {name}: [{section}.spec] has unknown fields: {', '.join(sorted(unknown))}")
    return Family(name, table["norm"], table["config"], table["gguf"])


def _inherit(tables: Mapping[str, dict[str, Any]], name: str, heirs: tuple[str, ...]) -> dict[str, Any]:
    """Return a family's table, completed from its ancestors: sections, and in them `spec` and `tensors`, key by key."""
    if name not in tables or name in heirs:
        raise ConfigError(f"family {heirs[-1] if heirs else name} extends {name}, which is unknown or its own heir")
    table = tables[name]
    if "extends" not in table:
        return table
    parent = _inherit(tables, table["extends"], (*heirs, name))
    merged = {**parent, **table}
    for section in ("config", "gguf"):
        old, new = parent[section], table.get(section, {})
        merged[section] = old | new
        for inner in ("spec", "tensors", "rope"):
            merged[section][inner] = old.get(inner, {}) | new.get(inner, {})
    return merged


def token_ids(value: Any) -> tuple[int, ...]:
    """Return a tuple of the distinct ids, in order; the value is one id, a list of ids, or None."""
    ids = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in ids if type(i) is int and i >= 0))


def split_layer(module: str) -> tuple[int | None, str]:
    """Split `model.layers.3.mlp.up_proj` into (3, "mlp.up_proj"); (None, module) outside the layers."""
    if not module.startswith(LLAMA_LAYERS):
        return None, module
    layer, _, inner = module.removeprefix(LLAMA_LAYERS).partition(".")
    return int(layer), inner


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint of this spec must hold, by canonical name."""
    h = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, h)}
    for layer in range(spec.num_layers):
        shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in _layer_shapes(spec, layer))
    shapes["model.norm.weight"] = (h,)
    if not spec.tied_head:
        shapes["lm_head.weight"] = (spec.vocab_size, h)
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for module, width in spec.norms(layer).values():
        yield f"{module}.weight", (width,)
    for site in spec.sites_of(layer):
        for module, out in zip(site.modules, site.out_features, strict=True):
            yield f"{module}.weight", (out, site.in_features)
            if spec.has_bias(site.name):
                yield f"{module}.bias", (out,)
