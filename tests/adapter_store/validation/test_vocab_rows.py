"""Tensors of whole rows: what they stand for, and what PEFT would not load and is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from store_kit import BASE, PREFIX, Tensors, build, check, problems_of

from adapter_store.spec import VocabRows
from adapter_store.validation import tensor_scan
from adapter_store.validation.vocab_rows import MAX_ADDED_TOKENS

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
UNTIED = replace(BASE, ends={HEAD: (32, 9), EMBEDDING: (9, 32)}, embedding=EMBEDDING)
TIED = replace(UNTIED, tied=True)
TOKENS = "trainable_token_indices"
DELTA = "token_adapter.trainable_tokens_delta"


def rows(count: int, *names: str) -> Tensors:
    return {f"base_model.model.{name}": torch.ones(count, 32) for name in names}


def checked(tensors: Tensors, tied: bool = False, **config: Any) -> Any:
    return check(build.config(**config), build.file(build.tensors() | tensors), base=TIED if tied else UNTIED)


LORA_OF_THE_EMBEDDING = {
    f"base_model.model.{EMBEDDING}.lora_embedding_A": torch.ones(4, 9),
    f"base_model.model.{EMBEDDING}.lora_embedding_B": torch.ones(32, 4),
}


@pytest.mark.parametrize("tied", [False, True])
def test_lora_of_a_head_that_is_to_be_tied(tied: bool) -> None:
    """PEFT shares one LoRA with the embedding where the base ties them, and ties nothing where it does not."""
    hidden, vocabulary = UNTIED.ends[HEAD]
    lora = {
        f"base_model.model.{HEAD}.lora_A.weight": torch.ones(4, hidden),
        f"base_model.model.{HEAD}.lora_B.weight": torch.ones(vocabulary, 4),
    }
    fields = {"target_modules": ["q_proj", "v_proj", "lm_head"], "ensure_weight_tying": True}
    if tied:
        for one in (lora, LORA_OF_THE_EMBEDDING):
            found = problems_of(lambda one=one: checked(one, tied, **fields))
            assert "only one of them" in found["unsupported_ensure_weight_tying"].message, "PEFT targets both"
        for name in LORA_OF_THE_EMBEDDING:
            two = lora | LORA_OF_THE_EMBEDDING
            two[name] = two[name].clone()
            two[name][3, 2] = 2.0
            found = problems_of(lambda two=two: checked(two, tied, **fields))
            assert "has two;" in found["unsupported_ensure_weight_tying"].message, "PEFT loads the head's"
        spec = checked(lora | LORA_OF_THE_EMBEDDING, tied, **fields).spec
        assert {HEAD, EMBEDDING} <= {module.module for module in spec.modules}
    else:
        assert HEAD in {module.module for module in checked(lora, tied, **fields).spec.modules}


def copy(module: str, name: str | None = None, *, frozen: bool = False) -> VocabRows:
    name = name or f"{module}.weight"
    return VocabRows(module, f"base_model.model.{name}", name, frozen=frozen)


def tied(rows: VocabRows) -> tuple[VocabRows, ...]:
    return replace(rows, module=EMBEDDING), replace(rows, module=HEAD)


def trained(module: str, of: str, *ids: int) -> VocabRows:
    return VocabRows(module, f"base_model.model.{of}.{DELTA}", f"{of}.{DELTA}", ids)


BOTH = rows(9, f"{EMBEDDING}.weight", f"{HEAD}.weight")
OWN_BASE = rows(9, f"{EMBEDDING}.weight")
MEANT: dict[str, tuple[Tensors, bool, dict[str, Any], tuple[VocabRows, ...]]] = {
    "copies": (BOTH, False, {"modules_to_save": ["embed_tokens", "lm_head"]}, (copy(EMBEDDING), copy(HEAD))),
    "a copy, and the head as it is": (
        BOTH, False, {"modules_to_save": [EMBEDDING]}, (copy(HEAD, frozen=True), copy(EMBEDDING))
    ),
    "a copy that PEFT ties": (
        BOTH, True, {"modules_to_save": [EMBEDDING], "ensure_weight_tying": True}, (copy(EMBEDDING), copy(HEAD))
    ),
    "a copy beside a tied head": (
        rows(9, f"{EMBEDDING}.weight"), True, {"modules_to_save": ["embed_tokens"]}, (copy(EMBEDDING),)
    ),
    "the base's own": (OWN_BASE, False, {}, (copy(EMBEDDING, frozen=True),)),
    "the base's own, tied": (
        OWN_BASE, True, {},
        tied(copy(EMBEDDING, frozen=True))
    ),
    "both of the base, tied": (BOTH, True, {}, tied(copy(HEAD, frozen=True))),
    "tokens": (rows(2, f"{EMBEDDING}.{DELTA}"), False, {TOKENS: [7, 3]}, (trained(EMBEDDING, EMBEDDING, 7, 3),)),
    "tokens, tied": (
        rows(2, f"{EMBEDDING}.{DELTA}"), True, {TOKENS: [7, 3]},
        (trained(EMBEDDING, EMBEDDING, 7, 3), trained(HEAD, EMBEDDING, 7, 3))
    ),
    "other tokens of a tied head": (
        rows(2, f"{EMBEDDING}.{DELTA}") | rows(1, f"{HEAD}.{DELTA}"), True,
        {TOKENS: {"embed_tokens": [7, 3], "lm_head": [0]}},
        (trained(EMBEDDING, EMBEDDING, 7, 3), trained(HEAD, HEAD, 0))
    ),
    "tokens of a tied head alone": (
        rows(1, f"{HEAD}.{DELTA}"), True, {TOKENS: {"lm_head": [4]}}, (trained(HEAD, HEAD, 4),)
    ),
    "a second copy that PEFT does not read": (
        BOTH | rows(9, f"{HEAD}.modules_to_save.weight"), False, {"modules_to_save": ["embed_tokens", "lm_head"]},
        (copy(EMBEDDING), copy(HEAD))
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANT)
def test_what_tensors_stand_for(case: str) -> None:
    tensors, tied, config, expected = MEANT[case]
    assert checked(tensors, tied, **config).spec.rows == expected


@pytest.mark.parametrize("last", [False, True])
def test_two_copies_of_tied_tables(monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    """PEFT loads the head's copy into both tables where it ties them, and each into its own where it does not."""
    monkeypatch.setattr(tensor_scan, "CHUNK_VALUES", 40)
    one, other = BOTH
    two = BOTH | {one: BOTH[one].bfloat16(), other: BOTH[other].clone()}
    tying = {"modules_to_save": [EMBEDDING], "ensure_weight_tying": True}
    assert checked(two, True, **tying).spec.rows == (copy(EMBEDDING), copy(HEAD)), "equal values of two types"
    two[other].view(-1)[-1 if last else 0] = 2.0
    found = problems_of(lambda: checked(two, True, **tying))
    assert "ties the copy of lm_head" in found["unsupported_ensure_weight_tying"].message
    assert checked(two, True, modules_to_save=[EMBEDDING, HEAD]).spec.rows == (copy(EMBEDDING), copy(HEAD))


def test_what_they_stand_for_is_part_of_the_key() -> None:
    two = rows(2, f"{EMBEDDING}.{DELTA}")
    keys = {checked(two, tied, **{TOKENS: ids}).spec.key for ids in ([7, 3], [3, 7], [1, 2]) for tied in (False, True)}
    assert len(keys) == 6
    tying = {"modules_to_save": [EMBEDDING], "ensure_weight_tying": True}
    both = {"modules_to_save": [EMBEDDING, HEAD]}
    assert checked(BOTH, True, **tying).spec.key == checked(BOTH, True, **both).spec.key


def lora(module: str, vocab: int = 9) -> Tensors:
    halves = {"lora_embedding_A": (4, vocab), "lora_embedding_B": (32, 4)} if module == EMBEDDING else {}
    halves = halves or {"lora_A.weight": (4, 32), "lora_B.weight": (vocab, 4)}
    return {f"base_model.model.{module}.{half}": torch.ones(shape) for half, shape in halves.items()}


def beside_lora(what: str) -> Tensors:
    widths = {"q_proj": 32, "v_proj": 16}
    return {
        f"{PREFIX}{layer}.self_attn.{module}.{what}": torch.ones(n) for layer in (0, 1) for module, n in widths.items()
    }


QV = ["q_proj", "v_proj"]
ADDED: dict[str, Any] = {"added_tokens": [{"id": 9, "content": "<mood>"}]}
REFUSED: dict[str, tuple[Tensors, bool, dict[str, Any], str, str]] = {
    "a copy that is promised": ({}, False, {"modules_to_save": ["lm_head"]}, "missing_saved_modules", "lm_head"),
    "a tied head that a file leaves out": (
        OWN_BASE, True, {"modules_to_save": [EMBEDDING], "ensure_weight_tying": True},
        "missing_saved_modules", "lm_head",
    ),
    "a copy that the config does not name": (
        rows(9, f"{HEAD}.modules_to_save.weight"), False, {}, "unread_weight", "not find lm_head.modules_to_save"
    ),
    "DoRA of the head": (
        lora(HEAD) | beside_lora("lora_magnitude_vector") | rows(9, f"{HEAD}.lora_magnitude_vector"), False,
        {"use_dora": True, "target_modules": [*QV, "lm_head"]},
        "unsupported_embedding", "lm_head has a lora_magnitude_vector; outside the layers use_dora is not served",
    ),
    "DoRA of the head without its magnitude": (
        lora(HEAD) | beside_lora("lora_magnitude_vector"), False,
        {"use_dora": True, "target_modules": [*QV, "lm_head"]},
        "use_dora_mismatch", "lm_head has no lora_magnitude_vector",
    ),
    "a bias beside LoRA of the head": (
        lora(HEAD) | rows(9, f"{HEAD}.lora_B.bias") | beside_lora("lora_B.bias"), False,
        {"lora_bias": True, "target_modules": [*QV, "lm_head"]},
        "unsupported_embedding", "lm_head has a lora_B.bias",
    ),
    "a copy beside LoRA": (
        rows(9, f"{HEAD}.weight") | lora(HEAD), False,
        {"modules_to_save": ["lm_head"], "target_modules": [*QV, "lm_head"]},
        "unsupported_modules_to_save", "leaves the LoRA out",
    ),
    "two of the base's own": (
        rows(9, f"{HEAD}.weight", f"{HEAD}.base_layer.weight"), False, {}, "unread_weight", "not find lm_head.base"
    ),
    "two lists for one table": (
        rows(2, f"{EMBEDDING}.{DELTA}"), False, {TOKENS: {"embed_tokens": [7, 3], "tokens": [1, 2]}},
        f"unsupported_{TOKENS}", "twice, as embed_tokens and tokens"
    ),
    "the base's own under another name": (
        rows(9, f"{HEAD}.original_module.weight"), False, {}, "unread_weight", "it looks for lm_head.weight"
    ),
    "a table without the LoRA that is promised": (
        rows(9, f"{HEAD}.weight"), False, {"target_modules": [*QV, "lm_head"]}, "partial_adapter", "(first: lm_head)"
    ),
    "the base's own beside trained rows": (
        rows(9, f"{EMBEDDING}.weight") | rows(2, f"{EMBEDDING}.{DELTA}"), False, {TOKENS: [7, 3]},
        "unread_weight", "token_adapter.base_layer.weight"
    ),
    "more tokens": (
        rows(10, f"{HEAD}.weight"), False, {"modules_to_save": ["lm_head"]}, "unsupported_vocabulary",
        "has 10 tokens, and this base 9; upload it with its tokenizer.json",
    ),
    "more tokens of one table": (
        rows(10, f"{HEAD}.weight"), False, {"modules_to_save": ["lm_head"], **ADDED}, "unsupported_vocabulary",
        f"{EMBEDDING} has no row for token 9",
    ),
    "tables of two sizes": (
        rows(10, f"{HEAD}.weight") | rows(11, f"{EMBEDDING}.weight"), False, ADDED, "unsupported_vocabulary",
        f"{EMBEDDING}.weight has 11 rows and base_model.model.{HEAD}.weight 10",
    ),
    "too many tokens": (
        rows(9 + MAX_ADDED_TOKENS + 1, f"{HEAD}.weight", f"{EMBEDDING}.weight"), False, ADDED, "too_many_added_tokens",
        f"has {MAX_ADDED_TOKENS + 10} tokens, {MAX_ADDED_TOKENS + 1} more than the base's 9; {MAX_ADDED_TOKENS} more",
    ),
    "a token without a row": (
        rows(10, f"{HEAD}.weight", f"{EMBEDDING}.weight"), False,
        {"added_tokens": [{"id": i, "content": f"t{i}"} for i in (9, 10)]}, "unsupported_tokenizer",
        "names token 10, but there are rows of 10 tokens",
    ),
    "a token without a content": ({}, False, {"added_tokens": [{"id": 3}]}, "invalid_added_tokens", "added_tokens[0]"),
    "half a character": (
        {}, False, {"added_tokens": [{"id": 3, "content": "\ud800"}]}, "invalid_added_tokens", "added_tokens[0]"
    ),
    "another width": (
        {f"base_model.model.{HEAD}.weight": torch.ones(9, 31)}, False, {"modules_to_save": ["lm_head"]},
        "shape_mismatch", "takes [9, 32]",
    ),
    "tokens without rows": ({}, False, {TOKENS: [1]}, f"{TOKENS}_mismatch", DELTA),
    "rows without tokens": (rows(2, f"{EMBEDDING}.{DELTA}"), False, {}, f"{TOKENS}_mismatch", "does not name it"),
    "a row more": (rows(3, f"{EMBEDDING}.{DELTA}"), False, {TOKENS: [1, 2]}, "shape_mismatch", "takes [2, 32]"),
    "no such token": (rows(2, f"{EMBEDDING}.{DELTA}"), False, {TOKENS: [1, 9]}, "unsupported_vocabulary", "10 tokens"),
    "a negative token": (rows(1, f"{EMBEDDING}.{DELTA}"), False, {TOKENS: [-1]}, f"invalid_{TOKENS}", "names token -1"),
    "a token twice": (rows(2, f"{EMBEDDING}.{DELTA}"), False, {TOKENS: [0, 0]}, f"invalid_{TOKENS}", "token 0 twice"),
    "tokens of a linear": ({}, False, {TOKENS: {"q_proj": [1]}}, f"unsupported_{TOKENS}", "'q_proj'"),
    "tokens and a copy": (
        rows(1, f"{EMBEDDING}.{DELTA}") | rows(9, f"{EMBEDDING}.weight"), False,
        {TOKENS: [1], "modules_to_save": ["embed_tokens"]}, f"unsupported_{TOKENS}", "in PEFT neither",
    ),
    "tokens beside a copy of a tied head": (
        rows(1, f"{EMBEDDING}.{DELTA}") | rows(9, f"{HEAD}.weight"), True,
        {TOKENS: [1], "modules_to_save": ["lm_head"]}, f"unsupported_{TOKENS}", "in PEFT neither",
    ),
    "tokens and LoRA of the embedding": (
        rows(1, f"{EMBEDDING}.{DELTA}") | lora(EMBEDDING), False,
        {TOKENS: [1], "target_modules": [*QV, "embed_tokens"]}, f"unsupported_{TOKENS}", "in PEFT neither",
    ),
    "other tokens of a head that PEFT ties": (
        rows(1, f"{EMBEDDING}.{DELTA}", f"{HEAD}.{DELTA}"), True,
        {TOKENS: {"embed_tokens": [1], "lm_head": [2]}, "ensure_weight_tying": True},
        f"unsupported_{TOKENS}", "contradicts",
    ),
    "rows that are not finite": (
        {f"base_model.model.{HEAD}.{DELTA}": torch.full((1, 32), torch.nan)}, False, {TOKENS: {"lm_head": [1]}},
        "non_finite", "",
    ),
}  # fmt: skip


SIZES: dict[str, tuple[Tensors, bool, dict[str, Any], int]] = {
    "copies": (rows(12, f"{EMBEDDING}.weight", f"{HEAD}.weight"), False, {"modules_to_save": ["lm_head"]}, 12),
    "fewer": (rows(8, f"{EMBEDDING}.weight"), True, {}, 8),
    "one tied table": (rows(10, f"{EMBEDDING}.weight"), True, {}, 10),
    "tokens": (
        rows(2, f"{EMBEDDING}.{DELTA}", f"{HEAD}.{DELTA}"), False,
        {TOKENS: {"embed_tokens": [9, 10], "lm_head": [10, 9]}}, 11
    ),
    "tokens of tied tables": (rows(2, f"{EMBEDDING}.{DELTA}"), True, {TOKENS: [9, 3]}, 10),
    "the base's": (BOTH, False, {}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_vocabularies_of_another_size(case: str) -> None:
    """With a tokenizer that names a token which all of them have a row for."""
    tensors, tied, config, size = SIZES[case]
    named = {"added_tokens": [{"id": 9 if size > 9 else 7, "content": "<mood>", "special": True}]}
    spec = checked(tensors, tied, **config, **named).spec
    assert (spec.vocab_size, [(token.content, token.special) for token in spec.added_tokens]) == (
        size,
        [("<mood>", True)],
    )


def test_shorter_tables_need_no_tokens_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a bound: far shorter ones are of another base."""
    found = checked(rows(8, f"{HEAD}.weight", f"{EMBEDDING}.weight"))
    assert (found.spec.vocab_size, found.spec.added_tokens) == (8, ())
    assert "has 8 tokens, and the base 9: requests with the others are refused" in found.report.notices
    monkeypatch.setattr("adapter_store.validation.vocab_rows.MAX_ADDED_TOKENS", 2)
    assert checked(rows(7, f"{HEAD}.weight")).spec.vocab_size == 7
    found = problems_of(lambda: checked(rows(6, f"{HEAD}.weight")))
    assert list(found) == ["unsupported_vocabulary"]
    assert "has 6 tokens, and this base 9; at most 2 may be left out" in found["unsupported_vocabulary"].message


def test_tokens_are_part_of_the_key() -> None:
    keys = {
        checked(BOTH, added_tokens=[{"id": 7, "content": content, "special": special}]).spec.key
        for content in ("a", "b")
        for special in (False, True)
    }
    assert len(keys | {checked(BOTH).spec.key}) == 5


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    tensors, tied, config, code, said = REFUSED[case]
    found = problems_of(lambda: checked(tensors, tied, **config))
    assert list(found) == [code]
    assert said in f"{found[code].field} {found[code].message}"


def test_lora_of_a_table_of_another_size_is_refused_by_name() -> None:
    tensors = rows(10, f"{HEAD}.base_layer.weight", f"{EMBEDDING}.weight") | lora(HEAD, 10)
    found = problems_of(lambda: checked(tensors, target_modules=[*QV, "lm_head"], **ADDED))
    assert found.keys() == {"shape_mismatch", "unsupported_vocabulary"}
    assert found["unsupported_vocabulary"].message.startswith("has LoRA, and 10 tokens where the base has 9")


@pytest.mark.parametrize("value", ["all", [True], [1.0], {"embed_tokens": "x"}, 3])
def test_what_is_no_list_of_tokens(value: Any) -> None:
    assert f"invalid_{TOKENS}" in problems_of(lambda: checked({}, **{TOKENS: value}))
