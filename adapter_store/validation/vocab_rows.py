"""Tensors with whole rows of the embedding and of the head (the two tables), and what PEFT does with them.

There are three kinds: a trained copy of a table (`modules_to_save`), rows of some tokens (`trainable_token_indices`),
and the base's own table, which PEFT saves beside LoRA of it. PEFT loads the last kind over the base's table, which
changes both tables where they are tied. The other two kinds belong to one module, unless PEFT ties them.

An adapter whose model was resized (`resize_token_embeddings`) has its own vocabulary: both tables have a row for each
of its tokens. The adapter's tokenizer names the tokens that the base, or the base's tokenizer, lacks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from adapter_store.errors import ProblemList
from adapter_store.formats.adapter_config import AdapterConfig
from adapter_store.formats.safetensors_file import SafetensorsHeader
from adapter_store.formats.tensor_names import FROZEN, SECOND_COPY, TOKEN_ROWS, WEIGHT, A, B
from adapter_store.spec import BaseShapes, VocabRows
from adapter_store.validation.extra_tensors import Parts, Site
from adapter_store.validation.target_modules import ties_copies

MAX_ROW_BYTES = 2 << 30
"""Most bytes, in bf16, of an adapter's trained rows: both tables for 128,256 tokens with hidden size 4,096."""
MAX_ADDED_TOKENS = 1024
"""Most tokens that an adapter may add to the base's: they widen the logits of every step with the adapter."""
_TOKENS = "trainable_token_indices"


@dataclass(frozen=True, slots=True)
class OwnVocabulary:
    """Hold the rows of an adapter, of which later ones replace earlier ones, and its number of tokens: 0 for as many as
    the base has.
    """

    rows: tuple[VocabRows, ...] = ()
    size: int = 0


def match_rows(
    groups: Mapping[Site, Parts],
    header: SafetensorsHeader,
    base: BaseShapes,
    config: AdapterConfig | None,
    problems: ProblemList,
) -> OwnVocabulary:
    """Return an adapter's vocabulary; record a problem for each tensor that PEFT would not load."""
    if config is None or not base.embedding:
        return OwnVocabulary()
    tensors = _Tensors(groups, base, config)
    rows = (*tensors.frozen(), *tensors.copies(), *_trained(tensors, problems))
    _check_conflicts(tensors, rows, problems)
    before = len(problems)
    size = _vocab_size(rows, header, tensors, problems)
    if len(problems) == before:
        _check_shapes(rows, header, base, size, problems)
    _check_tokens(config, size, problems)
    kept = tuple(own for i, own in enumerate(rows) if not _is_replaced(own, rows[i + 1 :]))
    return OwnVocabulary(kept, 0 if size == tensors.vocab_size else size)


class _Tensors:
    """Find the tensors of the two tables."""

    def __init__(self, groups: Mapping[Site, Parts], base: BaseShapes, config: AdapterConfig) -> None:
        self.base, self.config = base, config
        self.embedding = base.embedding
        self.head = next(end for end in base.ends if end != base.embedding)
        self.parts = {end: groups.get((base.num_layers, end), {}) for end in (self.embedding, self.head)}
        self.ids = {end: ids for own, ids in config.token_indices if (end := self.end_of(own))}

    @property
    def vocab_size(self) -> int:
        """Return how many tokens the base has."""
        return self.base.vocab_size

    @property
    def shares_ids(self) -> bool:
        """Return whether PEFT uses the trained rows of the embedding for the head, too."""
        own = self.ids.get(self.embedding)
        return self.base.tied and own is not None and self.ids.get(self.head, own) == own

    def end_of(self, name: str) -> str:
        """Return the table that a name in the config means, or "" if none."""
        ends = [end for end in self.parts if end.endswith(name)]
        return self.embedding if not name else next(iter(ends), "")

    def has_copy(self, end: str) -> bool:
        """Return whether a table has its own trained copy."""
        is_named = end.endswith(self.config.modules_to_save) or ties_copies(self.base, self.config)
        return WEIGHT in self.parts[end] and is_named

    def frozen_name(self, end: str) -> str:
        """Return the name of the base's own table in PEFT's model, the only one under which PEFT finds it."""
        parts = self.parts[end]
        if A in parts or B in parts:
            return f"{end}.base_layer.weight"
        if end in self.ids or (end == self.head and self.shares_ids):
            return f"{end}.token_adapter.base_layer.weight"
        return f"{end}.original_module.weight" if self.has_copy(end) else f"{end}.weight"

    def frozen(self) -> Iterator[VocabRows]:
        """Yield the saved copies of the base's own tables, once for each module whose table they replace."""
        for end, parts in self.parts.items():
            kinds = (FROZEN,) if self.has_copy(end) else (WEIGHT, FROZEN)
            for name in (parts[kind] for kind in kinds if kind in parts):
                parameter = _plain(name, end)
                for own in self.parts if self.base.tied else (end,):
                    yield VocabRows(own, name, parameter, frozen=True)

    def copies(self) -> Iterator[VocabRows]:
        """Yield the trained copies."""
        for end in filter(self.has_copy, self.parts):
            yield VocabRows(end, self.parts[end][WEIGHT], f"{end}.weight")


def _plain(name: str, end: str) -> str:
    """Return the name of a tensor's parameter, starting with the table's name."""
    return end + name.rpartition(end)[2]


def _trained(tensors: _Tensors, problems: ProblemList) -> Iterator[VocabRows]:
    """Yield the rows of `trainable_token_indices`."""
    if unknown := [own for own, _ in tensors.config.token_indices if not tensors.end_of(own)]:
        what = f"names {unknown[0]!r}, which is neither {tensors.embedding} nor {tensors.head} of this base"
        problems.add(f"unsupported_{_TOKENS}", _TOKENS, what)
    for end in tensors.parts:
        names = [own or "the embedding" for own, _ in tensors.config.token_indices if tensors.end_of(own) == end]
        if len(names) > 1:
            what = f"names {end} twice, as {' and '.join(names)}; name it once"
            problems.add(f"unsupported_{_TOKENS}", _TOKENS, what)
    for end, parts in tensors.parts.items():
        source = tensors.embedding if end == tensors.head and tensors.shares_ids else end
        ids, name = tensors.ids.get(source), tensors.parts[source].get(TOKEN_ROWS)
        if ids is None:
            if TOKEN_ROWS in parts:
                problems.add(f"{_TOKENS}_mismatch", end, f"has trained rows, but {_TOKENS} does not name it")
        elif name is None:
            what = f"has no token_adapter.trainable_tokens_delta, but {_TOKENS} names it; save the adapter again"
            problems.add(f"{_TOKENS}_mismatch", end, what)
        else:
            yield VocabRows(end, name, _plain(name, source), ids)


def _check_conflicts(tensors: _Tensors, rows: tuple[VocabRows, ...], problems: ProblemList) -> None:
    """Record a problem for each combination of tensors that PEFT does not load, or loads only in part."""
    trained = {own.module for own in rows if own.token_ids is not None}
    for end, parts in tensors.parts.items():
        has_lora = A in parts or B in parts
        if SECOND_COPY in parts and not tensors.has_copy(end):
            what = f"PEFT would not find {_plain(parts[SECOND_COPY], end)}; save the adapter again"
            problems.add("unread_weight", end, what)
        if tensors.has_copy(end) and has_lora:
            what = "has LoRA and a copy in modules_to_save; PEFT leaves the LoRA out. Train it in one way"
            problems.add("unsupported_modules_to_save", end, what)
        if tensors.has_copy(end) and end in trained:
            what = f"has trained rows ({_TOKENS}) and a copy in modules_to_save, in PEFT neither; train it in one way"
            problems.add(f"unsupported_{_TOKENS}", end, what)
        if end == tensors.embedding and end in trained and has_lora:
            problems.add(
                f"unsupported_{_TOKENS}", end, "has LoRA and trained rows, in PEFT neither; train it in one way"
            )
    for own in {own.name: own for own in rows if own.frozen}.values():
        source = next(end for end in tensors.parts if own.parameter.startswith(end))
        if own.parameter != (wanted := tensors.frozen_name(source)):
            what = f"PEFT would not find {own.parameter}, it looks for {wanted}; save the adapter again"
            problems.add("unread_weight", source, what)
    differ = tensors.ids.keys() >= tensors.parts.keys() and not tensors.shares_ids
    if tensors.base.tied and tensors.config.ensure_weight_tying and differ:
        what = "names other tokens of lm_head than of the embedding, which ensure_weight_tying contradicts, in PEFT too"
        problems.add(f"unsupported_{_TOKENS}", _TOKENS, what)


def _vocab_size(
    rows: tuple[VocabRows, ...], header: SafetensorsHeader, tensors: _Tensors, problems: ProblemList
) -> int:
    """Return the number of tokens that the adapter was trained with; record a problem if tables differ or lack rows."""
    vocab, hidden = tensors.base.ends[tensors.embedding]
    shapes = {own.name: header.tensors[own.name].shape for own in rows if own.token_ids is None}
    sizes = {shape[0]: name for name, shape in shapes.items() if len(shape) == 2 and shape[1] == hidden}
    named = [token for own in rows for token in own.token_ids or ()]
    size = max(sizes, default=max([vocab, *(token + 1 for token in named)]))
    if len(sizes) > 1:
        what = f"{sizes[max(sizes)]} has {max(sizes)} rows and {sizes[min(sizes)]} {min(sizes)}; save the adapter again"
        problems.add("unsupported_vocabulary", tensors.embedding, what)
    elif size > vocab + MAX_ADDED_TOKENS:
        what = f"has {size} tokens, {size - vocab} more than the base's {vocab}; {MAX_ADDED_TOKENS} more are the most"
        problems.add("too_many_added_tokens", tensors.embedding, what)
    elif size < vocab - MAX_ADDED_TOKENS:
        what = f"has {size} tokens, and this base {vocab}; at most {MAX_ADDED_TOKENS} may be left out"
        problems.add("unsupported_vocabulary", tensors.embedding, what)
    elif size > vocab and not tensors.config.added_tokens:
        what = (
            f"has {size} tokens, and this base {vocab}; upload it with its tokenizer.json, which names the others. If "
            f"they only pad the tables, cut each tensor that has {size} rows or columns to the first {vocab}"
        )
        problems.add("unsupported_vocabulary", tensors.embedding, what)
    elif size != vocab:
        for end, parts in tensors.parts.items():
            _check_has_rows(end, rows, range(vocab, size), problems)
            if A in parts or B in parts:
                what = f"has LoRA, and {size} tokens where the base has {vocab}; train rows of it instead ({_TOKENS})"
                problems.add("unsupported_vocabulary", end, what)
    return size


def _check_has_rows(end: str, rows: tuple[VocabRows, ...], added: range, problems: ProblemList) -> None:
    """Record a problem if a table has no row of a token that the base lacks."""
    own = [own.token_ids for own in rows if own.module == end]
    named = {token for ids in own for token in ids or ()}
    if None not in own and (lacking := [token for token in added if token not in named]):
        what = f"has no row for token {lacking[0]}, which the base lacks, too; save it with save_embedding_layers=True"
        problems.add("unsupported_vocabulary", end, what)


def _check_tokens(config: AdapterConfig, size: int, problems: ProblemList) -> None:
    """Record a problem if the adapter adds too many tokens, or tokens without rows."""
    ids = [token.id for token in config.added_tokens]
    if len(ids) > MAX_ADDED_TOKENS:
        what = f"names {len(ids)} tokens that the base lacks; {MAX_ADDED_TOKENS} are the most"
        problems.add("too_many_added_tokens", "tokenizer", what)
    elif wrong := [token for token in ids if not 0 <= token < size]:
        what = f"names token {wrong[0]}, but there are rows of {size} tokens; save the adapter with all of them"
        problems.add("unsupported_tokenizer", "tokenizer", what)


def _check_shapes(
    rows: tuple[VocabRows, ...], header: SafetensorsHeader, base: BaseShapes, size: int, problems: ProblemList
) -> None:
    _, hidden = base.ends[base.embedding]
    for own in {own.name: own for own in rows}.values():
        shape, ids = header.tensors[own.name].shape, own.token_ids
        count = size if ids is None else len(ids)
        if ids is not None and not all(0 <= token < size for token in ids):
            wrong = next(token for token in ids if not 0 <= token < size)
            problems.add(f"invalid_{_TOKENS}", own.module, f"names token {wrong}; there are {size}")
        elif shape != (count, hidden):
            what = f"{own.parameter} is {list(shape)}; this base takes [{count}, {hidden}]"
            problems.add("shape_mismatch", own.module, what)
    trained = {own.name: header.tensors[own.name].shape for own in rows if not own.frozen}
    nbytes = sum(2 * shape[0] * hidden for shape in trained.values() if shape)
    if nbytes > MAX_ROW_BYTES:
        what = f"hold {nbytes} bytes in bf16, and {MAX_ROW_BYTES} are the most; train fewer tokens ({_TOKENS})"
        problems.add("own_rows_too_large", "modules_to_save", f"trained rows of the vocabulary {what}")


def _is_replaced(own: VocabRows, later: tuple[VocabRows, ...]) -> bool:
    """Return whether a later copy holds every row of this tensor."""
    return any(other.module == own.module and other.token_ids is None for other in later)


def row_notices(rows: tuple[VocabRows, ...]) -> list[str]:
    """Return a notice for each tensor that was read."""
    copies = [own.module for own in rows if own.token_ids is None and not own.frozen]
    frozen = list(dict.fromkeys(own.name for own in rows if own.frozen))
    tokens = [(own.module, len(own.token_ids)) for own in rows if own.token_ids is not None]
    return [
        *(f"holds a trained copy of {module}: rows that differ from the base's are served" for module in copies),
        *(f"holds the base's own weights as {name}: rows are served that are not the base's" for name in frozen),
        *(f"holds trained rows of {module}, of {count} token{'s' * (count > 1)}" for module, count in tokens),
    ]
