"""The float types of adapter files, as NumPy sees them. bf16 has no type there: its values are their bits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

NUMPY_TYPES: Mapping[str, str] = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


def widen(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Values of a type of `NUMPY_TYPES` as float32, exactly."""
    if dtype == "BF16":
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype("<f4")
