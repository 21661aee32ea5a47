"""Block sizes of the Triton kernels, from one JSON table per device. No autotuning while serving.

The table is `configs/<device name, other characters as _>.json`; missing entries come from `configs/default.json`, a
part of which is measured. Devices without a table use the default, with other rows for devices before sm90. A table has
lists of rows; the first row whose bounds hold is used (null is no bound):

    rows       by token rows: block_m, and whether the sum over K is split over programs (`planes`)
    sums       by in_features: split_k, block_k. They fix the order of fp32 additions, so they depend only on the site
    tiles      by token rows, total rank, in_features and total_out: tiles and launch options of shrink and expand
    attention  by head dim, bytes of the wider of activations and pages, and whether pages have codes (null: any)
    linear     by bits of a code, its group, token rows and out_features: tiles, programs that share the sum over K,
               launch options

`dequantize_above` has, by bits of a code, the number of token rows above which a base linear is dequantized for cuBLAS.

Source: tables by shape instead of autotuning, SGLang's sm90 plans and vLLM's tuned LoRA configs.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import torch

from sgmv_kernels.formats.adapter_panels import SiteDims

DEFAULT, BEFORE_SM90 = "default", "default before sm90"
PARTS = ("rows", "sums", "tiles", "attention", "linear")
"""Lists of rows of a table; it has other entries, too."""
CAPABILITY = 90
"""Compute capability that is assumed without a GPU: sm90."""
Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Hold the settings that depend on the number of token rows, for all sites of a step."""

    block_m: int
    planes: bool


@dataclass(frozen=True, slots=True)
class SgmvConfig:
    """Hold the settings of one site. `planes` is the number of programs that share the sum over K, `split_k` or 1."""

    split_k: int
    planes: int
    block_k: int
    shrink_n: int
    shrink_warps: int
    shrink_stages: int
    expand_n: int
    expand_warps: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Hold the settings of one head dim. `split_tokens` is the number of keys of one program at decode."""

    split_tokens: int
    decode_n: int
    decode_warps: int
    decode_stages: int
    prefill_m: int
    prefill_n: int
    prefill_warps: int
    prefill_stages: int


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Hold the settings of a base linear. `split_k` programs share the sum over K, each with its own plane."""

    block_m: int
    block_n: int
    split_k: int
    warps: int
    stages: int


@cache
def device_name(device: torch.device) -> str:
    """Return the name of the device's table: its own, or a default one."""
    if device.type == "cuda" and _file(own := torch.cuda.get_device_name(device)).is_file():
        return own
    return default_name(device)


def default_name(device: torch.device) -> str:
    """Return the name of the table for devices of this generation without their own table."""
    capability = CAPABILITY
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    return DEFAULT if capability >= 90 else BEFORE_SM90


def file_name(name: str) -> str:
    """Return the file name of a device's table."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") + ".json"


@cache
def table_of(name: str) -> Table:
    """Return the table of this name, completed with entries of the default one."""
    table: Table = json.loads(_file(DEFAULT).read_text("utf-8"))
    return table | (json.loads(_file(name).read_text("utf-8")) if _file(name).is_file() else {})


@cache
def rows_config(name: str, rows: int) -> RowsConfig:
    """Return the settings for a number of token rows; see `RowsConfig`."""
    row = _first(table_of(name)["rows"], max_rows=rows)
    return RowsConfig(row["block_m"], row["planes"])


@cache
def sgmv_config(name: str, rows: int, rank: int, dims: SiteDims) -> SgmvConfig:
    """Return the block sizes for T `rows` at a site where adapters have at most `rank` rank rows over all slices."""
    table = table_of(name)
    sums = _first(table["sums"], max_in=dims.in_features)
    tiles = _first(table["tiles"], max_rows=rows, max_rank=rank, max_in=dims.in_features, max_out=dims.total_out)
    split = sums["split_k"]
    planes = split if rows_config(name, rows).planes else 1
    return SgmvConfig(split, planes, sums["block_k"], **_without_bounds(tiles))


@cache
def attention_config(name: str, head_dim: int, itemsize: int, *, codes: bool) -> AttentionConfig:
    """Return the settings of a head dim.

    Args:
        itemsize: that of the wider of activations and stored keys.
        codes: whether pages have codes, which take registers to unpack.
    """
    fitting = [row for row in table_of(name)["attention"] if row.get("codes") in (None, codes)]
    row = _without_bounds(_first(fitting, max_dim=head_dim, max_bytes=itemsize))
    return AttentionConfig(**{field: value for field, value in row.items() if field != "codes"})


@cache
def linear_config(name: str, bits: int, group: int, rows: int, out: int) -> LinearConfig:
    """Return the settings of a linear with codes of 8, 4 or 3 (q3h) `bits`, with a scale for every `group` codes."""
    fitting = [row for row in table_of(name)["linear"] if row["bits"] in (None, bits)]
    row = _without_bounds(_first(fitting, max_group=group, max_rows=rows, max_out=out))
    return LinearConfig(**{field: value for field, value in row.items() if field != "bits"})


@cache
def dequantize_above(name: str, bits: int) -> int:
    """Return the token rows above which weights are dequantized for cuBLAS."""
    rows: int = table_of(name)["dequantize_above"][str(bits)]
    return rows


def _file(name: str) -> Traversable:
    return resources.files("sgmv_kernels.triton_ops") / "configs" / file_name(name)


def _first(rows: list[Table], **values: int) -> Table:
    for row in rows:
        if all(row.get(bound) is None or value <= row[bound] for bound, value in values.items()):
            return row
    raise ValueError(f"a table of kernel configurations has no row for {values}")


def _without_bounds(row: Table) -> Table:
    return {name: value for name, value in row.items() if not name.startswith("max_")}
