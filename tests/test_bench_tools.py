"""Tests of the tools that turn measurements into tables: sections of documents, peers, checkouts, command lines."""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api.cli.bench.prompts import Ruler
from api.cli.bench.roofline import MachineRates, Work
from api.cli.bench.sweep import make_requests

sys.path.append(str(Path(__file__).parent / "benchmarks"))

import harness
import bench_peers
import bench_step
import report

BENCHMARKS = Path(__file__).parent / "benchmarks"


def result(label: str = "lorasrv", tok_per_s: float = 50.0, **figures: Any) -> dict[str, Any]:
    spread = {"p50": 10.0, "p90": 20.0, "p99": 130.4}
    return {
        "bench": 1,
        "label": label,
        "point": "concurrency 16, 16 adapters",
        "time": "2026-11-21T10:00:00+00:00",
        "settings": {"concurrency": 16, "rate": None, "law": "distinct", "seed": 7, "prompt": "64"},
        "server": {"name": label, "version": "1.2", "base": "tiny", "quantization": "int8"},
        "machine": {"cpu": "A CPU", "cores": 2, "instructions": ["avx2"], "measured": None},
        "client": {"lorasrv": "0.1.0", "python": "3.11"},
        "commit": "abc1234",
        "command": ["lorasrv", "bench", "--law", "zipf:1.1"],
        "figures": {
            "requests": 32,
            "failed": 0,
            "first_error": None,
            "adapters": 16,
            "prompt_tokens_mean": 64.2,
            "output_tokens_mean": 64.0,
            "output_tok_per_s": tok_per_s,
            "total_tok_per_s": 2 * tok_per_s,
            "ttft_ms": spread,
            "tpot_ms": {"p50": None, "p90": None, "p99": None},
            "itl_ms": spread,
            "goodput_per_s": None,
            "mbu": 0.5,
            "mfu": None,
            **figures,
        },
    }


class TestReport:
    def test_results_are_read_back(self, tmp_path: Path) -> None:
        file = tmp_path / "r.jsonl"
        file.write_text("\n".join(json.dumps(result(label)) for label in "ab"))
        assert [read["label"] for read in report.read_results([file])] == ["a", "b"]
        for bad in ("[]", "{", '{"bench": 2}', '{"bench": 1}'):
            file.write_text("\n" + bad)
            with pytest.raises(report.InvalidResults, match=r"r\.jsonl:2: "):
                report.read_results([file])

    def test_a_section(self) -> None:
        title, _, one, two, blank, *facts, end = report.section("x", [result(), result("peer", 9.0)]).splitlines()[1:]
        assert title == (
            "| server | load | adapters | adapter popularity | prompt + answer | tok/s | tok/s with prompts "
            "| TTFT p50 / p90 / p99 ms | ITL ms | MBU | failed |"
        ), "columns without values are left out"
        assert one.startswith("| lorasrv | 16 at a time | 16 | distinct | 64 + 64 | 50.0 | 100.0 | 10.0 / 20.0 / 130 |")
        assert two.startswith("| peer |")
        assert (blank, end) == ("", "<!-- /bench -->")
        assert facts[0] == "Machine: A CPU, 2 cores, avx2."
        assert facts[1] == "Servers: lorasrv 1.2 tiny int8; peer 1.2 tiny int8. Load: lorasrv 0.1.0, python 3.11."
        assert facts[2] == "Commit abc1234, 2026-11-21, seed 7."
        assert facts[-1] == "    lorasrv bench --law zipf:1.1"
        assert len([line for line in facts if line.startswith("    ")]) == 1

    def test_no_folder_of_this_machine(self) -> None:
        words = ["bench", "--vllm", "/home/me/venv", "--out=/tmp/x/r.jsonl", "--url", "http://127.0.0.1:8000/v1"]
        text = report.section(
            "x", [{**result(), "command": [*words, "--serve-flags", "--model /m/base --rank 4", "x"]}]
        )
        assert text.splitlines()[-2] == (
            "    bench --vllm venv --out=r.jsonl --url http://127.0.0.1:8000/v1 --serve-flags '--model base --rank 4' x"
        )

    def test_failures_are_told(self) -> None:
        text = report.section("x", [result(failed=3, first_error="HTTP 500: a|b")])
        assert "| 3 of 32 |" in text
        assert "First errors: HTTP 500: a|b." in text

    def test_it_replaces_its_own_section_alone(self) -> None:
        before = (
            "# Doc\n\n<!-- bench:a -->\nold\n<!-- /bench -->\nbetween\n<!-- bench:b -->\nkept\n<!-- /bench -->\nend\n"
        )
        after = report.replace_section(before, "a", "<!-- bench:a -->\nnew\n<!-- /bench -->")
        assert after == before.replace("old", "new")

    def test_a_new_section_comes_last(self) -> None:
        assert report.replace_section("# Doc\n\n", "a", "new") == "# Doc\n\n## A\n\nnew\n"
        assert "## Title\n" in report.replace_section("# Doc\n", "a", "new", "Title")

    def test_the_page_that_has_the_section(self, tmp_path: Path) -> None:
        (tmp_path / "peers.md").write_text("<!-- bench:a -->\n<!-- /bench -->\n")
        (tmp_path / "steps.md").write_text("<!-- bench:a-b -->\n<!-- /bench -->\n")
        found = {name: report.page_of(name, tmp_path).name for name in ("a", "a-b", "new")}
        assert found == {"a": "peers.md", "a-b": "steps.md", "new": "peers.md"}
        (tmp_path / "gpu.md").write_text("<!-- bench:a -->\n<!-- /bench -->\n")
        with pytest.raises(report.NoSection, match=r"gpu\.md and peers\.md"):
            report.page_of("a", tmp_path)
        assert report.page_of("peers-vllm").read_text("utf-8").count("<!-- bench:peers-vllm -->") == 1

    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("<!-- bench:a -->\nno end\n", "a"),
            ("<!-- bench:a -->\n<!-- bench:b -->\n<!-- /bench -->", "a"),
            ("<!-- bench:a -->\n<!-- /bench -->\n<!-- bench:a -->\n<!-- /bench -->", "a"),
            ("", "A b"),
        ],
    )
    def test_marks_that_do_not_pair(self, text: str, name: str) -> None:
        with pytest.raises(report.NoSection):
            report.replace_section(text, name, "new")

    def test_the_command(self, tmp_path: Path) -> None:
        (tmp_path / "r.jsonl").write_text(json.dumps(result()) + "\n")
        (tmp_path / "doc.md").write_text("# Doc\n")

        def run(*more: str, file: str = "r.jsonl") -> "subprocess.CompletedProcess[str]":
            command = [sys.executable, str(BENCHMARKS / "report.py"), "serving", str(tmp_path / file)]
            options = ["--document", str(tmp_path / "doc.md"), *more]
            return subprocess.run([*command, *options], capture_output=True, text=True, env=harness.environment())

        assert "| lorasrv | 16 at a time |" in run("--dry-run").stdout
        assert (tmp_path / "doc.md").read_text() == "# Doc\n"
        assert run().returncode == run().returncode == 0
        assert (tmp_path / "doc.md").read_text().count("<!-- bench:serving -->") == 1
        (tmp_path / "bad.jsonl").write_text("{}\n")
        refused = run(file="bad.jsonl")
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert refused.stderr.startswith("report.py: bad.jsonl:1: not a result")
        assert run(file="none.jsonl").stderr.endswith("none.jsonl: No such file or directory\n")


class TestPeers:
    def test_rows(self) -> None:
        assert [row.key for row in bench_peers.rows_of("zipf,1/base")] == ["zipf", "1/base"]
        with pytest.raises(SystemExit, match="--rows '2/2' is unknown"):
            bench_peers.rows_of("1/1,2/2")

    def test_a_row_names_as_many_adapters(self) -> None:
        names = [f"a{n:04d}" for n in range(64)]
        for row in bench_peers.ROWS:
            requests = make_requests(row.point, row.settings(names, "base", 64, 5, None), Ruler(1, 1))
            assert len(requests) == row.requests
            distinct = {request.model for request in requests if request.has_adapter}
            if row.key == "zipf":
                assert 1 < len(distinct) < 64
            else:
                assert len(distinct) == min(row.adapters, row.requests), row.key
            assert all(request.max_tokens == 5 and len(request.prompt.split()) == 64 for request in requests)

    def test_distinct_adapters_of_a_moment(self) -> None:
        [zipf, even] = bench_peers.rows_of("zipf,32/32")
        seen = [len(set(zipf.law.pick(64, 32, random.Random(seed)))) for seed in range(400)]
        assert zipf.distinct(32) == pytest.approx(statistics.fmean(seen), rel=0.02)
        assert (even.distinct(32), even.distinct(2)) == (32, 2)

    def test_floor_and_ratio(self) -> None:
        [row] = bench_peers.rows_of("16/16")
        work, rates = Work(model_bytes=1000.0, adapter_bytes=50.0, token_ops=1.0), MachineRates(1e4, 1e9, 1e9)
        # A step reads 1,000 + 16 * 50 bytes in 0.18 s, for 16 tokens.
        ours, theirs = (
            bench_peers.with_floor(result(who, speed), row, 64, 10, work, rates)
            for who, speed in (("lorasrv", 50.0), ("peft", 10.0))
        )
        assert ours["floor"]["tpot_ms"] == pytest.approx(180)
        assert ours["floor"]["tok_per_s"] == pytest.approx(16 / 0.18, rel=1e-3)
        assert ours["floor"]["of_floor"] == pytest.approx(50 * 0.18 / 16, rel=1e-3)
        one, other = bench_peers.comparison([ours, theirs])
        assert one[:5] == ("16/16", "64", "lorasrv", "50.0", "–")
        assert other[:5] == ("16/16", "64", "peft", "10.0", "5.0 ×")
        rounds = [{**ours, "figures": {**ours["figures"], "output_tok_per_s": speed}} for speed in (40.0, 70.0, 60.0)]
        one, other = bench_peers.comparison([*rounds, theirs])
        assert (one[3], other[4]) == ("60.0 (40.0 to 70.0)", "6.0 ×"), "medians of the rounds"
        assert bench_peers.better([theirs, ours]) is ours
        assert "| 56 % |" in report.section("x", [ours])


class TestHarness:
    def test_pairs_of_checkouts_are_compared(self) -> None:
        runs = [
            ({"ms": 10.0, "tok/s": 4.0}, {"ms": 12.0, "tok/s": 5.0}),
            ({"ms": 20.0, "tok/s": 4.0}, {"ms": 10.0, "tok/s": 3.0}),
        ]
        assert harness.compared(runs) == [
            ("ms", "15", "11", "0.850", "0.500 to 1.200"),
            ("tok/s", "4", "4", "1.000", "0.750 to 1.250"),
        ]

    def test_checkouts_take_turns(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        seen: list[Path] = []

        def measure(root: Path) -> dict[str, float]:
            seen.append(root)
            return {"ms": 2.0 if root == tmp_path else 3.0}

        harness.versus(tmp_path, 3, measure)
        assert seen == [tmp_path, harness.ROOT, harness.ROOT, tmp_path, tmp_path, harness.ROOT]
        assert "| ms | 2 | 3 | 1.500 | 1.500 to 1.500 |" in capsys.readouterr().out

    def test_figures_of_a_step_table(self) -> None:
        text = "loading\n\n| rows/adapters | numba ms | tok/s | torch ms | tok/s |\n|---|---|---|---|---|\n"
        text += "| 1/0 | 11.1 | 90 | 42.0 | 23 |\n| 16/16 | 41.10 | 390 | 624.0 | 26 |\n"
        assert bench_step.read_table(text) == {
            "1/0 numba ms": 11.1,
            "1/0 torch ms": 42.0,
            "16/16 numba ms": 41.1,
            "16/16 torch ms": 624.0,
        }

    def test_a_command_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def parsed(*words: str) -> dict[str, Any]:
            monkeypatch.setattr(sys, "argv", ["bench", *words])
            options = {"rows": ((1, 4), ""), "max_tokens": (24, ""), "out": (Path, ""), "as_json": (False, "")}
            return vars(harness.arguments("", ("hot", "all"), quick={"max_tokens": 3}, **options))

        usual = {"measure": "hot", "rows": (1, 4), "max_tokens": 24, "out": None, "as_json": False, "quick": False}
        assert parsed("hot") == usual
        assert parsed("all", "--rows", "2", "--out", "x", "--as-json") == usual | {
            "measure": "all",
            "rows": (2,),
            "out": Path("x"),
            "as_json": True,
        }
        assert parsed("hot", "--quick")["max_tokens"] == 3
        assert parsed("hot", "--quick", "--max-tokens", "9")["max_tokens"] == 9
        with pytest.raises(SystemExit):
            parsed("cold")

    def test_quantiles(self) -> None:
        assert harness.quantiles([3, 1, 2], 0.5, 0.99, 1.0) == [2, 3, 3]
        assert str(harness.quantile([], 0.5)) == "nan"

    def test_a_store_of_seeded_adapters(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blobs: list[bytes] = []
        put_blob = harness.put_blob
        monkeypatch.setattr(harness, "put_blob", lambda store, data: blobs.append(data) or put_blob(store, data))
        shapes = harness.BaseShapes(family="llama", num_layers=2, modules={"self_attn.q_proj": (8, 8)}, name="base")
        with harness.open_store(tmp_path, shapes) as store:
            keys = harness.register_seeded(store, ["a", "b"], rank=4)
            assert len(set(keys)) == 2
            assert harness.register_seeded(store, ["a", "b", "c"], rank=4)[:2] == keys
            assert store.resolve("c").key not in keys
            assert len(set(blobs)) == len(blobs) == 3, "adapters that are registered are not made again"


@pytest.mark.long
def test_the_bench_of_the_store_runs() -> None:
    """Its server is the real application around an idle engine, which may lack what the application begins to use."""
    command = [sys.executable, str(BENCHMARKS / "bench_store.py"), "--adapters", "20", "--calls", "10", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=harness.environment())
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert {len(rows) for rows in json.loads(done.stdout).values()} == {19}
