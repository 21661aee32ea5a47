"""What a store knows its base by: the same from every file of one model, another from another model."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from adapter_store.registry.base_identity import BaseIdentity
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_sample, base_shapes


def identity(model: Path | str) -> BaseIdentity:
    with closing(open_checkpoint(str(model))) as checkpoint:
        return BaseIdentity.of(base_shapes(checkpoint.spec), base_sample(checkpoint))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_every_file_of_a_model(tiny_hf_checkpoints, write_gguf: Callable[..., Path], tmp_path: Path, family) -> None:
    folder = tiny_hf_checkpoints[family](intermediate_size=96)
    whole = identity(folder)
    assert len(set(whole.sample)) > 30
    others = [tiny_hf_checkpoints[family](intermediate_size=96, dtype=dtype) for dtype in ("bfloat16", "float16")]
    others += [write_gguf(folder, tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q4_0", "F16")]
    for other in map(identity, others):
        assert whole.has_weights_of(other), other
        assert whole.has_shapes_of(other), other


def test_another_model_of_the_same_shapes(tiny_hf_checkpoints) -> None:
    one, two = (identity(tiny_hf_checkpoints["llama"](seed=seed)) for seed in (0, 1))
    assert one.has_shapes_of(two)
    assert not one.has_weights_of(two)
