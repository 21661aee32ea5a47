"""What the process that verifies is told, and what it tells: one JSON object a line, in both directions.

Why a verification has no verdict. Raised in its own process; the server's side has `VerificationFailed`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapter_store.spec import AdapterKey
from lorasrv.config import ModelOptions

NEW_TOKENS = 8
"""Tokens that each prompt is continued by: single rows go through other kernels than prompts."""
MAX_PROMPTS = 16
MAX_PROMPT_TOKENS = 512
BUILTIN_PROMPTS = (
    "Who are you, and what can you help me with?",
    "Write a short Python function that returns the largest number of a list, and explain it.",
    "Wie komme ich am besten von Hamburg nach München?",
    "List three things to see in Paris. 1.",
)


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """One verification.

    Args:
        model: as the server was told, but for the device: it is computed on the CPU.
        kv_dtype: of keys and values.
        max_lora_rank: as the server's.
        key: the content that is verified.
        config: adapter_config.json as uploaded.
        weights: where the adapter's weights are; `weights_digest` their SHA-256.
        prompts: token ids.
        new_tokens: how many tokens each prompt is continued by.
    """

    model: ModelOptions
    kv_dtype: str
    max_lora_rank: int
    key: AdapterKey
    config: Mapping[str, object]
    weights: Path
    weights_digest: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int = NEW_TOKENS

    def to_line(self) -> bytes:
        """The job as JSON, with a line feed."""
        return json.dumps(asdict(self), default=str).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "VerifyJob":
        fields: dict[str, Any] = json.loads(line)
        model = fields["model"]
        quantized = model["quantized_weights"]
        model["quantized_weights"] = None if quantized is None else Path(quantized)
        fields |= {
            "model": ModelOptions(**model),
            "weights": Path(fields["weights"]),
            "prompts": tuple(tuple(ids) for ids in fields["prompts"]),
        }
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Progress:
    """What is being done, and how much of that, 0 to 1."""

    what: str
    done: float


class CannotVerify(Exception):
    """The oracle cannot be built for this base or adapter. The message is for the operator, and holds no path."""
