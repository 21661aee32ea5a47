"""Read checkpoints from disk as named weights, one tensor at a time."""

from pathlib import Path

from lorasrv.errors import CorruptModel, ModelNotFound, naming_file
from lorasrv.models.loader.checkpoint import Checkpoint, StoredPacking, WeightMeter, state_dict_fp32
from lorasrv.models.loader.locate import locate

__all__ = ["Checkpoint", "StoredPacking", "WeightMeter", "open_checkpoint", "state_dict_fp32"]


def open_checkpoint(model: str, load_format: str = "auto", quantized_weights: Path | None = None) -> Checkpoint:
    """Open a base model.

    Args:
        model: the built-in name, a .gguf file, a Hugging Face directory, or hf:org/name.
        load_format: "dummy" makes random weights of the model's shape.
        quantized_weights: a file of `lorasrv quantize` that replaces the model's linears.
    Raises:
        ModelNotFound: the model does not exist; for the built-in name with the command that installs it.
        UnsupportedModel, CorruptModel: see `lorasrv.errors`.
    """
    if quantized_weights is None:
        return _open(model, load_format)
    from lorasrv.models.loader.quantized import QuantizedCheckpoint

    base = _open(model, load_format)
    try:
        return QuantizedCheckpoint(base, quantized_weights)
    except BaseException:
        base.close()
        raise


def _open(model: str, load_format: str) -> Checkpoint:
    from lorasrv.models.loader.dummy import DummyCheckpoint
    from lorasrv.models.loader.hf import HfCheckpoint

    if load_format == "dummy":
        return DummyCheckpoint(model)
    try:
        path, name = locate(model)
        return HfCheckpoint(path, name) if path.is_dir() else _open_gguf(path, name)
    except OSError as e:
        if isinstance(e, ModelNotFound):
            raise
        raise CorruptModel(f"model {model!r} cannot be read: {e.strerror or type(e).__name__}") from None


def _open_gguf(path: Path, name: str | None) -> Checkpoint:
    from lorasrv.models.loader.gguf import GgufCheckpoint

    with naming_file(path.name):
        return GgufCheckpoint(path, name)
