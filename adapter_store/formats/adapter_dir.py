"""A folder that holds an adapter, whoever saved it: PEFT's as it is, MLX's converted for as long as it is needed."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from adapter_store.formats.peft_dir import (
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
    """Find the adapter in a folder, converting MLX's form into a temporary folder that lasts as long as the block.

    Raises:
        AdapterInvalid: there is no adapter, several, or one in a form that is not served; says how to convert it.
        OSError: it cannot be read.
    """
    folder, subdirectory = find_folder(path)
    config = read_config(folder, opener)
    if not is_mlx_config(config):
        yield read_peft_dir(path, opener)
        return
    # Imported only here: it needs NumPy, which the command line's other uses do not wait for.
    from adapter_store.formats.mlx_dir import convert_mlx

    with tempfile.TemporaryDirectory(prefix="lorasrv-mlx-") as target:
        yield convert_mlx(folder, config, subdirectory, Path(target), opener)
