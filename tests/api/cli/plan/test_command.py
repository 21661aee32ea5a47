"""lorasrv plan: what it prints, as tables and as JSON, the picture, and how it ends when something is wrong."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
from answers import failed
from traces import write_trace

from adapter_store.store import AdapterStore
from lorasrv.config import ModelOptions
from lorasrv.memory.cost_model import PARTS
from lorasrv.metrics.engine_stats import EngineStats
from lorasrv.metrics.trace import TraceRequest
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.offline.planner.calibrate import Calibrated
from lorasrv.offline.planner.machine_profile import MachineProfile, cache_file, read_cached, write_cached
from lorasrv.offline.planner.random_adapters import write_random_adapter
from lorasrv.worker.device import DeviceMemory
from sgmv_kernels.formats.kv_format import KV_FORMATS

COSTS = Path(__file__).parents[2] / "data" / "costs.json"
POOL = ("--pool-bytes", "16MiB")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """24 requests for five adapters, of which half a megabyte each."""
    rng = random.Random(0)
    path = tmp_path / "trace.jsonl"
    requests = [
        TraceRequest(n / 4, rng.randint(10, 60), rng.randint(2, 9), f"a{rng.randrange(5)}", adapter_bytes=1 << 19)
        for n in range(24)
    ]
    write_trace(path, requests)
    return path


@pytest.fixture
def plan(cli, trace: Path):
    """Runs the command on the trace, with costs of a file and a small pool."""
    return lambda *options: cli("plan", "--trace", trace, "--costs", COSTS, *POOL, *options)


def test_json(plan) -> None:
    done = json.loads(plan("--json").out)
    assert (done["predicted"]["requests"], done["predicted"]["loads_from_disk"]) == (24, 5)
    assert sum(done["predicted"]["tiers"].values()) == pytest.approx(1.0)
    assert (done["measured"], done["ratio"]) == (None, {})
    assert done["capacity"]["adapters"] >= 1
    assert {"adapters", "ttft_p50_ms", "ttft_p99_ms"} <= done["capacity"]["points"][0].keys()
    assert done["changes"][0]["name"] == "pool x 2"
    assert done["costs"]["source"] == "costs from costs.json"
    assert done["replay"]["times_real_time"] > 1
    assert done["pool_bytes"] <= 16 << 20


def test_a_pool_on_a_gpu_leaves_room_for_base_steps_and_graphs(
    cli, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the server's does; together they take more than the 15 % that are always left."""
    free = 4 << 30
    monkeypatch.setattr(DeviceMemory, "of", lambda device: DeviceMemory(free, free, on_gpu=True))
    done = json.loads(cli("plan", "--trace", trace, "--costs", COSTS, "--json").out)
    assert free // 4 < done["pool_bytes"] < free - (5 << 28)


def test_tables(plan) -> None:
    done = plan("--policy", "sjf")
    assert done.code == 0
    shown = ("TTFT p99\t", "adapters\tTTFT p50\tTTFT p99\ttok/s", "adapters fit", "policy fair\t")
    assert [words for words in shown if words not in done.out] == []
    assert [words for words in ("policy sjf\t", "measured") if words in done.out] == []


def test_a_recorded_trace_is_compared(plan, trace: Path) -> None:
    write_trace(trace, [TraceRequest(n, 20, 4, ttft_ms=50.0, total_ms=200.0) for n in range(4)])
    done = plan("--predict-only")
    assert done.out.splitlines()[0] == "\tpredicted\tmeasured\tratio"
    assert "change\t" not in done.out
    ratio = json.loads(plan("--predict-only", "--json").out)["ratio"]
    assert set(ratio) == {"tok_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"}


def test_a_picture(plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None)
        refused = plan("--png", tmp_path / "plan.png")
    says = "--png needs matplotlib: pip install -e '.[plot]' in lorasrv's checkout"
    assert (refused.code, refused.err) == (2, f"lorasrv: {says}\n")
    pytest.importorskip("matplotlib")
    assert plan("--png", tmp_path / "plan.png", "--json").code == 0
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"arrival_s": 0}\n',
            "lorasrv: {trace}:2: prompt_tokens",
        ),
        ("", "lorasrv: {trace}: the trace is empty"),
    ],
)
def test_a_trace_that_cannot_be_read(plan, trace: Path, content: str, says: str) -> None:
    trace.write_text(content)
    refused = plan()
    failed(refused, 1, says.format(trace=trace.name))
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--policy", "best"), "--policy 'best' is unknown"),
        (("--scheduling-policy", "best"), "--scheduling-policy 'best' is unknown"),
        (("--pool-bytes", "much"), "--pool-bytes: 'much' is not allowed; expected a size: 512MiB, 2GB or bytes"),
        (("--pool-bytes", "1000"), "a pool of 1000 bytes is too small for 4 pages of"),
        (("--max-num-seqs", "0"), "--max-num-seqs must be positive"),
        (("--p99-ttft-ms", "0"), "--p99-ttft-ms must be positive"),
        (("--recalibrate",), "exclude each other"),
        (("--png", "/nowhere/plan.png"), "the folder /nowhere does not exist"),
        (("--store", "/nowhere"), "the folder /nowhere does not exist"),
    ],
)
def test_wrong_options(plan, options: tuple[str, ...], complaint: str) -> None:
    failed(plan(*options), 2, complaint)


def test_wrong_costs(plan, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"step": {}}')
    says = "costs: step must have step, token, request, adapter_byte, attention_pair, second_token"
    failed(plan("--costs", tmp_path / "costs.json"), 2, says)


def test_costs_of_a_server_are_taken_with_its_pool(cli, server, engine, trace: Path) -> None:
    learnt = {part: (number + 1) * 1e-9 for number, part in enumerate(PARTS)}
    loads = {"load_byte": 1e-9, "copy_byte": 2e-9}
    block = 30 * KV_FORMATS["int8"].page_bytes(3, 64, 16)
    of_server = {"pool_bytes": 32 << 20, "pages_total": (32 << 20) // block}
    engine.metrics.publish(EngineStats(step_costs=learnt, load_costs=loads, **of_server))
    options = ("--trace", trace, "--predict-only", "--json")
    failed(cli("plan", *options, "--server", server.url), 2, "pages", "--kv-cache-dtype as it has them")
    done = json.loads(cli("plan", *options, "--server", server.url, "--kv-cache-dtype", "int8").out)
    assert done["costs"]["step"] == pytest.approx(learnt)
    assert (done["costs"]["load_byte_s"], done["costs"]["copy_byte_s"]) == pytest.approx((1e-9, 2e-9))
    assert 31 << 20 < done["pool_bytes"] <= 32 << 20
    assert done["costs"]["source"] == f"costs learnt by {server.url}"
    assert cli("plan", *options, "--server", "http://127.0.0.1:9").code == 3


class TestMeasuredCosts:
    @pytest.fixture
    def measure(self, cli, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """Runs the command; measuring has this misfit, and other programs use this share of the machine. Ranks that
        were measured are in `self.ranks`."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        self.ranks = []

        def run(misfit: float, *options: object, others: float = 0.05) -> Any:
            def calibrate(config: object, rank: int, progress: object) -> Calibrated:
                self.ranks.append(rank)
                return Calibrated(MachineProfile.read(COSTS), misfit, others)

            monkeypatch.setattr("lorasrv.offline.planner.calibrate.calibrate", calibrate)
            return cli("plan", "--trace", trace, *POOL, "--predict-only", *options)

        return run

    def test_they_are_kept_and_used_again(self, measure) -> None:
        told = [json.loads(measure(0.1, "--json", *more).out) for more in ((), (), ("--recalibrate",))]
        sources = [one["costs"]["source"].split(" on")[0] for one in told]
        assert sources == ["costs measured now", "costs measured earlier", "costs measured now"]
        assert self.ranks == [16, 16]

    def test_those_of_a_busy_machine_are_not_kept(self, measure, tmp_path: Path) -> None:
        found = {"steps took 380 % longer than the costs explain": (3.8, 0.05)}
        found |= {"other programs used 40 % of the processors meanwhile": (0.1, 0.4)}
        for says, (misfit, others) in found.items():
            done = measure(misfit, "--json", others=others)
            assert f"{says}: these costs are too high, and not saved\n" in done.err
            assert json.loads(done.out)["costs"]["source"] == "costs measured now on this machine, which was busy"
            assert not (tmp_path / "cache").exists()

    def test_wrong_options_are_refused_before_measuring(self, measure) -> None:
        failed(measure(0.1, "--store", "/nowhere"), 2, "the folder /nowhere does not exist")
        failed(measure(0.1, "--pool-bytes", "1000"), 2, "--pool-bytes must be")
        assert self.ranks == []

    def test_another_model_or_form_is_another_file(self, tmp_path: Path) -> None:
        files = {cache_file("a", ModelOptions()), cache_file("b", ModelOptions())}
        files.add(cache_file("a", ModelOptions(dtype="float32")))
        assert len(files) == 3
        assert read_cached(tmp_path / "none") is None
        write_cached(tmp_path / "x" / "c.json", MachineProfile.read(COSTS))
        assert read_cached(tmp_path / "x" / "c.json") == MachineProfile.read(COSTS)
        (tmp_path / "x" / "c.json").write_text("{")
        assert read_cached(tmp_path / "x" / "c.json") is None


def test_sizes_come_from_a_store_or_a_rank(plan, trace: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    with AdapterStore(tmp_path / "store", base_shapes(checkpoint.spec)) as store:
        write_random_adapter(store, "a0", 2, seed=0)
    checkpoint.close()
    write_trace(trace, [TraceRequest(0.0, 8, 2, "a0"), TraceRequest(1.0, 8, 2, "a1")])
    for options, unknown in ((("--store", tmp_path / "store"), 1), ((), 2)):
        done = plan("--predict-only", "--rank", 8, *options)
        told = f"the size of {unknown} of 2 adapters is unknown; assuming rank 8 (--rank)"
        assert (done.code, told in done.err) == (0, True)
