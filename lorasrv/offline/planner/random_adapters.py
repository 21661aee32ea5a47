"""Generate adapters with random weights for measurements: bf16 on every linear, written into a store. Torch-free."""

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from adapter_store.spec import BaseShapes
from adapter_store.store import AdapterStore

SPREAD = 0.02


def write_random_adapter(store: AdapterStore, adapter_id: str, rank: int, seed: int) -> None:
    """Register an adapter whose weights are drawn from the seed."""
    data = _weights_file(store.base, rank, seed)
    digest = hashlib.sha256(data).hexdigest()
    with store.open_blob(digest, len(data)) as upload:
        upload.write(data)
        upload.commit()
    modules = sorted({module.rpartition(".")[2] for module in store.base.modules})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
    }
    store.register(adapter_id, config, digest)


def _weights_file(base: BaseShapes, rank: int, seed: int) -> bytes:
    """Return the bytes of a safetensors file."""
    rng = np.random.default_rng(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, shape in _tensors(base, rank):
        values = (SPREAD * rng.standard_normal(shape, dtype=np.float32)).view(np.uint32)
        part = (values >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + len(part)]}
        parts.append(part)
        end += len(part)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + b"".join(parts)


def _tensors(base: BaseShapes, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for layer, module in base.places():
        fan_in, fan_out = base.modules[module]
        name = f"base_model.model.{base.layer_prefix}{layer}.{module}"
        yield f"{name}.lora_A.weight", (rank, fan_in)
        yield f"{name}.lora_B.weight", (fan_out, rank)
