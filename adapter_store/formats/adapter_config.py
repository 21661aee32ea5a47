"""adapter_config.json: what each field means for serving, and the few numbers that decide the result.

`FIELD_RULES` has a rule for every known field: it is honoured, harmless, or refused with a remedy. A field without a
rule is refused unless it is empty, so that a future LoRA variant is never served as plain LoRA. The rules were checked
against the fields and semantics of LoraConfig in PEFT 0.21. Before any field is interpreted, the size, depth and types
of the JSON are checked.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from adapter_store.errors import AdapterInvalid, Problem, ProblemList, show, show_name
from adapter_store.formats.module_selection import NO_SELECTION, ModuleSelection, read_selection, strings
from adapter_store.formats.name_pattern import MAX_INSTRUCTIONS, Pattern, parse_pattern
from adapter_store.formats.strict_json import refuse_constant, unique_pairs
from adapter_store.spec import AddedToken

MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIG_DEPTH = 32
Config = Mapping[str, object]


def check_json(config: Config, problems: ProblemList) -> bool:
    """Check that a config is shallow JSON of limited size with finite numbers, also if it was not parsed from text."""
    before = len(problems)
    stack: list[tuple[str, object, int]] = [("", config, 0)]
    nodes = 0
    while stack and nodes <= MAX_CONFIG_BYTES:
        path, value, depth = stack.pop()
        nodes += 1
        if depth > MAX_CONFIG_DEPTH:
            problems.add("malformed_config", path[:80], f"is nested deeper than {MAX_CONFIG_DEPTH} levels")
            return False
        if isinstance(value, Mapping | list):
            stack.extend((p, v, depth + 1) for p, v in _children(path, value, problems))
        elif not _is_scalar(value):
            problems.add("malformed_config", path, f"{show(value)} is not a JSON value")
    if len(problems) == before and len(json.dumps(config, default=dict)) > MAX_CONFIG_BYTES:
        problems.add("config_too_large", "adapter_config.json", f"has more than {MAX_CONFIG_BYTES} bytes")
    return len(problems) == before


def _children(path: str, value: object, problems: ProblemList) -> Iterator[tuple[str, object]]:
    if isinstance(value, list):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                problems.add("malformed_config", path, f"key {show(key)} must be a string")
            else:
                yield f"{path}.{show_name(key)}".lstrip("."), item


def _is_scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, str)


MIN_MAX_NAMES = 1024
NAMING = ("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "modules_to_save")
MERGE = "merge it into the base (peft: merge_and_unload) and serve that"
MLX_REMEDY = (
    "`lorasrv upload` and `lorasrv check` convert MLX's folder as it is (adapters.safetensors and adapter_config.json)"
)
RETRAIN = "train it again as plain LoRA"
CONVERT = "PEFT's save_as_lora() turns some other types into LoRA of almost the same effect"


class Decision(StrEnum):
    """Say what serving does with a config field."""

    HONOURED = "honoured"
    HARMLESS = "harmless"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Describe a field, the decision about it and, if it is refused, the remedy."""

    decision: Decision
    description: str
    remedy: str = ""


def _refused(description: str, remedy: str) -> FieldRule:
    return FieldRule(Decision.REFUSED, description, remedy)


def _harmless(description: str) -> FieldRule:
    return FieldRule(Decision.HARMLESS, description)


def _honoured(description: str) -> FieldRule:
    return FieldRule(Decision.HONOURED, description)


FIELD_RULES: Mapping[str, FieldRule] = {
    "peft_type": _honoured("must be LORA"),
    "task_type": _honoured("must be CAUSAL_LM, or absent unless the adapter is an aLoRA"),
    "r": _honoured("rank of every module that rank_pattern does not name"),
    "lora_alpha": _honoured("scaling is alpha / r, or alpha / sqrt(r) with use_rslora"),
    "use_rslora": _honoured("scaling is alpha / sqrt(r)"),
    "rank_pattern": _honoured("rank by module name: names, or regular expressions that RE2 reads as Python does"),
    "alpha_pattern": _honoured("alpha by module name, as rank_pattern"),
    "init_lora_weights": _honoured("initialisations that leave the base as it is"),
    "bias": _honoured("none, lora_only or all: biases of the file replace the base's"),
    "use_dora": _honoured("every adapted module has a magnitude, by which its output is scaled"),
    "lora_bias": _honoured("every lora_B has a bias"),
    "use_qalora": _honoured("a lora_A with pooled inputs is PEFT's of a GPTQ layer; one with all inputs is plain LoRA"),
    "velora_config": _harmless("training only: gradients of compressed inputs"),
    "monteclora_config": _harmless("training only: sampled weights, of which those in the file are the mean"),
    "qalora_group_size": _honoured("with use_qalora: how many inputs are pooled"),
    "ensure_weight_tying": _honoured("a tied head follows modules_to_save, and shares one LoRA with embed_tokens"),
    "modules_to_save": _honoured("norms, lm_head and embed_tokens: those of the file replace the base's"),
    "trainable_token_indices": _honoured("rows of embed_tokens, and of lm_head, replace the base's"),
    "added_tokens": _honoured("not PEFT's: tokens of the adapter's own, which `upload` reads from its tokenizer.json"),
    "target_modules": _honoured(
        "must select the modules that have tensors: names, all-linear, or an expression for whole names"
    ),
    "exclude_modules": _honoured("with target_modules: names, or an expression"),
    "layers_to_transform": _honoured("with target_modules; layers without tensors stay as the base"),
    "layers_pattern": _honoured("with layers_to_transform: what stands before a layer's number"),
    "alora_invocation_tokens": _honoured(
        "aLoRA: the adapter acts from the last place in the prompt that has these tokens"
    ),
    "base_model_name_or_path": _harmless(
        "a name or quantization other than the served base's is a warning; shapes decide"
    ),
    "revision": _harmless("a revision of the base"),
    "lora_dropout": _harmless("training only"),
    "inference_mode": _harmless("training only"),
    "auto_mapping": _harmless("metadata"),
    "peft_version": _harmless("metadata"),
    "megatron_config": _harmless("how training was distributed"),
    "megatron_core": _harmless("how training was distributed"),
    "runtime_config": _harmless("how PEFT loads it"),
    "eva_config": _harmless("initialisation only"),
    "corda_config": _harmless("read with init_lora_weights only"),
    "lora_ga_config": _harmless("read with init_lora_weights only"),
    "loftq_config": _harmless("read with init_lora_weights only"),
    "target_parameters": _refused("adapts parameters that are not linear modules (experts)", MERGE),
    "layer_replication": _refused(
        "the adapter's base has its layers repeated",
        "build that base (copies of the layers, and their num_hidden_layers), serve it, and set this to null",
    ),
    "fan_in_fan_out": _refused(
        "the base layer's weight is transposed (GPT-2 Conv1D)",
        "this base has no such layer: set it to false if the adapter was trained on this base",
    ),
    "use_bdlora": _refused("block-diagonal LoRA has tensors of another layout", RETRAIN),
    "arrow_config": _refused("Arrow routes between several adapters", "serve each adapter under its own id"),
    "kasa_config": _refused("KaSA scales singular values of the base", f"{MERGE}, or {RETRAIN}"),
}
DECISIVE_FIELDS = ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_EXTRA_FIELDS = {
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "use_qalora": False,
    "qalora_group_size": 16,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "ensure_weight_tying": False,
    "added_tokens": None,
    "alora_invocation_tokens": None,
}
"""Fields that name tensors beside A and B, or describe them, with the value that names none."""
BIASES = ("none", "lora_only", "all")
# These change only the initial values of training: the forward pass is plain LoRA's, also for MiCA.
INERT_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
VARIANTS = ("use_dora", "alora_invocation_tokens", "velora_config", "monteclora_config")
MAX_INVOCATION_TOKENS = 256
"""Finding the tokens may take time in proportion to their number times the prompt's, and errors show them."""
_SET_TO_NULL = "set it to null, it matters in training only"
LINEARS_ONLY = {
    "alora_invocation_tokens": "train it again without the embedding in target_modules",
    "velora_config": _SET_TO_NULL,
    "monteclora_config": _SET_TO_NULL,
}
"""Variants that PEFT does not have for embeddings, with the remedy."""
RESIDUAL_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Hold the fields that serving reads, with PEFT's meaning. If several patterns match, the first applies.

    `token_indices` has the tokens of each module that `trainable_token_indices` names; "" means the embedding, whatever
    its name. `group_size` is the number of inputs that QALoRA pools, 1 without it. `linears_only` is a variant that
    PEFT does not have for embeddings, or "". `invocation_tokens` are those of an aLoRA.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[Pattern, int], ...] = ()
    alpha_pattern: tuple[tuple[Pattern, float], ...] = ()
    selection: ModuleSelection = NO_SELECTION
    base_model_name: str = ""
    bias: str = "none"
    use_dora: bool = False
    lora_bias: bool = False
    group_size: int = 1
    linears_only: str = ""
    modules_to_save: tuple[str, ...] = ()
    token_indices: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ensure_weight_tying: bool = False
    added_tokens: tuple[AddedToken, ...] = ()
    invocation_tokens: tuple[int, ...] = ()

    def rank(self, module_name: str) -> int:
        """Return the rank of a module, by its name in the base (`model.layers.0.self_attn.q_proj`)."""
        return next((r for pattern, r in self.rank_pattern if pattern.matches(module_name)), self.r)

    def scaling(self, module_name: str) -> float:
        """Return the factor of `lora_b @ lora_a` for a module, as PEFT computes it."""
        alpha = next((a for pattern, a in self.alpha_pattern if pattern.matches(module_name)), self.lora_alpha)
        rank = self.rank(module_name)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_config(data: bytes) -> dict[str, object]:
    """Parse adapter_config.json strictly: at most 1 MiB, no repeated key, no NaN.

    Raises:
        AdapterInvalid: the data is not such a JSON object.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise _config_error("config_too_large", f"has {len(data)} bytes; at most {MAX_CONFIG_BYTES} are read")
    try:
        config = json.loads(data.decode("utf-8"), object_pairs_hook=unique_pairs, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not strict JSON: {error}"
        raise _config_error("malformed_config", reason) from None
    if not isinstance(config, dict):
        raise _config_error("malformed_config", f"must be a JSON object, not {show(config)}")
    return config


def _config_error(code: str, message: str) -> AdapterInvalid:
    return AdapterInvalid((Problem(code, "adapter_config.json", message),))


def decisive_fields(config: Config) -> dict[str, object]:
    """Return the fields of an accepted config that decide the result; the others describe the training."""
    extra = {name: config[name] for name, unset in _EXTRA_FIELDS.items() if config.get(name) not in (None, unset, [])}
    return {name: config[name] for name in DECISIVE_FIELDS if name in config} | extra


def canonical_json(value: object) -> str:
    """Return the same text for equal values: sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_adapter_config(config: Config, problems: ProblemList, max_names: int = MIN_MAX_NAMES) -> AdapterConfig | None:
    """Read a config.

    Args:
        config: the parsed JSON.
        problems: receives every problem found.
        max_names: most entries of a field that names modules; each is compared with each module of the base.

    Returns:
        The fields that serving reads, or None if there are problems.
    """
    before = len(problems)
    if not check_json(config, problems):
        return None
    _check_peft_type(config, problems)
    if is_foreign(config) or not _check_lengths(config, max_names, problems):
        return None
    _check_fields(config, problems)
    ranks = list(_patterns(config, "rank_pattern", problems))
    alphas = list(_patterns(config, "alpha_pattern", problems, sum(pattern.size for pattern, _, _ in ranks)))
    adapter_config = AdapterConfig(
        r=_rank(config.get("r"), "r", problems),
        lora_alpha=_alpha(config.get("lora_alpha"), "lora_alpha", problems),
        use_rslora=_flag(config, "use_rslora", problems),
        rank_pattern=tuple((p, _rank(v, f, problems)) for p, v, f in ranks),
        alpha_pattern=tuple((p, _alpha(v, f, problems)) for p, v, f in alphas),
        selection=read_selection(config, problems, sum(pattern.size for pattern, _, _ in (*ranks, *alphas))),
        base_model_name=_text(config.get("base_model_name_or_path")),
        bias=_bias(config.get("bias"), problems),
        use_dora=_flag(config, "use_dora", problems),
        lora_bias=_flag(config, "lora_bias", problems),
        group_size=_group_size(config, problems),
        linears_only=next((name for name in variants_of(config) if name in LINEARS_ONLY), ""),
        modules_to_save=_saved_modules(config.get("modules_to_save"), problems),
        token_indices=tuple(_token_indices(config.get("trainable_token_indices"), problems)),
        ensure_weight_tying=_flag(config, "ensure_weight_tying", problems),
        added_tokens=tuple(read_added_tokens(config, problems)),
        invocation_tokens=_invocation_tokens(config.get("alora_invocation_tokens"), problems),
    )
    return adapter_config if len(problems) == before else None


def _check_lengths(config: Config, max_names: int, problems: ProblemList) -> bool:
    before = len(problems)
    for field in NAMING:
        value = config.get(field)
        if isinstance(value, Mapping | list) and len(value) > max_names:
            problems.add(
                f"too_long_{field}",
                field,
                f"has {len(value)} entries; {max_names} are the most for this base; one entry can name the same module "
                "of every layer",
            )
    return len(problems) == before


def is_foreign(config: Config) -> bool:
    """Return whether another method than LoRA wrote the config: its fields and tensors mean something else."""
    peft_type = config.get("peft_type")
    return isinstance(peft_type, str) and peft_type.upper() != "LORA"


def _check_fields(config: Config, problems: ProblemList) -> None:
    for key, value in config.items():
        rule = FIELD_RULES.get(key)
        # In PEFT, {} enables a feature with default values.
        is_set = value or isinstance(value, Mapping)
        if rule is None and is_set:
            problems.add(
                "unsupported_config_key",
                show_name(key),
                f"= {show(value)} is not known here and could change the result; remove it if it is only a note",
            )
        elif rule is not None and rule.decision is Decision.REFUSED and is_set:
            problems.add(
                f"unsupported_{key}", key, f"= {show(value)} is not served: {rule.description}. {_remedy(rule)}"
            )
    _check_init(config.get("init_lora_weights"), problems)
    _check_together(config, problems)


def _check_together(config: Config, problems: ProblemList) -> None:
    """Refuse fields that exclude each other in PEFT's LoraConfig, which does not load such a file."""
    dora, bias = config.get("use_dora"), config.get("lora_bias")
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern")
    is_text = isinstance(config.get("target_modules"), str)
    names = "with target_modules as one text, in PEFT neither; list the modules' names"
    variants = variants_of(config)
    found = {
        "lora_bias": bias and dora and "= true does not go with use_dora, in PEFT neither",
        "init_lora_weights": bias
        and not isinstance(config.get("init_lora_weights", True), bool)
        and "must be true or false with lora_bias, in PEFT too; it matters before training only, so set it to true",
        "use_dora": dora
        and config.get("megatron_config")
        and "= true does not go with megatron_config, in PEFT neither; remove that, it describes the training",
        "layers_to_transform": is_text and layers is not None and f"does not go {names}",
        "layers_pattern": (is_text and pattern is not None and f"does not go {names}")
        or (pattern and layers is None and "needs layers_to_transform, in PEFT too; remove it"),
    }
    if len(variants) > 1:
        found[variants[0]] = f"does not go with {variants[1]}, in PEFT neither; remove what it was trained without"
    for field, reason in found.items():
        if reason:
            problems.add(f"unsupported_{field}", field, str(reason))


def variants_of(config: Config) -> list[str]:
    """Return the served variants of LoRA that a config asks for, of which PEFT accepts one."""
    is_mica = str(config.get("init_lora_weights")).lower() == "mica"
    found = [name for name in VARIANTS if config.get(name) or isinstance(config.get(name), Mapping)]
    return [*found, "init_lora_weights"] if is_mica else found


def _remedy(rule: FieldRule) -> str:
    return f"{rule.remedy[0].upper()}{rule.remedy[1:]}."


def _check_peft_type(config: Config, problems: ProblemList) -> None:
    peft_type, task = config.get("peft_type"), config.get("task_type")
    if not isinstance(peft_type, str) or peft_type.upper() != "LORA":
        if "fine_tune_type" in config or "lora_parameters" in config:
            problems.add("mlx_adapter", "adapter_config.json", f"is MLX's; {MLX_REMEDY}")
            return
        problems.add(
            "unsupported_peft_type", "peft_type", f"= {show(peft_type)}; only 'LORA' is served. {CONVERT}, or {RETRAIN}"
        )
    if task and (not isinstance(task, str) or task.upper() != "CAUSAL_LM"):
        problems.add("unsupported_task_type", "task_type", f"= {show(task)}; only 'CAUSAL_LM' or null generates text")
    if not task and config.get("alora_invocation_tokens"):
        why = "PEFT looks for alora_invocation_tokens only with CAUSAL_LM, and answers with the base otherwise; set it"
        problems.add("unsupported_task_type", "task_type", f"= {show(task)}: {why}")


def _check_init(init: object, problems: ProblemList) -> None:
    if init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in INERT_INITS):
        return
    if isinstance(init, str) and init.lower().startswith(RESIDUAL_INITS):
        remedy = (
            f"LoftQ's base is rounded, so no plain LoRA has the same effect; {RETRAIN}"
            if init.lower().startswith("loftq")
            else "PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) writes it as a plain LoRA"
        )
        what = "training changed the base weights, so on the plain base the adapter is wrong"
        problems.add("unsupported_init", "init_lora_weights", f"= {show(init)}: {what}. {remedy}")
        return
    known = ", ".join(["true", "false", *sorted(INERT_INITS)])
    problems.add("unsupported_init", "init_lora_weights", f"= {show(init)} is not known here; served: {known}")


def _rank(value: object, field: str, problems: ProblemList) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    found = "is missing (PEFT's default is 8)" if value is None else f"= {show(value)}"
    problems.add("invalid_rank", field, f"{found}; it must be the rank it was trained with, an integer of at least 1")
    return 1


def _alpha(value: object, field: str, problems: ProblemList) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    found = "is missing (PEFT's default is 8)" if value is None else f"= {show(value)}"
    problems.add("invalid_alpha", field, f"{found}; it must be the number it was trained with")
    return 1


def _flag(config: Config, field: str, problems: ProblemList) -> bool:
    value = config.get(field)
    if value is None or isinstance(value, bool):
        return bool(value)
    problems.add("invalid_flag", field, f"= {show(value)}; it must be true or false")
    return False


def _group_size(config: Config, problems: ProblemList) -> int:
    if not _flag(config, "use_qalora", problems):
        return 1
    size = config.get("qalora_group_size", 16)
    if isinstance(size, int) and not isinstance(size, bool) and size > 1:
        return size
    problems.add(
        "invalid_qalora_group_size",
        "qalora_group_size",
        f"= {show(size)}; it must be the number of pooled inputs, an integer of at least 2: with 1, PEFT's result over "
        "a GPTQ layer is not its result over other layers. Set use_qalora to false if it was not trained over GPTQ",
    )
    return 1


def _bias(value: object, problems: ProblemList) -> str:
    if value is None or value in BIASES:
        return str(value or "none")
    problems.add("unsupported_bias", "bias", f"= {show(value)} is not known to PEFT: none, lora_only or all")
    return "none"


def _saved_modules(value: object, problems: ProblemList) -> tuple[str, ...]:
    names = strings(value or [])
    if names is None:
        problems.add(
            "invalid_modules_to_save", "modules_to_save", f"= {show(value)}; it must be a list of module names"
        )
    return names or ()


def _token_indices(value: object, problems: ProblemList) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the module and the tokens of each list of `trainable_token_indices`."""
    field = "trainable_token_indices"
    lists = value if isinstance(value, Mapping) else {"": value} if value is not None else {}
    for module, ids in lists.items():
        where = f"{field}[{show(module)}]" if module else field
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            problems.add(f"invalid_{field}", where, f"= {show(ids)}; it must be a list of token ids")
        elif (twice := next((i for i, count in Counter(ids).items() if count > 1), None)) is not None:
            problems.add(f"invalid_{field}", where, f"names token {twice} twice, and one of its rows would be lost")
        elif ids:
            yield module, tuple(ids)


def _invocation_tokens(value: object, problems: ProblemList) -> tuple[int, ...]:
    if not isinstance(value, list | None) or not all(type(token) is int and token >= 0 for token in value or []):
        problems.add(
            "invalid_alora_invocation_tokens",
            "alora_invocation_tokens",
            f"= {show(value)}; it must be a list of token ids",
        )
        return ()
    if len(value or ()) > MAX_INVOCATION_TOKENS:
        what = f"has {len(value or ())} tokens, and {MAX_INVOCATION_TOKENS} are the most; train it with a shorter text"
        problems.add("invalid_alora_invocation_tokens", "alora_invocation_tokens", what)
    return tuple(value or ())


MAX_TOKEN_CHARS = 128
TOKEN_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


def read_added_tokens(config: Config, problems: ProblemList) -> Iterator[AddedToken]:
    """Yield the tokens that an adapter adds, read from entries as in a tokenizer.json."""
    value = config.get("added_tokens")
    if not isinstance(value, list | None):
        problems.add("invalid_added_tokens", "added_tokens", f"= {show(value)}; it must be a list of tokens")
        return
    for number, token in enumerate(value or []):
        try:
            yield read_added_token(token)
        except ValueError:
            what = (
                f"= {show(token)}; it must have id and content, of at most {MAX_TOKEN_CHARS} characters, as in "
                "tokenizer.json"
            )
            problems.add("invalid_added_tokens", f"added_tokens[{number}]", what)


def read_added_token(value: object) -> AddedToken:
    """Return a token, read from an entry as in a tokenizer.json.

    Raises:
        ValueError: it has no id, its content is not text of 1 to `MAX_TOKEN_CHARS` characters, or a flag is not a bool.
    """
    fields = value if isinstance(value, Mapping) else {}
    token_id, content = fields.get("id"), fields.get("content")
    flags = {name: fields[name] for name in TOKEN_FLAGS if name in fields}
    if type(token_id) is not int or not isinstance(content, str) or not 1 <= len(content) <= MAX_TOKEN_CHARS:
        raise ValueError(value)
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError(value)
    # JSON may contain half a surrogate pair, which no tokenizer accepts.
    content.encode("utf-8")
    return AddedToken(token_id, content, **flags)


def _patterns(
    config: Config, field: str, problems: ProblemList, size: int = 0
) -> Iterator[tuple[Pattern, object, str]]:
    """Yield (pattern, value, place) of every entry that can be matched.

    Args:
        size: total size of the patterns read before; the total of all is limited.
    """
    value = config.get(field)
    if value is None:
        return
    if not isinstance(value, Mapping):
        problems.add(f"invalid_{field}", field, f"= {show(value)}; it must be an object of module names")
        return
    for key, number in value.items():
        where = f"{field}[{show(key)}]"
        try:
            pattern = parse_pattern(key)
        except ValueError as error:
            # Stop here: refusing each further entry would take time, too.
            problems.add(f"unsupported_{field}", where, f"{error}. List the modules' names, one entry each")
            return
        size += pattern.size
        if size > MAX_INSTRUCTIONS:
            problems.add(f"unsupported_{field}", where, "is too much, with those before it; list the modules' names")
            return
        yield pattern, number, where


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
