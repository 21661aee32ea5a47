"""Time the Triton LoRA kernels of vLLM and SGLang beside this project's, on the same shapes in the same run.

    python tests/benchmarks/gpu_peers.py        # rows as lines of JSON; docs/gpu.md

Their modules come from build/gpu/peers (`gpu_fetch.py`); what else these import of their packages is stood in for here.
Each has one plane of weights per adapter and slice, as its server has, default block sizes, and a decode step's
tables. `error` is against a product in float32. A peer that was not fetched is skipped.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from gpu_cases import DRY_RUN, L2_BYTES, SITES, copy_bandwidth, emit, graph_us, need_gpu, site_case

from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.ops import Ops

PEERS = Path(__file__).resolve().parents[2] / "build" / "gpu" / "peers"
# (rows, distinct adapters, rank)
WORK = ((2, 2, 16),) if DRY_RUN else ((1, 1, 16), (32, 8, 16), (32, 32, 16), (32, 32, 64), (128, 128, 16))
SGLANG_CHUNK = 16
"""Rows of a segment in a decode step."""
DTYPE = torch.float16 if DRY_RUN else torch.bfloat16
"""The interpreter's bf16 products are wrong."""
TIMED = ("qkv", "o") if DRY_RUN else tuple(SITES)
Call = Callable[[torch.Tensor, torch.Tensor], Any]


def stand_in(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


def mend_interpreter() -> None:
    """Let Triton 3.6's interpreter take loaded numbers as bounds of a range with numpy 2.4, as peers' kernels do."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def vllm() -> Callable[..., Call]:
    """Return a function that makes the call of a layer."""
    logger = logging.getLogger("vllm")
    told = SimpleNamespace(warning_once=logger.debug, info_once=logger.debug)
    off = {"VLLM_BATCH_INVARIANT": False, "VLLM_LORA_ENABLE_DUAL_STREAM": False, "VLLM_LORA_DISABLE_PDL": True}
    platform = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda least: True)

    def refuse(**ignored: Any) -> None:
        """Make the modules call their functions as they are."""
        raise AttributeError("no custom operators")

    stand_in("vllm", __path__=[str(PEERS / "vllm")])
    stand_in("vllm.envs", VLLM_TUNED_CONFIG_FOLDER=None, **off)
    stand_in("vllm.logger", init_logger=lambda name: told)
    stand_in("vllm.platforms", current_platform=platform)
    stand_in("vllm.triton_utils", tl=triton.language, triton=triton)
    stand_in("vllm.utils", __path__=[])
    stand_in("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2)
    tensor = lambda data, dtype, device: torch.tensor(data, dtype=dtype, device=device)  # noqa: E731
    stand_in("vllm.utils.torch_utils", direct_register_custom_op=refuse, async_tensor_h2d=tensor)
    ops = "vllm.lora.ops.triton_ops"
    shrink = importlib.import_module(f"{ops}.lora_shrink_op").lora_shrink
    expand = importlib.import_module(f"{ops}.lora_expand_op").lora_expand
    tables = importlib.import_module(f"{ops}.lora_kernel_metadata").LoRAKernelMeta

    def prepared(a: list[torch.Tensor], b: list[torch.Tensor], owners: torch.Tensor) -> Call:
        rows, rank = len(owners), a[0].shape[1]
        meta = tables.make(len(a[0]), rows, owners.device)
        meta.prepare_tensors(owners)
        held = meta.meta_args(rows, True)
        v = torch.empty((len(a), rows, rank), dtype=torch.float32, device=owners.device)

        def call(x: torch.Tensor, y: torch.Tensor) -> None:
            shrink(x, a, v, *held, 1.0)
            expand(v, b, y, *held, offset_start=0, add_inputs=True)

        return call

    return prepared


def sglang() -> Callable[..., Call]:
    """Return a function that makes the call of a layer."""

    class Off:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(get=lambda: False)

    device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.lora"):
        stand_in(name, __path__=[str(PEERS / name.replace(".", "/"))])
    for name in ("sglang.srt", "sglang.srt.lora"):
        stand_in(name, __path__=[])
    stand_in("sglang.srt.environ", envs=Off())
    stand_in("sglang.srt.lora.utils", LoRABatchInfo=SimpleNamespace)
    cached = lambda key: lambda kernel: kernel  # noqa: E731
    stand_in("sglang.srt.utils", cached_triton_kernel=cached, get_device_name=lambda: device_name)
    folder = "sglang.kernels.ops.lora.dense"
    shrink = importlib.import_module(f"{folder}.chunked_sgmv_shrink").chunked_sgmv_lora_shrink_forward
    expand = importlib.import_module(f"{folder}.chunked_sgmv_expand").chunked_sgmv_lora_expand_forward

    def prepared(a: list[torch.Tensor], b: list[torch.Tensor], owners: torch.Tensor) -> Call:
        device, rank = owners.device, a[0].shape[1]
        order = torch.argsort(owners, stable=True)
        starts, indices = [0], []
        for owner in range(len(a[0])):
            left = int((owners == owner).sum())
            while left:
                starts.append(starts[-1] + min(left, SGLANG_CHUNK))
                indices.append(owner)
                left -= min(left, SGLANG_CHUNK)
        ints = partial(torch.tensor, dtype=torch.int32, device=device)
        batch = SimpleNamespace(
            use_cuda_graph=False,
            num_segments=len(indices),
            seg_indptr=ints(starts),
            weight_indices=ints(indices),
            lora_ranks=ints([rank] * len(a[0])),
            scalings=torch.ones(len(a[0]), device=device),
            max_len=SGLANG_CHUNK,
            permutation=order.int(),
        )
        widths = [one.shape[1] for one in b]
        offsets = torch.tensor([sum(widths[:i]) for i in range(len(widths) + 1)], dtype=torch.int32)
        together, joined = torch.cat(a, dim=1).contiguous(), torch.cat(b, dim=1).contiguous()
        on_device = offsets.to(device)

        def call(x: torch.Tensor, y: torch.Tensor) -> None:
            v = shrink(x, together, batch, len(a))
            expand(v, joined, batch, on_device, max(widths), y, offsets)

        return call

    return prepared


def weights(
    dims: SiteDims, adapters: int, rank: int, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return A [adapters, rank, H] and B [adapters, O, rank] of each slice."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPE, device=device).normal_(std=0.1)

    a = [drawn(adapters, rank, dims.in_features) for _ in dims.out_features]
    return a, [drawn(adapters, out, rank) for out in dims.out_features]


def error_of(call: Call, a: list[torch.Tensor], b: list[torch.Tensor], owners: torch.Tensor, dims: SiteDims) -> float:
    x = torch.randn(len(owners), dims.in_features, device=owners.device, dtype=DTYPE)
    y = torch.zeros(len(owners), dims.total_out, device=owners.device, dtype=DTYPE)
    call(x, y)
    parts = [
        torch.einsum("th,trh,tor->to", x.float(), one_a[owners].float(), one_b[owners].float())
        for one_a, one_b in zip(a, b, strict=True)
    ]
    want = torch.cat(parts, dim=1)
    return float((y.float() - want).norm() / want.norm())


def main() -> None:
    device = need_gpu()
    torch.manual_seed(0)
    if DRY_RUN:
        mend_interpreter()
    ops, bandwidth = Ops(device, "triton"), copy_bandwidth(device)
    peers: dict[str, Callable[..., Call]] = {}
    for name, make in (("vllm", vllm), ("sglang", sglang)):
        if (PEERS / name).is_dir():
            peers[name] = make()
        else:
            emit("skipped", peer=name, why="not in build/gpu/peers: gpu_fetch.py")
    for (rows, adapters, rank), site in ((work, of) for work in WORK for of in TIMED):
        dims = SITES[site]
        case = site_case(site, rows, adapters, rank, device)
        floor, ours = case.site_bytes / bandwidth * 1e6, case.us(ops)
        where = {"site": site, "rows": rows, "adapters": adapters, "rank": rank, "floor_us": floor}
        emit("LoRA of a site", by="lorasrv", **where, us=ours, of_copy=floor / ours)
        del case
        owners = torch.arange(rows, device=device) % adapters
        one = 2 * rank * adapters * (dims.in_features * len(dims.out_features) + dims.total_out)
        layers = [weights(dims, adapters, rank, device) for _ in range(max(2, min(64, -(-L2_BYTES // one))))]
        x = torch.randn(rows, dims.in_features, device=device, dtype=DTYPE)
        y = torch.zeros(rows, dims.total_out, device=device, dtype=DTYPE)
        for name, prepared in peers.items():
            calls = [prepared(*layer, owners) for layer in layers]
            error = error_of(calls[0], *layers[0], owners, dims)
            # All once before the graph: vLLM keeps addresses of weights that it has seen.
            for call in calls[1:]:
                call(x, y)
            us = graph_us([partial(call, x, y) for call in calls])
            emit("LoRA of a site", by=name, **where, us=us, of_copy=floor / us, of_ours=us / ours, error=error)


if __name__ == "__main__":
    main()
