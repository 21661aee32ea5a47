"""Medusa heads beside an adapter: read from its file or from one of their own, or refused with the reason."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from store_kit import BASE, build, check, problems_of

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.formats.draft_heads import PREFIX, max_head_bytes
from adapter_store.formats.peft_dir import HEADS_NAME
from adapter_store.formats.weights import load_weights
from adapter_store.store import AdapterStore
from adapter_store.validation.validate import max_adapter_bytes

HIDDEN = BASE.hidden_size


def heads(count: int = 2, blocks: int = 1, prefix: str = PREFIX, **given: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {}
    for head in range(count):
        for block in range(blocks):
            stem = f"{prefix}{head}.{block}.linear"
            found[f"{stem}.weight"] = torch.full((HIDDEN, HIDDEN), head + 0.5, dtype=torch.bfloat16)
            found[f"{stem}.bias"] = torch.full((HIDDEN,), -1.0 - block)
    return found | {prefix + name: tensor for name, tensor in given.items()}


def folder(path: Path, inside: dict[str, torch.Tensor], own: dict[str, torch.Tensor] | None = None) -> Path:
    """A PEFT folder with `inside` in its weights and `own` in a file of heads."""
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(build.config()))
    save_file(build.tensors() | inside, path / "adapter_model.safetensors")
    if own is not None:
        save_file(own, path / HEADS_NAME)
    return path


@pytest.mark.parametrize("prefix", ["", "medusa.", PREFIX])
def test_a_file_of_their_own_is_joined(tmp_path: Path, prefix: str) -> None:
    """The version holds both; the adapter's own type and key do not know of them but by the digest."""
    path = folder(tmp_path / "in", {}, heads(prefix=prefix))
    with AdapterStore(tmp_path / "store", BASE, max_lora_rank=16) as store:
        with open_adapter_dir(path) as peft:
            assert peft.ignored_files == ()
            tensors = load_file(peft.weights_path)
            assert set(tensors) == set(build.tensors()) | set(heads())
            done = store.register("mia", peft.config, store.add_blob(peft.weights_path))
        assert "holds 2 Medusa heads, which draft its answers" in done.report.notices
        assert done.report.dtype == "F32"
        assert not any("mixed" in warning for warning in done.report.warnings)
        assert len(store.spec(done.ref.key).heads) == 2
        weights = store.load(done.ref.key)
    assert [len(head) for head in weights.heads] == [1, 1]
    for number, [(weight, bias)] in enumerate(weights.heads):
        assert bias is not None
        assert weight.dtype == bias.dtype == np.float32
        assert np.all(weight == number + 0.5)
        assert np.all(bias == -1.0)
    assert len(weights) == 4


def test_without_heads_nothing_is_copied(tmp_path: Path) -> None:
    path = folder(tmp_path / "in", {})
    with open_adapter_dir(path) as peft:
        assert peft.weights_path.parent == path
        assert not load_weights(peft.weights_path, check(build.config(), peft.weights_path.read_bytes()).spec).heads


def test_heads_twice_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(AdapterInvalid, match="beside weights that hold heads"),
        open_adapter_dir(folder(tmp_path / "in", heads(), heads())),
    ):
        pass


@pytest.mark.parametrize(
    ("inside", "code", "message"),
    [
        (
            heads() | {f"{PREFIX}0.1.weight": torch.ones(7, HIDDEN)},
            "unsupported_draft_heads",
            "output layer of a head's",
        ),
        (heads() | {f"{PREFIX}x": torch.ones(1)}, "unsupported_draft_heads", "no part of a Medusa head"),
        ({f"{PREFIX}0.0.linear.weight": torch.ones(HIDDEN, 3)}, "shape_mismatch", f"has {HIDDEN} hidden numbers"),
        ({f"{PREFIX}0.0.linear.bias": torch.ones(HIDDEN)}, "unsupported_draft_heads", "is not whole"),
        ({f"{PREFIX}1.0.linear.weight": torch.ones(HIDDEN, HIDDEN)}, "unsupported_draft_heads", "is not whole"),
        ({f"{PREFIX}0.1.linear.weight": torch.ones(HIDDEN, HIDDEN)}, "unsupported_draft_heads", "is not whole"),
        (heads(9), "unsupported_draft_heads", "at most 8 heads of 2 blocks"),
        (heads(1, 3), "unsupported_draft_heads", "at most 8 heads of 2 blocks"),
        (
            {f"{PREFIX}0.0.linear.weight": torch.full((HIDDEN, HIDDEN), torch.nan)},
            "non_finite",
            "holds NaN",
        ),
    ],
)
def test_what_is_no_head_is_refused(inside: dict[str, torch.Tensor], code: str, message: str) -> None:
    data = save(build.tensors() | inside)
    problems: Any = problems_of(lambda: check(build.config(), data))
    assert set(problems) == {code}
    assert message in problems[code].message


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (b"\x80\x02" + bytes(20), "not_safetensors", "is no safetensors file; save the heads as one"),
        (b"", "truncated", "too few for a safetensors file"),
        (save({}), "no_tensors", "so no heads"),
        (save(heads(1))[:-1], "truncated", "upload it again"),
    ],
)
def test_a_file_of_heads_that_is_none_is_named(tmp_path: Path, data: bytes, code: str, says: str) -> None:
    path = folder(tmp_path / "in", {})
    (path / HEADS_NAME).write_bytes(data)
    with pytest.raises(AdapterInvalid) as refused, open_adapter_dir(path):
        pass
    [problem] = refused.value.problems
    assert (problem.field, problem.code) == (HEADS_NAME, code)
    assert says in problem.message


def test_the_largest_heads_are_not_too_large() -> None:
    assert len(save(heads(8, 2))) < max_head_bytes(HIDDEN) + 4096
    assert max_adapter_bytes(BASE, 1) > max_head_bytes(HIDDEN)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    inside = heads(1) | {f"{PREFIX}medusa_head.0.0.linear.bias": torch.ones(HIDDEN)}
    assert set(problems_of(lambda: check(build.config(), save(build.tensors() | inside)))) == {
        "unsupported_draft_heads"
    }
    own = heads(1, prefix="") | heads(1, prefix="medusa.")
    with pytest.raises(AdapterInvalid, match="twice"), open_adapter_dir(folder(tmp_path / "in", {}, own)):
        pass
