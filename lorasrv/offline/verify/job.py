"""Define the messages between the server and the verifying process: one JSON object per line, in both directions."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapter_store.spec import AdapterKey, Form
from lorasrv.config import ModelOptions

NEW_TOKENS = 8
"""Tokens generated after each prompt: single rows use other kernels than prompts."""
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
    """Describe one verification."""

    # As the server's options, except for the device, which is the CPU.
    model: ModelOptions
    # Dtype of keys and values.
    kv_dtype: str
    max_lora_rank: int
    # The content to verify.
    key: AdapterKey
    # adapter_config.json as uploaded.
    config: Mapping[str, object]
    # Path of the adapter's weights, and their SHA-256.
    weights: Path
    weights_digest: str
    # The form of the content.
    stored: Form
    # Token ids.
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int = NEW_TOKENS

    def to_line(self) -> bytes:
        """Serialise the job as one line of JSON."""
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
    """Report the current activity and the share of it that is done, 0 to 1."""

    what: str
    done: float


class CannotVerify(Exception):
    """Report that the reference cannot be built for this base or adapter. The message is for the operator; it has no
    path.
    """
