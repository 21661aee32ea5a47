"""Formats by part: each site gets its own, and a served model answers as one with those weights."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_engine import GREEDY, offline_engine

from lorasrv.config import ModelOptions
from lorasrv.engine.memory_plan import base_bytes
from lorasrv.errors import UnsupportedFormat
from lorasrv.models.loader import Checkpoint, open_checkpoint
from lorasrv.models.quantization import get_format, select_format
from lorasrv.models.quantization.base import StoredWeights
from lorasrv.models.quantization.rounding import round_asymmetric, round_symmetric
from lorasrv.worker.base_format import choose_format
from lorasrv.worker.weights import load_weights
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, Q3H_LEVELS
from sgmv_kernels.ops import Ops

OPS = Ops(torch.device("cpu"))
PROMPTS = [[5, 9, 60, 33], [120, 7, 81]]


@pytest.fixture
def checkpoint(model: Path):  # type: ignore[no-untyped-def]
    with closing(open_checkpoint(str(model))) as opened:
        yield opened


def test_each_site_is_rounded_in_its_format(checkpoint: Checkpoint) -> None:
    options = ModelOptions(quantization="attn=int4,mlp=q3h,down=q3h:128")
    weights = load_weights(checkpoint, choose_format(options, checkpoint, OPS), torch.float32)
    wanted = {
        "self_attn.k_proj": lambda w: round_asymmetric(w, 32, INT4_LEVELS),
        "self_attn.o_proj": lambda w: round_asymmetric(w, 32, INT4_LEVELS),
        "mlp.up_proj": lambda w: round_asymmetric(w, 64, Q3H_LEVELS),
        "mlp.down_proj": lambda w: round_asymmetric(w, 128, Q3H_LEVELS),
    }
    for module, rounded in wanted.items():
        name = f"model.layers.1.{module}.weight"
        assert torch.equal(weights.dequantized(name), rounded(checkpoint.tensor(name)).dequantize()), module
    head = checkpoint.tensor("lm_head.weight")
    assert torch.equal(weights.dequantized("lm_head.weight"), round_symmetric(head, 32).dequantize())
    assert weights.is_recordable


def test_sites_that_are_left_out_get_eight_bits_and_the_group_is_that_of_formats_without_one(
    checkpoint: Checkpoint,
) -> None:
    options = ModelOptions(quantization="o=int4,mlp=q3h:128", quantization_group=64)
    with pytest.raises(UnsupportedFormat, match="groups of 128 do not divide the 64 inputs"):
        choose_format(options, checkpoint, OPS)
    fmt = choose_format(replace(options, quantization="o=int4"), checkpoint, OPS)
    weights = load_weights(checkpoint, fmt, torch.float32)
    for module, rounded in (
        ("o_proj", lambda w: round_asymmetric(w, 64, INT4_LEVELS)),
        ("v_proj", lambda w: round_symmetric(w, 32)),
    ):
        name = f"model.layers.0.self_attn.{module}.weight"
        assert torch.equal(weights.dequantized(name), rounded(checkpoint.tensor(name)).dequantize())


def test_codes_of_a_file_are_kept_where_the_part_has_their_format(
    llama_dir: Path, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_gguf(llama_dir, tmp_path / "q4.gguf", "Q4_1")
    with closing(open_checkpoint(str(file))) as opened:
        fmt = choose_format(ModelOptions(quantization="attn=int4,mlp=int8"), opened, OPS)
        weights = load_weights(opened, fmt, torch.float32)
        name = "model.layers.0.self_attn.q_proj.weight"
        codes = opened.codes(name)
        assert codes is not None
        assert torch.equal(weights.dequantized(name), codes.dequantize())
    assert (weights.kept_codes, weights.remade_codes) == (4 * 3, 3 * 3)


def test_all_sites_in_one_format_answer_as_that_format(model: Path) -> None:
    def answers(quantization: str) -> list[list[int]]:
        with offline_engine(model, quantization=quantization) as llm:
            return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]

    assert answers("attn=int4,mlp=int4") == answers("int4") != answers("attn=int4,mlp=q3h")


def test_the_memory_plan_counts_every_part(checkpoint: Checkpoint) -> None:
    spec, name = checkpoint.spec, "attn=int8:64,mlp=q3h"
    of_mlp = spec.num_layers * 3 * spec.hidden_size * spec.intermediate_size
    attn = spec.linear_weights - of_mlp
    planned = base_bytes(spec, name, torch.bfloat16)
    assert planned == int((attn * 8.25 + of_mlp * 4.0 + spec.table_weights * 8.5) / 8)
    loaded = load_weights(checkpoint, get_format(name, OPS), torch.bfloat16).nbytes
    assert planned == pytest.approx(loaded, rel=0.05)


def test_a_model_that_a_part_does_not_fit_is_refused(checkpoint: Checkpoint) -> None:
    stored = StoredWeights.of(checkpoint)
    assert "128 do not divide the 64 inputs" in select_format(stored, "attn=int4:128")[1].reason
    with pytest.raises(UnsupportedFormat, match="'int5' is no format of a part"):
        select_format(stored, "attn=int5")
