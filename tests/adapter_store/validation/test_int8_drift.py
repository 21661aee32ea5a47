"""What int8 changes, as measured at the upload, against dense deltas in float64."""

import numpy as np
import pytest
import torch
from store_kit import PREFIX, Tensors, build, check, problems_of, warnings

from adapter_store.formats.int8_codes import CodedTensors
from adapter_store.formats.weights import LoraTensors

STEM = "self_attn.q_proj"


def dense_drift(tensors: Tensors, scaling: float) -> dict[str, tuple[float, float]]:
    """Return (norm of the change, norm) of every module's delta, from dense matrices."""
    found = {}
    for stem in sorted({name.rpartition(".lora_")[0] for name in tensors}):
        a, b = (tensors[f"{stem}.lora_{half}.weight"].float().numpy() for half in "AB")
        kept_a, kept_b = CodedTensors(LoraTensors(len(a), scaling, a, b), "F32").dequantized()
        delta = scaling * b.astype(np.float64) @ a.astype(np.float64)
        change = scaling * kept_b.astype(np.float64) @ kept_a.astype(np.float64) - delta
        found[stem.removeprefix("base_model.model.")] = (np.linalg.norm(change), np.linalg.norm(delta))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_report_is_the_dense_drift(dtype: torch.dtype) -> None:
    tensors = build.tensors(dtype=dtype)
    tensors[f"{PREFIX}1.{STEM}.lora_B.weight"][:, 2] *= 40
    report = check(build.config(), build.file(tensors), stored="int8").report
    dense = dense_drift(tensors, 2.0)
    own = {name: change / norm for name, (change, norm) in dense.items()}
    worst = max(own, key=lambda name: own[name])
    changes, norms = (np.linalg.norm(values) for values in zip(*dense.values(), strict=True))
    assert report.drift is not None
    assert report.drift.rms == pytest.approx(changes / norms, rel=1e-4)
    assert (report.drift.worst, report.drift.worst_module) == (pytest.approx(own[worst], rel=1e-4), worst)
    assert 0.001 < report.drift.rms < report.drift.worst
    assert type(report).from_dict(report.to_dict()) == report
    assert check(build.config(), build.file(tensors)).report.drift is None


def cancelling(apart: float) -> bytes:
    """Two rank rows nearly cancel each other: the delta is small, the rounding errors of its factors are not."""
    tensors = build.tensors()
    for layer in range(2):
        a, b = (tensors[f"{PREFIX}{layer}.{STEM}.lora_{half}.weight"] for half in "AB")
        a[1] = a[0] + apart * a[1]
        b[:] = torch.tensor([1.0, -1.0, 0.0, 0.0])
    return build.file(tensors)


def test_much_drift_is_warned_of_and_more_refused_unless_allowed() -> None:
    assert "int8" not in warnings(check(build.config(), build.file(), stored="int8"))
    assert "int8 changes model.layers." in warnings(check(build.config(), cancelling(0.3), stored="int8"))
    data = cancelling(0.02)
    problem = problems_of(lambda: check(build.config(), data, stored="int8"))["int8_drift"]
    assert problem.field.endswith(STEM)
    assert "--allow-drift" in problem.message
    allowed = check(build.config(), data, stored="int8", allow_drift=True)
    assert allowed.report.drift is not None
    assert allowed.report.drift.worst > 0.1
    assert f"int8 changes {problem.field}" in warnings(allowed)
    assert check(build.config(), data).report.warnings == ()


def test_what_int8_cannot_hold_is_refused_by_its_name() -> None:
    tensors = build.tensors()
    for half in "AB":
        tensors[f"{PREFIX}1.{STEM}.lora_{half}.weight"] *= 1e30
    problem = problems_of(lambda: check(build.config(), build.file(tensors), stored="int8", allow_drift=True))
    assert problem["int8_overflow"].field == f"model.layers.1.{STEM}"
    assert check(build.config(), build.file(tensors)).report.modules_matched == 4


def test_an_untrained_adapter_does_not_drift() -> None:
    tensors = {name: t * (0 if "lora_B" in name else 1) for name, t in build.tensors().items()}
    drift = check(build.config(), build.file(tensors), stored="int8").report.drift
    assert drift is not None
    assert (drift.rms, drift.worst) == (0.0, 0.0)


def test_high_ranks_are_measured_in_pieces() -> None:
    rank = 200
    tensors = build.tensors(rank=rank, modules=(STEM,))
    report = check(build.config(r=rank, target_modules=["q_proj"]), build.file(tensors), rank, stored="int8").report
    dense = dense_drift(tensors, 8 / rank)
    changes, norms = (np.linalg.norm(values) for values in zip(*dense.values(), strict=True))
    assert report.drift is not None
    assert report.drift.rms == pytest.approx(changes / norms, rel=1e-4)


def test_the_forms_of_one_content_have_two_keys() -> None:
    keys = {check(build.config(), build.file(), stored=form).spec.key for form in ("bf16", "int8")}
    assert len(keys) == 2
    assert check(build.config(), build.file()).spec.key in keys
