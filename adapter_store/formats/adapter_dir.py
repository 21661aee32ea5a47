"""A folder with an adapter of any trainer: PEFT's is read as it is, MLX's is converted temporarily, and a separate file
of Medusa heads is joined to the weights."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from adapter_store.formats.peft_dir import (
    HEADS_NAME,
    WEIGHTS_NAME,
    Opener,
    PeftDir,
    find_folder,
    is_mlx_config,
    open_file,
    read_config,
    read_peft_dir,
)


@contextlib.contextmanager
def open_adapter_dir(path: Path, opener: Opener = open_file) -> Iterator[PeftDir]:
    """Find the adapter in a folder, converting MLX's form into a temporary folder that exists during the `with` block.

    Raises:
        AdapterInvalid: there is no adapter, several, or one that is not served; the message says how to convert it.
        OSError: it cannot be read.
    """
    folder, subdirectory = find_folder(path)
    config = read_config(folder, opener)
    if not is_mlx_config(config):
        with _with_heads(read_peft_dir(path, opener)) as peft:
            yield peft
        return
    # Imported here, as are heads: they need NumPy, whose import would delay other commands.
    from adapter_store.formats.mlx_dir import convert_mlx

    with tempfile.TemporaryDirectory(prefix="lorasrv-mlx-") as target:
        yield convert_mlx(folder, config, subdirectory, Path(target), opener)


@contextlib.contextmanager
def _with_heads(peft: PeftDir) -> Iterator[PeftDir]:
    """Join a file of Medusa heads to the weights beside it, if there is one."""
    if HEADS_NAME not in peft.ignored_files or not peft.weights_path.with_name(HEADS_NAME).is_file():
        yield peft
        return
    from adapter_store.formats.draft_heads import join_heads

    with tempfile.TemporaryDirectory(prefix="lorasrv-heads-") as folder:
        target = Path(folder) / WEIGHTS_NAME
        with peft.open_weights() as weights, peft.opener(peft.weights_path.with_name(HEADS_NAME)) as heads:
            join_heads(weights, heads, target)
        others = tuple(name for name in peft.ignored_files if name != HEADS_NAME)
        # Only the joined file is opened directly: the folder's files may be links to files that must not be read.
        own = peft.opener
        opener = lambda file: open_file(file) if file == target else own(file)  # noqa: E731
        yield replace(peft, weights_path=target, ignored_files=others, opener=opener)
