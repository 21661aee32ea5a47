"""Graph memory: how many bytes of a device the CUDA graphs of a server take at most, for the plan of its memory.

    pass    what a captured pass allocates: a layer's activations, sums of linears and of adapters in parts, a
            dequantized weight, partial results of attention, and the logits. All graphs share one pool of memory, so
            the largest pass counts; twice, because the same step without a graph allocates as much elsewhere
    tables  the static inputs of a graph (`StaticPlans`); those of the largest `MAX_GRAPHS` count
    output  the logits that all graphs write
    driver  the device's own description of a graph: `GRAPH_BYTES`

tests/lorasrv/worker/test_graph_memory.py counts passes and tables. Needs the Triton kernels.
"""

from typing import Any

import torch

from lorasrv.models.spec import ModelSpec
from lorasrv.worker.cuda_graphs import MAX_GRAPHS, GraphedSteps
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.triton_ops.attention import SUMS
from sgmv_kernels.triton_ops.block_sizes import Table, device_name, table_of
from sgmv_kernels.triton_ops.common import power_of_two
from sgmv_kernels.triton_ops.graph_plans import PlanDims, StaticCapacity, StaticPlans
from sgmv_kernels.triton_ops.linear import BLAS_BYTES

GRAPH_BYTES = 4 << 20
"""Bytes that the driver takes for a graph of hundreds of kernels. NOT MEASURED."""
FP32_BYTES = 4
META = torch.device("meta")
"""Device whose tensors have sizes and no bytes."""


def graph_bytes(
    spec: ModelSpec, limits: DecoderLimits, page_size: int, kv_format: KVFormat, max_rank: int, most_tokens: int
) -> int:
    """Return the bytes of all graphs of a model.

    Args:
        max_rank: highest rank of an adapter that is served.
        most_tokens: tokens whose keys and values could be in the device's memory.
    """
    memory = DevicePool(spec, 1, page_size, kv_format, META, scratch=True)
    graphs = GraphedSteps(_compute_nothing, spec, memory, limits, _compute_nothing)
    capacities = list(graphs.capacities(max_rank, most_tokens))
    largest = max(pass_bytes(spec, graphs.dims, capacity, limits.activation.itemsize) for capacity in capacities)
    tables = sorted((StaticPlans(graphs.dims, capacity).nbytes for capacity in capacities), reverse=True)[:MAX_GRAPHS]
    return 2 * largest + sum(tables) + graphs.output_bytes + len(tables) * GRAPH_BYTES


def pass_bytes(spec: ModelSpec, dims: PlanDims, capacity: StaticCapacity, itemsize: int) -> int:
    """Return the most bytes that a captured pass has allocated at a time; `itemsize` is that of activations."""
    table, rows, sites = table_of(device_name(dims.device)), capacity.rows, spec.sites_of(0)
    numbers = spec.hidden_size + sum(site.in_features + sum(site.out_features) for site in sites)
    slots = capacity.small_items if capacity.is_cut else 1
    partial = slots * dims.kv_heads * power_of_two(dims.group) * (power_of_two(dims.head_dim) + SUMS)
    shrunk = _planes(table, rows) * rows * capacity.rank * max(len(site.out_features) for site in sites)
    linears = max(_linear_bytes(table, rows, site.in_features, sum(site.out_features), itemsize) for site in sites)
    in_layer = rows * numbers * itemsize + max(linears, FP32_BYTES * max(partial, shrunk))
    head = _linear_bytes(table, capacity.sequences, spec.hidden_size, spec.vocab_size, itemsize)
    logits = capacity.sequences * (spec.hidden_size * itemsize + spec.vocab_size * (itemsize + FP32_BYTES))
    behind = 2 * rows * spec.hidden_size * itemsize + head + logits
    return FP32_BYTES * rows * dims.head_dim + max(in_layer, behind)


def _linear_bytes(table: Table, rows: int, width: int, out: int, itemsize: int) -> int:
    """Return what a linear needs besides inputs and outputs: its sums over parts of the inputs or, for many rows, its
    weight or a piece of it, dequantized."""
    parts = max(row["split_k"] for row in table["linear"] if _fits(row, max_rows=rows, max_out=out))
    bounds = table["dequantize_above"].values()
    sums = FP32_BYTES * rows * out * parts if parts > 1 and rows <= max(bounds) else 0
    return max(sums, min(out * width * itemsize, BLAS_BYTES) if rows > min(bounds) else 0)


def _planes(table: Table, rows: int) -> int:
    """Return the most parts in which the inputs of an adapter are summed."""
    has_planes = any(row["planes"] for row in table["rows"] if _fits(row, max_rows=rows))
    return max(row["split_k"] for row in table["sums"]) if has_planes else 1


def _fits(row: Table, **values: int) -> bool:
    return all(row[bound] is None or value <= row[bound] for bound, value in values.items())


def _compute_nothing(*_: Any) -> Any:
    raise AssertionError("a plan computes nothing")
