"""lorasrv plan: what it prints, as tables and as JSON, the picture, and how it ends when something is wrong."""

import json
import random
from pathlib import Path

import pytest

from lorasrv.config import ModelOptions
from lorasrv.memory.cost_model import PARTS
from lorasrv.metrics.engine_stats import EngineStats
from lorasrv.metrics.trace import TraceRequest, write_trace
from lorasrv.models.loader import open_checkpoint
from lorasrv.offline.planner.calibrate import Calibrated
from lorasrv.offline.planner.machine_profile import MachineProfile, cache_file, read_cached, write_cached

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


def test_json(cli, trace: Path) -> None:
    done = json.loads(cli("plan", "--trace", trace, "--costs", COSTS, *POOL, "--json").out)
    assert done["predicted"]["requests"] == 24
    assert done["predicted"]["loads_from_disk"] == 5
    assert sum(done["predicted"]["tiers"].values()) == pytest.approx(1.0)
    assert (done["measured"], done["ratio"]) == (None, {})
    assert done["capacity"]["adapters"] >= 1
    assert {"adapters", "ttft_p50_ms", "ttft_p99_ms"} <= done["capacity"]["points"][0].keys()
    assert done["changes"][0]["name"] == "pool x 2"
    assert done["costs"]["source"] == "costs from costs.json"
    assert done["replay"]["times_real_time"] > 1
    assert done["pool_bytes"] <= 16 << 20


def test_tables(cli, trace: Path) -> None:
    done = cli("plan", "--trace", trace, "--costs", COSTS, *POOL, "--policy", "sjf")
    assert done.code == 0
    assert "TTFT p99\t" in done.out
    assert "adapters\tTTFT p50\tTTFT p99\ttok/s" in done.out
    assert "adapters fit" in done.out
    assert "policy fair\t" in done.out
    assert "policy sjf\t" not in done.out
    assert "measured" not in done.out


def test_a_recorded_trace_is_compared(cli, tmp_path: Path, trace: Path) -> None:
    seen = [TraceRequest(n, 20, 4, ttft_ms=50.0, total_ms=200.0) for n in range(4)]
    write_trace(trace, seen)
    done = cli("plan", "--trace", trace, "--costs", COSTS, *POOL, "--predict-only")
    assert done.out.splitlines()[0] == "\tpredicted\tmeasured\tratio"
    assert "change\t" not in done.out
    ratio = json.loads(cli("plan", "--trace", trace, "--costs", COSTS, *POOL, "--predict-only", "--json").out)["ratio"]
    assert set(ratio) == {"tok_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"}


def test_an_assumed_rank_is_told(cli, trace: Path) -> None:
    write_trace(trace, [TraceRequest(0.0, 8, 2, "mia")])
    told = cli("plan", "--trace", trace, "--costs", COSTS, *POOL, "--predict-only", "--rank", 8)
    assert told.code == 0
    assert "the size of 1 of 1 adapters is unknown; assuming rank 8 (--rank)" in told.err


def test_a_picture(cli, tmp_path: Path, trace: Path) -> None:
    pytest.importorskip("matplotlib")
    done = cli("plan", "--trace", trace, "--costs", COSTS, *POOL, "--png", tmp_path / "plan.png", "--json")
    assert done.code == 0
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_no_picture_without_matplotlib(cli, tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = cli("plan", "--trace", trace, "--costs", COSTS, "--png", tmp_path / "plan.png")
    assert (refused.code, refused.err) == (2, "lorasrv: --png needs matplotlib: pip install 'lorasrv[plot]'\n")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"arrival_s": 0}\n', "bad.jsonl:2: prompt_tokens"),
        ("", "bad.jsonl: the trace is empty"),
    ],
)
def test_a_malformed_trace_is_one_line(cli, tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    refused = cli("plan", "--trace", tmp_path / "bad.jsonl", "--costs", COSTS)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith(f"lorasrv: {complaint}")
    assert refused.err.count("\n") == 1


def test_no_trace(cli, tmp_path: Path) -> None:
    refused = cli("plan", "--trace", tmp_path / "none", "--costs", COSTS)
    assert refused.code == 1
    assert "No such file" in refused.err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--policy", "best"), "--policy 'best' is unknown"),
        (("--scheduling-policy", "best"), "--scheduling-policy 'best' is unknown"),
        (("--pool-bytes", "much"), "--pool-bytes: 'much' is not allowed; expected a size: 512MiB, 2GB or bytes"),
        (("--pool-bytes", "1000"), "--pool-bytes is too small"),
        (("--max-num-seqs", "0"), "--max-num-seqs must be positive"),
        (("--p99-ttft-ms", "0"), "--p99-ttft-ms must be positive"),
        (("--recalibrate",), "exclude each other"),
        (("--png", "/nowhere/plan.png"), "the folder /nowhere does not exist"),
        (("--store", "/nowhere"), "the folder /nowhere does not exist"),
    ],
)
def test_wrong_options(cli, trace: Path, options: tuple[str, ...], complaint: str) -> None:
    refused = cli("plan", "--trace", trace, "--costs", COSTS, *options)
    assert refused.code == 2
    assert complaint in refused.err


def test_wrong_costs(cli, tmp_path: Path, trace: Path) -> None:
    (tmp_path / "costs.json").write_text('{"step": {}}')
    refused = cli("plan", "--trace", trace, "--costs", tmp_path / "costs.json")
    assert refused.code == 2
    assert "costs: step must have step, token, request, adapter_byte, attention_pair" in refused.err


class TestCostsOfAServer:
    def test_they_are_taken_with_its_pool(self, cli, server, engine, trace: Path) -> None:
        learnt = {part: (number + 1) * 1e-9 for number, part in enumerate(PARTS)}
        loads = {"load_byte": 1e-9, "copy_byte": 2e-9}
        snapshot = EngineStats(step_costs=learnt, load_costs=loads, pool_bytes=32 << 20)
        engine.metrics.publish(snapshot)
        options = ("--trace", trace, "--server", server.url, "--predict-only", "--json")
        done = json.loads(cli("plan", *options).out)
        assert done["costs"]["step"] == pytest.approx(learnt)
        assert (done["costs"]["load_byte_s"], done["costs"]["copy_byte_s"]) == pytest.approx((1e-9, 2e-9))
        assert 31 << 20 < done["pool_bytes"] <= 32 << 20
        assert done["costs"]["source"] == f"costs learnt by {server.url}"

    def test_nobody_answers(self, cli, trace: Path) -> None:
        refused = cli("plan", "--trace", trace, "--server", "http://127.0.0.1:9", "--predict-only")
        assert refused.code == 3


class TestMeasuredCosts:
    def test_they_are_kept_and_used_again(
        self, cli, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        calls = []

        def calibrate(config: object, rank: int, progress: object) -> Calibrated:
            calls.append(rank)
            return Calibrated(MachineProfile.read(COSTS), misfit=0.1)

        monkeypatch.setattr("lorasrv.offline.planner.calibrate.calibrate", calibrate)
        options = ("plan", "--trace", trace, *POOL, "--predict-only", "--json")
        sources = [json.loads(cli(*options, *more).out)["costs"]["source"] for more in ((), (), ("--recalibrate",))]
        assert [source.split(" on")[0] for source in sources] == [
            "costs measured now",
            "costs measured earlier",
            "costs measured now",
        ]
        assert calls == [16, 16]

    def test_what_was_measured_on_a_busy_machine_is_not_kept(
        self, cli, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        busy = Calibrated(MachineProfile.read(COSTS), misfit=3.8)
        monkeypatch.setattr("lorasrv.offline.planner.calibrate.calibrate", lambda *_: busy)
        done = cli("plan", "--trace", trace, *POOL, "--predict-only")
        assert done.code == 0
        assert "steps took 380 % longer than the costs explain" in done.err
        assert not (tmp_path / "cache").exists()

    def test_another_model_or_form_is_another_file(self, tmp_path: Path) -> None:
        files = {cache_file("a", ModelOptions()), cache_file("b", ModelOptions())}
        files.add(cache_file("a", ModelOptions(dtype="float32")))
        assert len(files) == 3
        assert read_cached(tmp_path / "none") is None
        write_cached(tmp_path / "x" / "c.json", MachineProfile.read(COSTS))
        assert read_cached(tmp_path / "x" / "c.json") == MachineProfile.read(COSTS)
        (tmp_path / "x" / "c.json").write_text("{")
        assert read_cached(tmp_path / "x" / "c.json") is None


def test_sizes_come_from_a_store(cli, trace: Path, tmp_path: Path) -> None:
    from adapter_store.store import AdapterStore
    from lorasrv.models.lora_sites import base_shapes
    from lorasrv.offline.planner.random_adapters import write_random_adapter

    checkpoint = open_checkpoint("smollm2-135m")
    with AdapterStore(tmp_path / "store", base_shapes(checkpoint.spec)) as store:
        write_random_adapter(store, "a0", 2, seed=0)
    checkpoint.close()
    write_trace(trace, [TraceRequest(0.0, 8, 2, "a0"), TraceRequest(1.0, 8, 2, "a1")])
    done = cli("plan", "--trace", trace, "--costs", COSTS, *POOL, "--predict-only", "--store", tmp_path / "store")
    assert done.code == 0
    assert "the size of 1 of 2 adapters is unknown" in done.err


def test_serve_refuses_a_trace_that_it_cannot_write(cli, tmp_path: Path) -> None:
    refused = cli("serve", "--port", 0, "--store", tmp_path / "store", "--record-trace", tmp_path)
    assert refused.code == 2
    assert "--record-trace" in refused.err
    assert "cannot be written: Is a directory" in refused.err
