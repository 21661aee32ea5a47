"""Adapter folders as PEFT saves them: find config and weights, list the rest. Files are read, never executed."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path

from adapter_store.errors import AdapterInvalid, Problem, show
from adapter_store.formats.adapter_config import MAX_CONFIG_BYTES, MLX_REMEDY, parse_config

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MLX_WEIGHTS_NAME = "adapters.safetensors"
HEADS_NAME = "medusa_lm_head.safetensors"
TOKENIZER_NAME = "tokenizer.json"
MAX_TOKENIZER_BYTES = 64 << 20
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
CHUNK_BYTES = 1 << 20
_CONVERT = (
    "load it with PEFT where it was trained and call save_pretrained(), which writes adapter_model.safetensors. "
    "Pickles are never opened here"
)


# (file, code, problem and remedy) of folders without PEFT's config.
_FOREIGN = (
    (
        MLX_WEIGHTS_NAME,
        "mlx_adapter",
        "is missing beside adapters.safetensors, which MLX saved: without it the scale is not known; copy it from "
        "where the adapter was trained",
    ),
    (
        "lora.safetensors",
        "trainer_names",
        "is missing beside lora.safetensors, which mistral-finetune saved under its own names (wq, w1); train with "
        "PEFT, or merge it into the base and serve that",
    ),
    (
        "pytorch_lora_weights.safetensors",
        "not_a_language_model",
        "is missing beside pytorch_lora_weights.safetensors: diffusers' adapter of an image model",
    ),
)

Opener = Callable[[Path], BufferedReader]
"""Opens a file of a folder for reading, or raises OSError."""


def open_file(path: Path) -> BufferedReader:
    """Open a file, following links."""
    return path.open("rb")


@dataclass(frozen=True, slots=True)
class PeftDir:
    """Describe the adapter found in a folder.

    `subdirectory` is the folder below the given one in which it was found, if any; `ignored_files` are the other files
    there, sorted; `notices` say what was converted. `tokenizer` is a tokenizer.json that adds tokens to the base's.
    """

    config: dict[str, object]
    weights_path: Path
    ignored_files: tuple[str, ...]
    subdirectory: str | None = None
    notices: tuple[str, ...] = ()
    opener: Opener = field(default=open_file, compare=False, repr=False)
    folder: Path | None = None
    tokenizer: bytes | None = field(default=None, repr=False)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether there is a tokenizer.json."""
        return self.folder is not None and TOKENIZER_NAME in self.ignored_files

    def with_tokenizer(self, num_tokens: int) -> "PeftDir":
        """Return this with its tokenizer, if that adds tokens: trainers save a tokenizer even if it adds none.

        Args:
            num_tokens: the number of tokens of the base's tokenizer.

        Raises:
            OSError: the tokenizer cannot be read.
            AdapterInvalid: the tokenizer is too large.
        """
        if not self.has_tokenizer:
            return self
        assert self.folder is not None
        with self.opener(self.folder / TOKENIZER_NAME) as file:
            text = file.read(MAX_TOKENIZER_BYTES + 1)
        if len(text) > MAX_TOKENIZER_BYTES:
            what = f"has more than {MAX_TOKENIZER_BYTES} bytes, which are the most; --no-tokenizer leaves it out"
            raise _refused("unsupported_tokenizer", TOKENIZER_NAME, what)
        if not _adds_tokens(text, num_tokens):
            return self
        others = tuple(name for name in self.ignored_files if name != TOKENIZER_NAME)
        return replace(self, ignored_files=others, tokenizer=text)

    def open_weights(self) -> BufferedReader:
        """Open the weights file.

        Raises:
            OSError: it cannot be read.
        """
        return self.opener(self.weights_path)


def read_peft_dir(path: Path, opener: Opener = open_file) -> PeftDir:
    """Find an adapter in `path`, or one level down, where PEFT saves named adapters.

    Raises:
        AdapterInvalid: there is none, several, or one that is not served; the message says how to convert it.
    """
    folder, subdirectory = find_folder(path)
    config, weights = read_config(folder, opener), folder / WEIGHTS_NAME
    if is_mlx_config(config):
        raise _refused("mlx_adapter", CONFIG_NAME, f"is MLX's; {MLX_REMEDY}")
    if not weights.is_file():
        raise AdapterInvalid((_no_weights(folder),))
    return PeftDir(config, weights, ignored_files(folder, WEIGHTS_NAME), subdirectory, opener=opener, folder=folder)


def _adds_tokens(text: bytes, num_tokens: int) -> bool:
    """Return whether a tokenizer.json has added tokens with ids after the base's; the rest is checked later."""
    try:
        tokens = json.loads(text)["added_tokens"]
        return any(token["id"] >= num_tokens for token in tokens)
    except (ValueError, RecursionError, KeyError, TypeError):
        return False


def find_folder(path: Path) -> tuple[Path, str | None]:
    """Return the folder that holds the config, and its name if it is below `path`.

    Raises:
        AdapterInvalid: there is none, or several.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise _refused("not_a_directory", path.name, f"{what}; give the folder that holds {CONFIG_NAME}")
    if (path / CONFIG_NAME).is_file():
        return path, None
    nested = sorted(p.parent for p in path.glob(f"*/{CONFIG_NAME}") if p.is_file())
    if len(nested) == 1:
        return nested[0], nested[0].name
    if nested:
        names = ", ".join(show(p.name) for p in nested[:8])
        raise _refused("several_adapters", CONFIG_NAME, f"is in {len(nested)} folders below: {names}; give one of them")
    raise AdapterInvalid((_no_config(path),))


def read_config(folder: Path, opener: Opener) -> dict[str, object]:
    """Read the folder's adapter_config.json.

    Raises:
        AdapterInvalid: it is malformed.
        OSError: it cannot be read.
    """
    with opener(folder / CONFIG_NAME) as file:
        return parse_config(file.read(MAX_CONFIG_BYTES + 1))


def is_mlx_config(config: Mapping[str, object]) -> bool:
    """Return whether MLX wrote the config. PEFT always writes peft_type, and none of MLX's keys."""
    return "peft_type" not in config and ("fine_tune_type" in config or "lora_parameters" in config)


def ignored_files(folder: Path, weights_name: str) -> tuple[str, ...]:
    """Return the names of the other files in a folder, sorted; they are never opened."""
    return tuple(sorted(p.name for p in folder.iterdir() if p.name not in (CONFIG_NAME, weights_name)))


def _refused(code: str, field: str, message: str) -> AdapterInvalid:
    return AdapterInvalid((Problem(code, field, message),))


def _no_config(path: Path) -> Problem:
    for name, code, message in _FOREIGN:
        if (path / name).is_file():
            return Problem(code, CONFIG_NAME, message)
    if any(path.glob("*.gguf")):
        message = (
            "a GGUF adapter is not served, it may lack rsLoRA and patterns; upload the PEFT folder it was made from"
        )
        return Problem("gguf_adapter", CONFIG_NAME, message)
    return Problem("missing_config", CONFIG_NAME, "is missing; give the folder that PEFT's save_pretrained() wrote")


def _no_weights(folder: Path) -> Problem:
    if pickle := next((name for name in PICKLES if (folder / name).exists()), None):
        return Problem("not_safetensors", pickle, f"is a pickle; {_CONVERT}")
    if (folder / MLX_WEIGHTS_NAME).is_file():
        message = f"is missing; there is MLX's {MLX_WEIGHTS_NAME}, but {CONFIG_NAME} is not MLX's"
        return Problem("mlx_adapter", WEIGHTS_NAME, message)
    if (folder / f"{WEIGHTS_NAME}.index.json").is_file():
        message = "is split into shards; join them into one file (safetensors.torch.load_file each, one save_file)"
        return Problem("sharded_weights", WEIGHTS_NAME, message)
    return Problem("missing_weights", WEIGHTS_NAME, f"is missing; {_CONVERT}")


def digest_file(path: Path, progress: Callable[[int, int], None] | None = None) -> str:
    """Return the SHA-256 of a file in hex. `progress` is called with (bytes done, bytes in total) after every MiB."""
    total = path.stat().st_size
    hasher = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    return hasher.hexdigest()
