"""calibrate: the real engine measures itself on a tiny model."""

from pathlib import Path

import pytest

from lorasrv.config import EngineConfig, ModelOptions
from lorasrv.offline.planner import calibrate as measuring
from lorasrv.offline.planner.processors import ProcessorTimes


def test_prompts_and_answers_fit_a_short_context(
    tiny_hf_checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of those it measures are longer than 128 tokens."""
    monkeypatch.setattr(measuring, "LOADS_S", 0.5)
    monkeypatch.setattr(measuring, "STEPS_S", 0.5)
    monkeypatch.setattr(ProcessorTimes, "others", lambda now, begun: 0.75 if now.clock_s > begun.clock_s else 0.0)
    short = tiny_hf_checkpoints["llama"](max_position_embeddings=128)
    options = ModelOptions(model=str(short), kernels="torch", quantization="none", dtype="float32")
    told: list[str] = []
    done = measuring.calibrate(EngineConfig(model=options), 2, lambda name, _: told.append(name))
    assert done.costs.step["step"] > 0.0
    assert done.others == 0.75
    assert [name for name in dict.fromkeys(told) if name.startswith("measuring")] == [
        "measuring loads",
        "measuring steps",
    ]
