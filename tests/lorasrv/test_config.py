"""Options that are wrong or contradict each other are refused by the name of their flag."""

import pytest

from adapter_store.spec import MAX_LORA_RANK
from lorasrv.config import Limits, MemoryOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from lorasrv.errors import ConfigError, InvalidLimits
from sgmv_kernels.formats.adapter_panels import MAX_RANK


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_running", 0), ("max_queued", -1), ("tokens_per_s", 0.0), ("resident_bytes", 0), ("weight", 0.0)],
)
def test_a_limit_is_above_nothing(field: str, value: float) -> None:
    with pytest.raises(InvalidLimits, match=f"{field} must be above 0") as caught:
        Limits(**{field: value})
    assert caught.value.param == field


def test_a_limit_is_a_number_that_others_can_read() -> None:
    with pytest.raises(InvalidLimits, match="max_running must be at most"):
        Limits(max_running=10**400)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e9, 1e-9])
def test_a_weight_is_a_sane_number(weight: float) -> None:
    with pytest.raises(InvalidLimits, match="weight"):
        Limits(weight=weight)


def test_the_rank_is_one_that_the_kernels_compute() -> None:
    """With a higher one, every step with such an adapter would fail."""
    assert MemoryOptions().max_lora_rank == MemoryOptions(max_lora_rank=MAX_RANK).max_lora_rank == MAX_LORA_RANK
    with pytest.raises(ConfigError, match=f"--max-lora-rank must be at most {MAX_RANK}, not {MAX_RANK + 1}"):
        MemoryOptions(max_lora_rank=MAX_RANK + 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"scheduling_policy": "fairest"},
            "--scheduling-policy 'fairest' is unknown; choose from fair, fcfs, mlfq, sjf",
        ),
        ({"target_itl_ms": 0.0}, "--target-itl-ms must be positive"),
        ({"target_itl_ratio": 1.0}, "--target-itl-ratio 1 leaves no time for prompts; take more than 1, or off"),
        ({"max_wait_steps": 0}, "--max-wait-steps must be positive"),
        ({"queue_timeout_s": float("nan")}, "--queue-timeout-s must be positive"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            "--max-num-batched-tokens 32 is less than --max-num-seqs 64",
        ),
        ({"adapter_limits": Limits(max_running=65)}, "--max-running-per-adapter 65 is more than --max-num-seqs 64"),
        ({"key_limits": Limits(max_running=65)}, "--max-running-per-key 65 is more than --max-num-seqs 64"),
    ],
)
def test_options_that_are_wrong_or_contradict_each_other(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerOptions(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"bf16_linears": "on"}, "--bf16-linears"),
        ({"load_format": "random"}, "--load-format 'random' is unknown; choose from auto, dummy"),
    ],
)
def test_choices_of_the_model(option: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelOptions(**option)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"speculation": "on"}, "--speculation 'on' is unknown; choose from auto, off"),
        ({"drafters": ("lookup", "magic")}, "--drafters 'magic' is unknown; choose from grammar, prediction, lookup"),
        ({"accept": "top-k"}, "--accept 'top-k' is unknown; choose from same-draw, rejection"),
        ({"corpus_bytes": -1}, "--corpus-bytes must not be negative, not -1; 0 keeps no answers"),
    ],
)
def test_choices_of_drafts(option: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SpeculationOptions(**option)
