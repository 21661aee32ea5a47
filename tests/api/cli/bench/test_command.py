"""`lorasrv bench` on servers that work and on servers that fail: what it counts, prints and ends with."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_process
import pytest
from answers import failed
from broken_server import BrokenServer, broken_server
from traces import write_trace

from api.cli.bench import machine as probe
from api.cli.bench.roofline import MachineRates
from lorasrv.metrics.trace import TraceRequest


@pytest.fixture
def healthy():
    with broken_server() as server:
        yield server


def measured(server: BrokenServer) -> list[dict[str, Any]]:
    """What was asked but for what measures tokens."""
    return [body for body in server.asked if body["max_tokens"] > 1]


def lines(done: Any) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


FEW = ("--requests", 4, "--output-tokens", 5, "--prompt-tokens", 43)


class TestAnyServer:
    @pytest.fixture
    def bench(self, cli, healthy: BrokenServer) -> Callable[..., Any]:
        return lambda *options, load=FEW: cli("bench", "--url", healthy.url, *load, *options)

    def test_json(self, bench) -> None:
        one, two = lines(bench("--concurrency", "1,2", "--json", "--label", "x", "--seed", 3))
        assert (one["bench"], one["label"], one["settings"]["seed"]) == (1, "x", 3)
        assert (one["settings"]["concurrency"], two["settings"]["concurrency"]) == (1, 2)
        assert one["server"] == {"name": "nobody", "version": "9.9", "base": "base"}
        assert {"lorasrv", "python"} <= one["client"].keys()
        assert one["machine"]["cores"] >= 1
        figures = one["figures"]
        assert (figures["requests"], figures["failed"], figures["adapters"]) == (4, 0, 2)
        assert (figures["output_tokens_mean"], figures["prompt_tokens_mean"]) == (5, 43)
        assert figures["total_tok_per_s"] == pytest.approx(figures["output_tok_per_s"] * 48 / 5, rel=1e-3)
        assert figures["ttft_ms"]["p50"] <= figures["e2e_ms"]["p50"]
        assert (figures["mbu"], figures["goodput_per_s"]) == (None, None)

    def test_what_is_asked(self, cli, healthy: BrokenServer) -> None:
        done = cli("bench", "--url", healthy.url + "/v1/", *FEW, "--warmup", 3, "--key", "s3cret", "--json")
        assert (done.code, "s3cret" in done.out) == (0, False)
        asked = measured(healthy)
        assert sorted(body["model"] for body in asked[:3]) == ["a", "a", "b"], "warm-ups come first, some at once"
        assert {body["prompt"] for body in asked[:3]} == {"warm up"}
        assert sorted(body["model"] for body in asked[3:]) == ["a", "a", "b", "b"]
        assert len({body["prompt"].split()[0] for body in asked[3:]}) == 4
        options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        assert all(body | options == body for body in asked)
        assert set(healthy.paths) == {"/v1/completions"}
        assert healthy.keys == {"Bearer s3cret"}

    def test_chat(self, bench, healthy: BrokenServer) -> None:
        [done] = lines(bench("--chat", "--json"))
        assert done["figures"]["failed"] == 0
        assert set(healthy.paths) == {"/v1/chat/completions"}

    def test_adapters(self, bench, healthy: BrokenServer) -> None:
        assert bench("--adapters", 0).code == 0
        assert {body["model"] for body in healthy.asked} == {"base"}
        healthy.asked.clear()
        bench("--models", "b,a", "--law", "identical")
        assert {body["model"] for body in measured(healthy)} == {"b"}
        sweep = lines(bench("--adapters", "0,1,2", "--json"))
        assert [one["figures"]["adapters"] for one in sweep] == [0, 1, 2]

    def test_rate(self, bench) -> None:
        [done] = lines(bench("--rate", 500, "--json"))
        assert (done["settings"]["arrival"], done["settings"]["rate"]) == ("rate", 500)
        assert done["figures"]["requests"] == 4

    def test_shared_prefix(self, bench, healthy: BrokenServer) -> None:
        bench("--shared-prefix", 20, "--warmup", 0)
        assert len({tuple(body["prompt"].split()[:10]) for body in measured(healthy)}) == 1

    def test_trace(self, bench, healthy: BrokenServer, tmp_path: Path) -> None:
        # A server that was idle for an hour at first.
        write_trace(tmp_path / "t.jsonl", [TraceRequest(3600 + n / 100, 43, 2 + n, "ab"[n % 2]) for n in range(3)])
        [done] = lines(bench("--trace", tmp_path / "t.jsonl", "--warmup", 0, "--json", load=()))
        assert (done["settings"]["arrival"], done["figures"]["requests"]) == ("trace", 3)
        assert done["figures"]["wall_s"] < 600
        asked = sorted((body["model"], body["max_tokens"]) for body in measured(healthy))
        assert asked == [("a", 2), ("a", 4), ("b", 3)]

    def test_goodput(self, bench) -> None:
        for slo, share in (("ttft=1e6,tpot=1e6", 1.0), ("ttft=1e-6", 0.0)):
            figures = lines(bench("--slo", slo, "--json"))[0]["figures"]
            assert (figures["good_share"], figures["goodput_per_s"]) == (share, share * figures["requests_per_s"])

    def test_shares_of_a_measured_machine(self, bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "measure", lambda: MachineRates(1e9, 1e9, 2e9))
        [done] = lines(bench("--model-bytes", "1MB", "--model-ops", "2M", "--measure-machine", "--json"))
        figures = done["figures"]
        assert figures["mbu"] > 0
        # 43 + 4 tokens of each of 4 requests, 2M operations each.
        assert figures["mfu"] == pytest.approx(4 * 47 * 2e6 / figures["wall_s"] / 1e9, rel=1e-3)
        assert done["machine"]["measured"]["read_bytes_per_s"] == 1e9
        bare = bench("--measure-machine")
        assert "MBU is left out: the server does not report the costs of its model; give --model-bytes" in bare.err

    def test_table_and_lines(self, bench) -> None:
        done = bench("--concurrency", "1,2", "--slo", "ttft=1000")
        title, one, two, about = done.out.splitlines()
        assert title.startswith("load\tanswered\ttok/s\twith prompts\tTTFT p50/p90/p99 ms\tTPOT ms\tITL ms\tgoodput/s")
        assert one.startswith("concurrency 1, 2 adapters\t4 of 4\t")
        assert two.startswith("concurrency 2, 2 adapters\t")
        assert about == "nobody 9.9 base: 43 + 5 tokens a request, law distinct, seed 0"
        assert "concurrency 2, 2 adapters done" in done.err
        assert "MBU and MFU are left out: they need --measure-machine" in done.err

    def test_a_picture(self, bench, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        assert bench("--adapters", "0,2", "--concurrency", "1,2", "--plot", tmp_path / "b.png").code == 0
        assert (tmp_path / "b.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


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
            timeout = ("--timeout-s", 2.5) if way == "silent" else ()
            done = cli("bench", "--url", server.url, *FEW, "--warmup", 0, "--concurrency", 1, *timeout, "--json")
        figures = lines(done)[0]["figures"]
        assert (figures["requests"], figures["failed"], figures["failures"]) == (4, 2, {kind: 2})
        assert figures["first_error"].startswith(f"{kind}: ")
        assert says in figures["first_error"]
        assert figures["output_tokens_mean"] == 5, "failed requests are in no figure but their number"

    def test_the_table_tells(self, cli) -> None:
        with broken_server("500", every=2) as server:
            done = cli("bench", "--url", server.url, *FEW, "--warmup", 0, "--concurrency", 1)
        assert "\t2 of 4\t" in done.out
        assert "concurrency 1, 2 adapters: 2 failed (2 × HTTP 500); the first: HTTP 500: it burns" in done.out

    def test_no_answer(self, cli) -> None:
        with broken_server("500") as server:
            done = cli("bench", "--url", server.url, *FEW)
        says = "lorasrv: no request of concurrency 8, 2 adapters was answered: HTTP 500: it burns"
        assert (done.code, done.err.splitlines()[-1]) == (1, says)
        failed(cli("bench", "--url", "http://127.0.0.1:9", *FEW), 3, "lorasrv: no server answers at http://127.0.0.1:9")
        assert cli("bench", "--url", "nowhere").code == 2

    @pytest.mark.long
    def test_ctrl_c_prints_what_there_is(self, eventually) -> None:
        options = ("--requests", 8, "--output-tokens", 5, "--json", "--concurrency", 1, "--warmup", 0)
        with (
            broken_server("silent", every=4) as server,
            cli_process.started("bench", "--url", server.url, *options) as process,
        ):
            eventually(lambda: len(measured(server)) >= 4, 60)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=90)
        assert (process.returncode, "Traceback" in err) == (130, False)
        assert err.splitlines()[-1] == "lorasrv: interrupted; the figures are partial"
        [done] = [json.loads(line) for line in out.splitlines()]
        figures = done["figures"]
        assert (done["interrupted"], figures["requests"], figures["failed"]) == (True, 3, 0)
        assert figures["output_tok_per_s"] > 0


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        *(
            (f"--url http://127.0.0.1:9 {options}", 2, says)
            for options, says in (
                ("--concurrency 0", "--concurrency '0': write one or several integers"),
                ("--concurrency 1 --rate 2", "--concurrency and --rate exclude each other"),
                ("--rate -1", "--rate '-1'"),
                ("--law zipf", "--law 'zipf'"),
                ("--prompt-tokens many", "--prompt-tokens 'many'"),
                ("--output-tokens uniform:3", "--output-tokens 'uniform:3'"),
                ("--slo itl=3", "--slo 'itl=3'"),
                ("--models a,,b", "--models 'a,,b'"),
                ("--models a --adapters 2", "--adapters 2: --models names only 1"),
                ("--model-bytes big", "--model-bytes 'big'"),
                ("--plot nowhere/at/all.png", "--plot: the folder"),
                ("-- --policy fair", "--url and flags of serve exclude each other"),
            )
        ),
        ("fast", 2, "unexpected argument 'fast'"),
        ("-- --port=1", 2, "-- --port: the started server has its own"),
        (
            "--trace {trace} --law uniform",
            2,
            "--law and --trace exclude each other: the trace has it for each request\n",
        ),
        ("--url http://192.0.2.1:8000 --measure-machine", 2, "--measure-machine measures this machine"),
        ("--url {healthy} --models a,mia", 1, "--models: 'mia' is unknown at {healthy}; known: base, a, b\n"),
        ("--url {healthy} --trace {trace}", 1, "--trace: 'mia' is unknown at {healthy}"),
        ("--url {healthy} --adapters 3", 1, "--adapters 3: the server at {healthy} has 2\n"),
    ],
)
def test_refused(cli, healthy: BrokenServer, tmp_path: Path, options: str, code: int, says: str) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(trace, [TraceRequest(0, 1, 1, "mia")])
    names = {"healthy": healthy.url, "trace": trace}
    done = cli("bench", *options.format(**names).split())
    failed(done, code, says.format(**names))
    assert (done.err.count("\n"), done.err.startswith("lorasrv: ")) == (1, True)


def test_lorasrv_tells_what_its_model_costs(cli, server, make_adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    server.upload(make_adapter(), "mia")
    monkeypatch.setattr(probe, "measure", lambda: MachineRates(1e9, 1e9, 2e9))
    options = ("--requests", 2, "--output-tokens", 8, "--measure-machine", "--json")
    [done] = lines(cli("bench", "--url", server.url, *options))
    assert (done["server"]["name"], done["server"]["quantization"]) == ("lorasrv", "int8")
    figures = done["figures"]
    assert figures["failed"] == 0, figures["first_error"]
    # The fake engine has no weights to read, but a shape to compute.
    assert (figures["mbu"], figures["adapters"]) == (None, 1)
    assert figures["mfu"] > 0
    assert figures["prompt_tokens_mean"] == pytest.approx(64, rel=0.2)
    server.http.post("/v1/adapters", json={"id": "muse", "defaults": {"temperature": 0.5}}).raise_for_status()
    server.http.patch("/v1/adapters/mia", json={"aliases": {"prod": 1}}).raise_for_status()
    for name in ("muse", "mia:prod"):  # a persona without weights, and an alias
        [named] = lines(cli("bench", "--url", server.url, "--models", name, *options))
        assert (named["figures"]["failed"], named["figures"]["adapters"]) == (0, 1)
