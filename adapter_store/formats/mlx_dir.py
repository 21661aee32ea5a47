"""Conversion of an adapter folder saved by MLX (mlx-lm's trainer) to PEFT's form.

mlx-lm computes `x @ W.T + scale * (x @ lora_a) @ lora_b` with lora_a [in, rank] and lora_b [rank, out]: these are
PEFT's matrices transposed, and `scale` is PEFT's alpha / r. Values are moved, never rounded. MLX's config is that of
the training run: fine_tune_type; lora_parameters with rank and scale, and with keys if only some kinds of modules were
trained; num_layers, the number of trained layers at the model's end, or -1 for all. Versions of early 2024 multiplied
the scale by alpha / rank and later ones ignore alpha, so the factor is ambiguous if there is an alpha.
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from adapter_store.errors import AdapterInvalid, Problem, ProblemList, show
from adapter_store.formats.peft_dir import (
    CONFIG_NAME,
    MLX_WEIGHTS_NAME,
    WEIGHTS_NAME,
    Opener,
    PeftDir,
    ignored_files,
)
from adapter_store.formats.safetensors_file import (
    ENDED,
    FILE,
    LENGTH_BYTES,
    NUMPY_TYPES,
    SafetensorsHeader,
    TensorInfo,
    read_header,
)
from adapter_store.formats.tensor_names import WRAPPER

MAX_HEADER_BYTES = 16 << 20
MAX_SCALE = 1e30
MAX_LAYER_DIGITS = 6
MAX_LAYERS = 10_000
"""More layers than any model has: with a higher layer number, missing layers are not filled in."""
_HALVES = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}


def convert_mlx(
    folder: Path, config: Mapping[str, object], subdirectory: str | None, target: Path, opener: Opener
) -> PeftDir:
    """Convert MLX's adapter in `folder` and write it to `target`, an empty folder.

    Raises:
        AdapterInvalid: it has DoRA or full weights, an unknown factor or tensors other than lora_a and lora_b, or the
            file is truncated.
    """
    problems = ProblemList()
    source = next((folder / name for name in (MLX_WEIGHTS_NAME, WEIGHTS_NAME) if (folder / name).is_file()), None)
    if source is None:
        problems.add("missing_weights", MLX_WEIGHTS_NAME, f"is missing beside MLX's {CONFIG_NAME}")
    rank, scale = _factors(config, problems)
    keys = _keys(config.get("lora_parameters"), problems)
    problems.raise_if_any()
    assert source is not None
    with opener(source) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size, MAX_HEADER_BYTES)
        names = _names(header, problems)
        problems.raise_if_any()
        _write(target / WEIGHTS_NAME, file, header, names)
    written = _config(config, rank, scale) | _targets(names.values(), keys, config.get("num_layers"))
    (target / CONFIG_NAME).write_text(json.dumps(written))
    notice = f"converted from MLX: {len(names)} tensors transposed, r={rank}, scaling {scale:g}"
    ignored = ignored_files(folder, source.name)
    return PeftDir(written, target / WEIGHTS_NAME, ignored, subdirectory, (notice,))


def _factors(config: Mapping[str, object], problems: ProblemList) -> tuple[int, float]:
    """Return the rank and the scale."""
    kind = config.get("fine_tune_type", "lora")
    if kind == "dora" or config.get("use_dora"):
        problems.add("unsupported_use_dora", "fine_tune_type", "= 'dora' is not served; train it again with 'lora'")
    elif kind != "lora":
        message = f"= {show(kind)} is not LoRA; fuse it (mlx_lm.fuse) and serve the model"
        problems.add("mlx_adapter", "fine_tune_type", message)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        problems.add("mlx_adapter", "lora_parameters", "is missing; it must have the rank and scale of the training")
        return 1, 1.0
    if (alpha := parameters.get("alpha")) is not None:
        problems.add(
            "invalid_alpha",
            "lora_parameters.alpha",
            f"= {show(alpha)}: early mlx-lm multiplied the scale by alpha / rank, later ones ignore it; write the "
            "factor that was used as scale, and remove alpha",
        )
    return _rank(parameters.get("rank"), problems), _scale(parameters.get("scale"), problems)


def _rank(rank: object, problems: ProblemList) -> int:
    if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1:
        return rank
    problems.add("invalid_rank", "lora_parameters.rank", f"= {show(rank)}; it must be an integer of at least 1")
    return 1


def _scale(scale: object, problems: ProblemList) -> float:
    if isinstance(scale, int | float) and not isinstance(scale, bool) and abs(scale) <= MAX_SCALE:
        return float(scale)
    problems.add("invalid_alpha", "lora_parameters.scale", f"= {show(scale)}; it must be the number of the training")
    return 1.0


def _names(header: SafetensorsHeader, problems: ProblemList) -> dict[str, str]:
    """Return PEFT's name for each of MLX's."""
    names = {}
    for name, info in header.tensors.items():
        half = name[-len(".lora_a") :]
        if half not in _HALVES or len(info.shape) != 2:
            what = "is not the lora_a or lora_b of a linear module"
            problems.add("mlx_adapter", show(name)[1:-1], f"{what}, so it cannot be converted; train without it")
            continue
        names[name] = WRAPPER + name.removesuffix(half) + _HALVES[half]
    return names


def _write(path: Path, file: BinaryIO, header: SafetensorsHeader, names: Mapping[str, str]) -> None:
    """Write the same values with every matrix transposed, holding one tensor in memory at a time."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, info in header.tensors.items():
        offsets = [info.start, info.end]
        entries[names[name]] = {"dtype": info.dtype, "shape": list(info.shape[::-1]), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for data in _transposed(file, header.tensors.values()):
            out.write(data)


def _transposed(file: BinaryIO, infos: Iterable[TensorInfo]) -> Iterator[bytes]:
    for info in infos:
        data = file.read(info.end - info.start)
        if len(data) < info.end - info.start:
            raise AdapterInvalid((Problem("truncated", FILE, ENDED),))
        yield np.frombuffer(data, NUMPY_TYPES[info.dtype]).reshape(info.shape).T.tobytes()


def _config(config: Mapping[str, object], rank: int, scale: float) -> dict[str, object]:
    """Return the config that PEFT would have written."""
    model = config.get("model")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model if isinstance(model, str) else None,
        "r": rank,
        "lora_alpha": _alpha(rank, scale),
    }


def _targets(names: Iterable[str], keys: Collection[str], num_layers: object) -> dict[str, object]:
    """Return the modules and layers that the run trained, so that missing tensors are noticed.

    The modules are those of the file and of the keys, the layers those of the file and the last `num_layers`. The
    highest layer in the file is assumed to be the model's last.
    """
    modules, layers = set(keys), set()
    for name in names:
        number, _, module = name.rpartition(".lora_")[0].partition(".layers.")[2].partition(".")
        if not module or not number.isdecimal() or len(number) > MAX_LAYER_DIGITS:
            return {}
        modules.add(module)
        layers.add(int(number))
    if isinstance(num_layers, int) and layers and max(layers) < MAX_LAYERS:
        end = max(layers) + 1
        layers |= set(range(max(0, end - num_layers) if num_layers > 0 else 0, end))
    return {"target_modules": sorted(modules), "layers_to_transform": sorted(layers)}


def _keys(parameters: object, problems: ProblemList) -> Collection[str]:
    """Return the names of trained modules inside their layer, empty if the run does not list them."""
    keys = parameters.get("keys") if isinstance(parameters, Mapping) else None
    if keys is None:
        return ()
    if isinstance(keys, list) and all(isinstance(key, str) and key for key in keys):
        return keys
    problems.add("mlx_adapter", "lora_parameters.keys", f"= {show(keys)}; it must be a list of names of modules")
    return ()


def _alpha(rank: int, scale: float) -> float:
    """Return an alpha for which alpha / rank equals the scale, exactly if one exists."""
    near = scale * rank
    for alpha in (near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf)):
        if alpha / rank == scale:
            return alpha
    return near
