"""After the warm-up a day of mixed steps needs no other kernel, in every weight format; kernels are compiled ahead.

Triton works out the keys of launches for an sm90 that need not be there, on meta tensors, which have addresses and no
bytes. As nothing is compiled under its interpreter, this file runs itself as a script.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
META = torch.device("meta")
OTHERS = ("int8", "bf16")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    # As Gemma 2, with a vocabulary that is no multiple of 16.
    "capped": {
        "vocab_size": 50_003,
        "activation": "gelu_tanh",
        "head_dim": 256,
        "post_norms": True,
        "sliding_window": 512,
        "windowed_layers": (True, False),
        "attn_softcap": 50.0,
        "final_softcap": 30.0,
        "embedding_scale": 64.0,
    },
    # As OLMo 2.
    "normed": {"pre_norms": False, "post_norms": True, "qk_norm": True, "wide_qk_norm": True},
    # As MPT.
    "plain": {"norm": "layer", "activation": "gelu", "gated": False, "alibi_max": 8.0},
    # A layer that reads the keys and values of another, and does not rotate, with norms of heads.
    "shared": {
        "num_layers": 3,
        "kv_source_layers": (0, 1, 1),
        "unrotated_layers": (False, False, True),
        "qk_norm": True,
        "residual_scale": 0.5,
    },
}
"""Changes of Llama-3-8B's shape; of two layers unless told otherwise."""
LONG_MODELS = ("normed", "plain", "shared")
DEFAULT, MEASURED = "default", "NVIDIA H200"
"""Tables of block sizes."""
SLOTS, MAX_ROWS, MAX_RANK, MAX_LEN, STEPS = 48, 1500, 100, 2048, 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Yield run(which, *arguments), which returns what `main` prints: importing all takes as long as most of its
    answers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = str(tmp_path_factory.mktemp("triton"))
    environment |= {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__], env=environment, **pipes) as process:

        def ask(*arguments: str) -> Any:
            print(json.dumps(arguments), file=process.stdin, flush=True)
            told = json.loads(process.stdout.readline())
            return told | {"kinds": set(told.get("kinds", ()))}

        yield ask


@pytest.mark.parametrize(
    ("quantization", "kv_format", "max_rank", "model", "table"),
    [
        ("int4", "bfloat16", MAX_RANK, "llama", MEASURED),
        ("int4", "bfloat16", MAX_RANK, "capped", DEFAULT),
        pytest.param("q3h", "k8v4", MAX_RANK, "llama", DEFAULT, marks=pytest.mark.long),
        *(pytest.param(of, "bfloat16", MAX_RANK, "llama", DEFAULT, marks=pytest.mark.exhaustive) for of in OTHERS),
        pytest.param("int4", "int8", MAX_RANK, "llama", DEFAULT, marks=pytest.mark.exhaustive),
        # Between two ranks of graphs, which round it up.
        pytest.param("int4", "bfloat16", 24, "llama", DEFAULT, marks=pytest.mark.long),
        # A model that only drafts.
        pytest.param("int8", "int8", 0, "llama", DEFAULT, marks=pytest.mark.exhaustive),
        *(pytest.param("int4", "bfloat16", 16, of, DEFAULT, marks=pytest.mark.long) for of in LONG_MODELS),
    ],
)
def test_a_day_of_mixed_steps_needs_no_other_kernel(
    run: Callable[..., Any], quantization: str, kv_format: str, max_rank: int, model: str, table: str
) -> None:
    told = run("day", quantization, kv_format, str(max_rank), model, table)
    assert told["warm"] > 20
    assert told["late"] == []
    kinds = {"vectors", "ends", "codes", "rows", "sums", "chains", "trees"}
    kinds |= set() if model in ("capped", "plain") else {"observed"}
    assert told["kinds"] == (kinds if max_rank else set())


@pytest.mark.parametrize(
    ("partition", "rank", "tp_exchange"),
    [
        ("0&1", 1, "columns"),
        *(pytest.param(*of, "columns", marks=pytest.mark.long) for of in (("0&1;2", 0), ("0;1&2", 2), ("cp=2", 1))),
        pytest.param("0&1&2", 2, "sums", marks=pytest.mark.long),
    ],
)
def test_a_day_of_a_rank(run: Callable[..., Any], partition: str, rank: int, tp_exchange: str) -> None:
    """Each rank warms up alone, with the shapes of its part of the model."""
    told = run("day", "int4", "bfloat16", "16", "llama", DEFAULT, partition, str(rank), tp_exchange)
    assert told["warm"] > 20
    assert told["late"] == []
    ends = {"ends"} if partition == "cp=2" else set()
    assert told["kinds"] == {"vectors", "codes", "sums", "chains", "trees"} | ends


def test_steps_that_are_hardly_longer_than_a_tree(run: Callable[..., Any]) -> None:
    assert run("small", "int4")["steps"] > 0


@pytest.mark.long
def test_missing_kernels_are_compiled_in_processes_and_found_by_the_next_server(run: Callable[..., Any]) -> None:
    first, second = run("load", "int4"), run("load", "int4")
    assert (first["compiled_here"], first["progress"][-1]) == (1, 1.0)
    assert (second["compiled_here"], second["progress"]) == (0, [])
    assert first["loaded"] == second["loaded"] == first["wanted"]
    assert (first["late"], second["late"]) == (1, 1)


class Server:
    """A decoder of about Llama-3-8B's shape, of two layers, with graphs that are not replayed."""

    def __init__(
        self,
        quantization: str,
        kv_format: str = "bfloat16",
        max_rank: str = str(MAX_RANK),
        model: str = "llama",
        table: str = DEFAULT,
        partition: str = "0",
        rank: str = "0",
        tp_exchange: str = "columns",
    ) -> None:
        from gpu_cases import random_codes
        from gpu_step import SPEC, random_weights
        from partitions import ranks

        from lorasrv.distributed.comm import LoneComm
        from lorasrv.distributed.partition import Partition
        from lorasrv.distributed.rank_exchange import make_exchange
        from lorasrv.distributed.rank_spec import RankSpec
        from lorasrv.worker.cuda_graphs import GraphedSteps
        from lorasrv.worker.decoder import Decoder, DecoderLimits
        from lorasrv.worker.device_pool import DevicePool
        from lorasrv.worker.exchange import Exchange
        from lorasrv.worker.warm_up import WarmUpSteps
        from sgmv_kernels.formats.kv_format import KV_FORMATS
        from sgmv_kernels.formats.weight_codes import INT8_LEVELS
        from sgmv_kernels.ops import Ops
        from sgmv_kernels.triton_ops import block_sizes

        block_sizes.default_name = lambda device: table
        spec, ops = replace(SPEC, **{"num_layers": 2} | MODELS[model]), Ops(META, "triton")
        specs = RankSpec.all_of(spec, Partition.of(ranks(partition, tp_exchange)))
        self.is_whole = len(specs) == 1
        if not self.is_whole:
            spec = specs[int(rank)]
        weights = random_weights(spec, ops, quantization, torch.bfloat16)
        embedding = ops.pack_linear(random_codes(spec.vocab_size, spec.hidden_size, INT8_LEVELS, META))
        if not spec.adapts_ends:
            weights = replace(weights, head=part_of_head(specs[int(rank)], ops))
        self.memory = DevicePool(spec, 4000, 16, KV_FORMATS[kv_format], META, scratch=True)
        limits = DecoderLimits(MAX_LEN, MAX_ROWS, SLOTS, torch.bfloat16, torch.bfloat16)
        self.ops, self.spec, self.limits, self.max_rank = ops, spec, limits, int(max_rank)
        # What its random steps had.
        self.kinds: set[str] = set()
        self.exchange = Exchange()
        if not self.is_whole:
            comm = LoneComm(int(rank), META)
            self.exchange = make_exchange(comm, specs, torch.bfloat16, self.memory, ops, lambda moves: None)
        weights = replace(weights, embed=embedding.rows)
        self.decoder = Decoder(weights, self.memory, limits, ops, exchange=self.exchange)
        recorded = mock.Mock(output=torch.empty(SLOTS, spec.vocab_size, device=META))
        graphs = GraphedSteps(self.decoder.forward, spec, self.memory, limits, lambda compute: recorded)
        self.graphs = graphs if self.is_whole else None
        self.warm_up = WarmUpSteps(spec, self.memory, limits, self.max_rank, has_trees=self.max_rank > 0)

    def compute(self, step: Any) -> None:
        from lorasrv.worker.forward_batch import build_batch

        self.decoder.forward(build_batch(step, self.memory, torch.bfloat16, self.ops, exchange=self.exchange))
        if moves := [s.moves_along((len(s.draft_parents) - 1,)) for s in step.requests if s.draft_parents]:
            self.memory.copy_slots(moves, self.ops)

    def passes(self) -> Any:
        from lorasrv.worker.warm_up import passes

        return passes(self.warm_up, self.decoder, self.memory, self.limits, self.ops)

    def random_adapter(self, chance: random.Random) -> Any:
        """Return a layout of random ranks, of codes or numbers, some with gains and shifts, ends, or own rows."""
        from lorasrv.models.lora_sites import rows_layout, site_dims, with_everything
        from sgmv_kernels.formats.adapter_panels import CODE_BYTES, AdapterLayout

        ranks = tuple(
            tuple(chance.choice((0, chance.randint(1, self.max_rank))) for _ in site.out_features)
            for site in self.spec.sites()
        )
        itemsize = chance.choice((2, 2, CODE_BYTES))
        sizes = site_dims(self.spec), (ranks,) * self.spec.num_layers, itemsize, self.spec.kv_slabs
        layout = AdapterLayout(*sizes)
        more = with_everything(self.spec, layout, chance.randint(1, self.max_rank), 1)
        if chance.random() < 0.3:
            layout = replace(layout, vectors=more.vectors, places=more.places)
        if chance.random() < 0.3:
            layout = replace(layout, ends=more.ends)
        elif self.is_whole and chance.random() < 0.5:
            # Some of them of tokens that the base lacks.
            tokens = np.arange(chance.randint(1, 3000)) + self.spec.vocab_size - chance.randint(2000, 9000)
            layout = replace(layout, rows=rows_layout(self.spec, (tokens, tokens), 2))
        has = {"vectors": layout.vectors, "ends": layout.ends, "rows": layout.rows, "codes": itemsize == CODE_BYTES}
        self.kinds |= {kind for kind, there in has.items() if there}
        return layout

    def with_drafts(self, step: Any, chance: random.Random) -> Any:
        """Take the last tokens of some shares as drafts: chains, or trees in some steps."""
        from lorasrv.scheduler_output import PlannedDrafts

        requests, left = [], SLOTS - len(step.requests)
        is_tree = chance.random() < 0.5
        for scheduled in step.requests:
            count = min(len(scheduled.token_ids) - 1, left, chance.randint(0, 16))
            if count > 0 and scheduled.samples and not scheduled.prompt_rows and chance.random() < 0.5:
                parents = tuple(chance.randint(-1, at - 1) for at in range(count)) if is_tree else ()
                scheduled = replace(scheduled, drafts=PlannedDrafts((1,) * count, ("lookup",) * count, parents=parents))
                left -= count
                self.kinds.add("trees" if is_tree else "chains")
            requests.append(scheduled)
        return replace(step, requests=tuple(requests))

    def random_step(self, chance: random.Random) -> Any:
        """Return a step of answers, prompts and prompts with log-probabilities, on adapters of all ranks."""
        from lorasrv.sampling_params import SamplingParams
        from lorasrv.scheduler.token_budget import MAX_PROMPT_ROWS
        from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput

        placements = {}
        for name in "abcd"[: chance.randint(0, 4) if self.max_rank else 0]:
            layout = self.random_adapter(chance)
            placements[name] = layout.place([(chance.randint(0, 500), 3000)], self.memory.page_bytes)
        requests = []
        left, asks = chance.choice((SLOTS, MAX_ROWS)), MAX_PROMPT_ROWS
        for number in range(chance.randint(1, SLOTS)):
            count = 1 if left < 2 or chance.random() < 0.7 else min(left, chance.randint(1, 900))
            start = chance.randint(0, MAX_LEN - count)
            left -= count
            if left < 0:
                break
            asked = range(chance.choice((0, min(count, asks))))
            asks -= len(asked)
            key = chance.choice((None, *placements))
            pages = tuple(chance.randint(0, 3999) for _ in range(-(-(start + count) // 16)))
            rest = (pages, key, chance.random() < 0.9 or count == 1, SamplingParams(), 0)
            terms = [name for name, own in placements.items() if not own.layout.vectors and not own.layout.rows]
            summed = tuple((name, 0.5) for name in terms) if len(terms) > 1 and chance.random() < 0.2 else ()
            self.kinds |= {"sums"} if summed else set()
            requests.append(ScheduledRequest(str(number), (1,) * count, start, *rest, prompt_rows=asked, summed=summed))
        used = {key for scheduled in requests for key, _ in scheduled.terms}
        return SchedulerOutput(
            tuple(requests), {k: p for k, p in placements.items() if k in used}, (), AdapterOrders(), 0
        )

    def load_adapters(self) -> None:
        """Do with the base what loads of adapters with DoRA and with own rows of the tables do."""
        ids = torch.arange(500, device=META)
        for layer in self.decoder.weights.layers:
            for linear in layer.linears():
                linear.dequantize()
        if self.is_whole:
            self.decoder.weights.head.rows(ids)
            self.decoder.weights.embed(ids)


def part_of_head(spec: Any, ops: Any) -> Any:
    """Return a rank's columns of the head, int8, if it has any."""
    from gpu_cases import random_codes
    from gpu_step import PackedBase

    from lorasrv.distributed.rank_spec import width
    from lorasrv.worker.weights import AbsentHead
    from sgmv_kernels.formats.weight_codes import INT8_LEVELS

    if not spec.part.is_last:
        return AbsentHead()
    return PackedBase(ops, ops.pack_linear(random_codes(width(spec.part.vocab), spec.hidden_size, INT8_LEVELS, META)))


def observed(step: Any) -> Any:
    """Let the attention of a share's last tokens be wanted by page."""
    from lorasrv.kv_policy import SelectPolicy

    *others, last = step.requests
    count, policy = min(32, len(last.token_ids)), SelectPolicy(budget=512, page_size=16)
    return replace(step, requests=(*others, replace(last, kv_policy=policy, num_observed=count)))


def day(server: Server) -> dict[str, Any]:
    from lorasrv.worker.rehearsal import Rehearsal
    from sgmv_kernels.triton_ops.kernel_compiler import noted

    with torch.inference_mode(), noted() as warm:
        for run in server.passes():
            run()
    chance = random.Random(0)
    with torch.inference_mode(), noted() as met:
        if server.graphs is not None:
            mixed = (server.warm_up._mixed(rows, server.max_rank) for rows in (300, 600))
            for step in (*server.warm_up.common(), *mixed):
                assert server.graphs.compute(step) is not None
        rehearsal = Rehearsal(server.spec, server.limits, server.memory.page_size, (), server.exchange)
        # A model that only drafts samples nothing.
        for step in rehearsal.steps() if server.max_rank else ():
            if server.graphs is None or server.graphs.compute(step) is None:
                server.compute(step)
        server.load_adapters()
        observes = server.is_whole and server.max_rank and server.spec.why_no_kv_policy is None
        for number in range(STEPS):
            step = server.random_step(chance)
            if observes and number % 4 == 0:
                step = observed(step)
                server.kinds.add("observed")
            elif server.max_rank and number % 4 in (1, 2):
                step = server.with_drafts(step, chance)
            if server.graphs is None or server.graphs.compute(step) is None:
                server.compute(step)
    late = [key for key in met if key not in warm]
    return {"warm": len(warm), "late": [(key.name, key.data) for key in late], "kinds": sorted(server.kinds)}


def small(server: Server) -> dict[str, Any]:
    """Count the steps for a server whose steps are no longer than a draft tree with an answer."""
    from lorasrv.worker.warm_up import WarmUpSteps

    limits = replace(server.limits, max_rows=4, max_samples=4)
    return {"steps": len(list(WarmUpSteps(server.spec, server.memory, limits, 16, has_trees=True).all()))}


def load(server: Server) -> dict[str, Any]:
    """Load the kernels of one small step; then one more, which is late."""
    from sgmv_kernels.triton_ops.kernel_compiler import KernelKey, count_late, load, noted

    with torch.inference_mode(), noted() as keys:
        server.compute(next(server.warm_up.all()))
    by_name = {key.name: key for key in keys}
    wanted = [by_name[name] for name in ("_silu_mul_kernel", "_rope_write_kernel", "_add_norm_kernel")]
    progress: list[float] = []
    found: list[bool] = []
    loaded = KernelKey.load

    def counted(key: KernelKey) -> bool:
        found.append(loaded(key))
        return found[-1]

    with mock.patch.object(KernelKey, "load", counted):
        load(wanted, lambda what, scheduled: progress.append(scheduled))
    late = count_late()
    loaded(by_name["_unpack_kernel"])
    return {
        "compiled_here": found.count(False),
        "progress": progress,
        "wanted": len(wanted),
        "loaded": sum(_has(key) for key in wanted),
        "late": late.count,
    }


def _has(key: Any) -> bool:
    """Whether the next launch finds the kernel."""
    kernel = getattr(__import__(key.module, fromlist=["x"]), key.name)
    return json.loads(key.data)["key"] in kernel.device_caches[0][0]


def main() -> None:
    """For each line of stdin, which has arguments of `Server` behind `day`, `small` or `load`, print what that returns.

    Each line is answered by a fork, so that none finds what another has cached.
    """
    from gpu_cases import random_codes
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    torch.set_num_threads(1)
    driver.set_active(mock.Mock(get_current_device=lambda: 0, get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        import sgmv_kernels.triton_ops.backend  # noqa: F401 - without a GPU it refuses
    # What the forks would import.
    import gpu_step  # noqa: F401

    import lorasrv.worker.rehearsal  # noqa: F401

    random_codes(64, 64, 16, META)
    for line in sys.stdin:
        if os.fork() == 0:
            which, *arguments = json.loads(line)
            print(json.dumps({"day": day, "small": small, "load": load}[which](Server(*arguments))))
            return
        if os.wait()[1]:
            sys.exit("the fork failed")


if __name__ == "__main__":
    main()
