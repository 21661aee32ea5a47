"""`lorasrv bench` on servers that work and on servers that fail: what it counts, prints and ends with."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from broken_server import BrokenServer, broken_server

from api.cli.bench import machine as probe
from api.cli.bench.roofline import MachineRates
from api.cli.bench.stats import NothingAnswered, read_results
from lorasrv.metrics.trace import TraceRequest, write_trace


@pytest.fixture
def healthy():
    with broken_server() as server:
        yield server


def loads(server: BrokenServer) -> list[dict[str, Any]]:
    """What was asked but for what measures tokens."""
    return [body for body in server.asked if body["max_tokens"] > 1]


def lines(done: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


FEW = ("--requests", 4, "--output-tokens", 5, "--prompt-tokens", 43)


class TestAnyServer:
    def test_json(self, cli, healthy: BrokenServer) -> None:
        done = cli("bench", "--url", healthy.url, *FEW, "--concurrency", "1,2", "--json", "--label", "x", "--seed", 3)
        assert done.code == 0, done.err
        one, two = lines(done)
        assert (one["bench"], one["label"], one["settings"]["seed"]) == (1, "x", 3)
        assert (one["settings"]["concurrency"], two["settings"]["concurrency"]) == (1, 2)
        assert one["server"] == {"name": "nobody", "version": "9.9", "base": "base"}
        assert {"lorasrv", "python"} <= one["client"].keys()
        assert one["machine"]["cores"] >= 1
        figures = one["figures"]
        assert (figures["requests"], figures["failed"], figures["adapters"]) == (4, 0, 2)
        assert figures["output_tokens_mean"] == 5
        assert figures["prompt_tokens_mean"] == 43
        assert figures["total_tok_per_s"] == pytest.approx(figures["output_tok_per_s"] * 48 / 5, rel=1e-3)
        assert figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p50"]
        assert (figures["mbu"], figures["goodput_per_s"]) == (None, None)

    def test_what_is_asked(self, cli, healthy: BrokenServer) -> None:
        assert cli("bench", "--url", healthy.url + "/v1/", *FEW, "--warmup", 3, "--key", "s3").code == 0
        asked = loads(healthy)
        assert sorted(body["model"] for body in asked[:3]) == ["a", "a", "b"], "warm-ups come first, some at once"
        assert {body["prompt"] for body in asked[:3]} == {"warm up"}
        assert sorted(body["model"] for body in asked[3:]) == ["a", "a", "b", "b"]
        assert len({body["prompt"].split()[0] for body in asked[3:]}) == 4
        for body in asked:
            assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
            assert body["stream_options"] == {"include_usage": True}
        assert set(healthy.paths) == {"/v1/completions"}
        assert healthy.keys == {"Bearer s3"}

    def test_the_key_is_in_no_result(self, cli, healthy: BrokenServer) -> None:
        assert "s3cret" not in cli("bench", "--url", healthy.url, *FEW, "--key", "s3cret", "--json").out

    def test_chat(self, cli, healthy: BrokenServer) -> None:
        [done] = lines(cli("bench", "--url", healthy.url, *FEW, "--chat", "--json"))
        assert done["figures"]["failed"] == 0
        assert set(healthy.paths) == {"/v1/chat/completions"}

    def test_base_only_and_given_names(self, cli, healthy: BrokenServer) -> None:
        assert cli("bench", "--url", healthy.url, *FEW, "--adapters", 0).code == 0
        assert {body["model"] for body in healthy.asked} == {"base"}
        healthy.asked.clear()
        cli("bench", "--url", healthy.url, *FEW, "--models", "b,a", "--law", "identical")
        assert {body["model"] for body in loads(healthy)} == {"b"}

    def test_a_sweep_over_adapters(self, cli, healthy: BrokenServer) -> None:
        done = lines(cli("bench", "--url", healthy.url, *FEW, "--adapters", "0,1,2", "--json"))
        assert [one["figures"]["adapters"] for one in done] == [0, 1, 2]

    def test_rate(self, cli, healthy: BrokenServer) -> None:
        [done] = lines(cli("bench", "--url", healthy.url, *FEW, "--rate", 500, "--json"))
        assert (done["settings"]["arrival"], done["settings"]["rate"]) == ("rate", 500)
        assert done["figures"]["requests"] == 4

    def test_shared_prefix(self, cli, healthy: BrokenServer) -> None:
        cli("bench", "--url", healthy.url, *FEW, "--shared-prefix", 20, "--warmup", 0)
        beginnings = {tuple(body["prompt"].split()[:10]) for body in loads(healthy)}
        assert len(beginnings) == 1

    def test_trace(self, cli, healthy: BrokenServer, tmp_path: Path) -> None:
        write_trace(tmp_path / "t.jsonl", [TraceRequest(n / 100, 43, 2 + n, "ab"[n % 2]) for n in range(3)])
        [done] = lines(cli("bench", "--url", healthy.url, "--trace", tmp_path / "t.jsonl", "--warmup", 0, "--json"))
        assert (done["settings"]["arrival"], done["figures"]["requests"]) == ("trace", 3)
        assert sorted((body["model"], body["max_tokens"]) for body in loads(healthy)) == [("a", 2), ("a", 4), ("b", 3)]

    def test_goodput(self, cli, healthy: BrokenServer) -> None:
        kept = lines(cli("bench", "--url", healthy.url, *FEW, "--slo", "ttft=1e6,tpot=1e6", "--json"))[0]["figures"]
        assert kept["good_share"] == 1.0
        assert kept["goodput_per_s"] == kept["requests_per_s"]
        none = lines(cli("bench", "--url", healthy.url, *FEW, "--slo", "ttft=1e-6", "--json"))[0]["figures"]
        assert (none["good_share"], none["goodput_per_s"]) == (0.0, 0.0)

    def test_shares_of_a_measured_machine(self, cli, healthy: BrokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "measure", lambda: MachineRates(1e9, 1e9, 2e9))
        options = ("--model-bytes", "1MB", "--model-ops", "2M", "--measure-machine", "--json")
        [done] = lines(cli("bench", "--url", healthy.url, *FEW, *options))
        assert done["figures"]["mbu"] > 0
        # 43 + 4 tokens of each of 4 requests, 2M operations each.
        wall = done["figures"]["wall_s"]
        assert done["figures"]["mfu"] == pytest.approx(4 * 47 * 2e6 / wall / 1e9, rel=1e-3)
        assert done["machine"]["measured"]["read_bytes_per_s"] == 1e9
        bare = cli("bench", "--url", healthy.url, *FEW, "--measure-machine")
        assert "MBU is left out: the server does not report the costs of its model; give --model-bytes" in bare.err

    def test_table_and_lines(self, cli, healthy: BrokenServer) -> None:
        done = cli("bench", "--url", healthy.url, *FEW, "--concurrency", "1,2", "--slo", "ttft=1000")
        title, one, two, about = done.out.splitlines()
        assert title.startswith("load\tanswered\ttok/s\twith prompts\tTTFT p50/p90/p99 ms\tTPOT ms\tITL ms\tgoodput/s")
        assert one.startswith("concurrency 1, 2 adapters\t4 of 4\t")
        assert two.startswith("concurrency 2, 2 adapters\t")
        assert about == "nobody 9.9 base: 43 + 5 tokens a request, law distinct, seed 0"
        assert "concurrency 2, 2 adapters done" in done.err
        assert "MBU and MFU are left out: they need --measure-machine" in done.err

    def test_a_picture(self, cli, healthy: BrokenServer, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        options = ("--adapters", "0,2", "--concurrency", "1,2", "--plot", tmp_path / "b.png")
        assert cli("bench", "--url", healthy.url, *FEW, *options).code == 0
        assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    def test_results_are_read_back(self, cli, healthy: BrokenServer, tmp_path: Path) -> None:
        file = tmp_path / "r.jsonl"
        file.write_text(cli("bench", "--url", healthy.url, *FEW, "--concurrency", "1,2", "--json").out)
        assert [r["settings"]["concurrency"] for r in read_results([file])] == [1, 2]
        for bad in ("[]", "{", '{"bench": 2}', '{"bench": 1}'):
            file.write_text("\n" + bad)
            with pytest.raises(NothingAnswered, match=r"r\.jsonl:2: "):
                read_results([file])


class TestFailures:
    @pytest.mark.parametrize(
        ("way", "kind", "says"),
        [
            ("500", "HTTP 500", "it burns"),
            ("404 model", "HTTP 404", "no such model"),
            ("short", "wrong token count", "4 tokens instead of 5"),
            ("long", "wrong token count", "6 tokens instead of 5"),
            ("cut", "cut stream", ""),
            ("no done", "cut stream", "without its last event"),
            ("error event", "error event", "the engine died"),
            ("no usage", "no usage", "does not report usage"),
            ("no json", "malformed event", "{oops"),
            ("silent", "timeout", ""),
        ],
    )
    def test_every_other_request_fails(self, cli, way: str, kind: str, says: str) -> None:
        with broken_server(way, every=2) as server:
            timeout = ("--timeout-s", 0.3) if way == "silent" else ()
            done = cli("bench", "--url", server.url, *FEW, "--warmup", 0, "--concurrency", 1, *timeout, "--json")
        assert done.code == 0, done.err
        figures = lines(done)[0]["figures"]
        assert (figures["requests"], figures["failed"]) == (4, 2)
        assert figures["failures"] == {kind: 2}
        assert figures["first_error"].startswith(f"{kind}: ")
        assert says in figures["first_error"]
        assert figures["output_tokens_mean"] == 5, "failed requests are in no figure but their number"

    def test_the_table_tells(self, cli) -> None:
        with broken_server("500", every=2) as server:
            done = cli("bench", "--url", server.url, *FEW, "--warmup", 0, "--concurrency", 1)
        assert "\t2 of 4\t" in done.out
        assert "concurrency 1, 2 adapters: 2 failed (2 × HTTP 500); the first: HTTP 500: it burns" in done.out

    def test_nothing_answered(self, cli) -> None:
        with broken_server("500") as server:
            done = cli("bench", "--url", server.url, *FEW)
        assert done.code == 1
        assert done.err.splitlines()[-1] == (
            "lorasrv: no request of concurrency 8, 2 adapters was answered: HTTP 500: it burns"
        )

    def test_nobody_there(self, cli) -> None:
        done = cli("bench", "--url", "http://127.0.0.1:9", *FEW)
        assert (done.code, done.out) == (3, "")
        assert done.err.startswith("lorasrv: no server answers at http://127.0.0.1:9")
        assert cli("bench", "--url", "nowhere").code == 3

    @pytest.mark.long
    def test_ctrl_c_prints_what_there_is(self, tmp_path: Path) -> None:
        with broken_server("silent", every=4) as server:
            code = "from api.cli.main import main; main()"
            command = ["bench", "--url", server.url, "--requests", "8", "--output-tokens", "5", "--json"]
            process = subprocess.Popen(
                [sys.executable, "-c", code, *command, "--concurrency", "1", "--warmup", "0"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            deadline = time.monotonic() + 60
            while len(loads(server)) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=90)
        assert process.returncode == 130
        assert err.splitlines()[-1] == "lorasrv: interrupted; the figures are those until then"
        assert "Traceback" not in err
        [done] = [json.loads(line) for line in out.splitlines()]
        assert done["interrupted"] is True
        assert (done["figures"]["requests"], done["figures"]["failed"]) == (3, 0)
        assert done["figures"]["output_tok_per_s"] > 0


class TestUsage:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--concurrency", "0"), "--concurrency '0': write one or several integers"),
            (("--concurrency", "1", "--rate", "2"), "--concurrency and --rate exclude each other"),
            (("--rate", "-1"), "--rate '-1'"),
            (("--law", "zipf"), "--law 'zipf'"),
            (("--prompt-tokens", "many"), "--prompt-tokens 'many'"),
            (("--output-tokens", "uniform:3"), "--output-tokens 'uniform:3'"),
            (("--slo", "itl=3"), "--slo 'itl=3'"),
            (("--models", "a,,b"), "--models 'a,,b'"),
            (("--models", "a", "--adapters", "2"), "--adapters 2: --models names only 1"),
            (("--model-bytes", "big"), "--model-bytes 'big'"),
            (("--plot", "nowhere/at/all.png"), "--plot: there is no folder"),
            (("--", "--policy", "fair"), "--url: flags of serve are for a server that is started"),
        ],
    )
    def test_one_line_names_the_option(self, cli, options: tuple[str, ...], says: str) -> None:
        done = cli("bench", "--url", "http://127.0.0.1:9", *options)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"lorasrv: {says}")
        assert done.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("flags", "says"),
        [(("fast",), "unexpected argument 'fast'"), (("--", "--port=1"), "-- --port: the started server has its own")],
    )
    def test_flags_of_serve(self, cli, flags: tuple[str, ...], says: str) -> None:
        done = cli("bench", *flags)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert done.err.startswith(f"lorasrv: {says}")

    def test_a_trace_says_lengths(self, cli, tmp_path: Path) -> None:
        write_trace(tmp_path / "t.jsonl", [TraceRequest(0, 1, 1)])
        done = cli("bench", "--trace", tmp_path / "t.jsonl", "--law", "uniform")
        assert (done.code, done.err) == (2, "lorasrv: --law: --trace says it for each request\n")

    def test_unknown_names(self, cli, healthy: BrokenServer) -> None:
        done = cli("bench", "--url", healthy.url, "--models", "a,mia")
        assert (done.code, done.out) == (1, "")
        assert done.err == f"lorasrv: --models: 'mia' is unknown at {healthy.url}; it has base, a, b\n"

    def test_unknown_names_in_a_trace(self, cli, healthy: BrokenServer, tmp_path: Path) -> None:
        write_trace(tmp_path / "t.jsonl", [TraceRequest(0, 1, 1, "mia")])
        done = cli("bench", "--url", healthy.url, "--trace", tmp_path / "t.jsonl")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("lorasrv: --trace: 'mia' is unknown at ")

    def test_too_many_adapters(self, cli, healthy: BrokenServer) -> None:
        done = cli("bench", "--url", healthy.url, "--adapters", "3")
        assert (done.code, done.err) == (1, f"lorasrv: --adapters 3: the server at {healthy.url} has 2\n")

    def test_a_machine_far_away(self, cli) -> None:
        done = cli("bench", "--url", "http://192.0.2.1:8000", "--measure-machine")
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "--measure-machine measures this machine" in done.err


def test_lorasrv_tells_what_its_model_costs(cli, server, make_adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    server.upload(make_adapter(), "mia")
    monkeypatch.setattr(probe, "measure", lambda: MachineRates(1e9, 1e9, 2e9))
    [done] = lines(
        cli("bench", "--url", server.url, "--requests", 2, "--output-tokens", 8, "--measure-machine", "--json")
    )
    assert done["server"]["name"] == "lorasrv"
    assert done["server"]["quantization"] == "int8"
    assert done["figures"]["failed"] == 0, done["figures"]["first_error"]
    # The fake engine has no weights to read, but a shape to compute.
    assert (done["figures"]["mbu"], done["figures"]["adapters"]) == (None, 1)
    assert done["figures"]["mfu"] > 0
    assert done["figures"]["prompt_tokens_mean"] == pytest.approx(64, rel=0.2)
