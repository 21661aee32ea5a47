"""top: live on a real pseudo-terminal, plain lines when piped, and the arithmetic of its figures."""

import io
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from terminal import terminal

from api.cli.top.stats import History, Sample, quantile
from api.cli.top.view import screen
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.outputs import AdapterTier, FinishReason, RequestId, RequestOutput, RequestTiming
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams


@pytest.fixture
def busy(server, engine, make_adapter):
    """A server whose engine has answered for two adapters and the base."""
    now = SimpleNamespace(s=100.0)
    engine.request_stats = RequestStats(lambda: now.s)
    keys = {}
    for seed, name in enumerate(("mia", "tom")):
        digest = server.upload(make_adapter(name, seed=seed), name).json()["digest"]
        keys[name] = digest.removeprefix("sha256:")
    for number, (name, tokens) in enumerate((("mia", 40), ("tom", 20), ("", 10))):
        rid = RequestId(f"r{number}")
        message = EngineCoreRequest(rid, (1,), 99, SamplingParams(), adapter_key=keys.get(name), adapter_id=name)
        engine.request_stats.on_accepted([message], now.s - 0.03)
        engine.request_stats.on_output(rid, RequestOutput(rid, "x", (1,), 1, 1, RequestTiming()))
        now.s += 1.0
        engine.request_stats.on_output(
            rid, RequestOutput(rid, "x", (1,), 1, tokens, RequestTiming(), finish_reason=FinishReason.STOP)
        )
    return server


async def gone(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


class TestLive:
    def test_what_is_seen(self, busy, engine, dispatcher) -> None:
        with terminal("top", "--interval", 0.2, "--server", busy.url, columns=120) as seen:
            text = seen.until("lorasrv top  tiny-base", "hottest", "mia", "tom", "tokens/s", "of 10 pages")
            assert "░ free 10" in text
            assert "first token 35 ms" in text
            assert text.index("mia") < text.index("tom")
            hot = [line.split() for line in seen.lines if line.startswith(("mia", "tom", "tiny-base "))]
            assert [row[:2] for row in hot] == [["mia", "resident"], ["tom", "resident"], ["tiny-base", "base"]]
            assert hot[0][3:] == ["1", "40"]
            app, dispatcher[0].app = dispatcher[0].app, gone
            seen.until("the server answered 503", "trying again", "hottest")
            dispatcher[0].app = app
            seen.until_without("trying again")
            engine.reached = SimpleNamespace(tier=AdapterTier.DISK, load_ms=0.0)
            seen.until_without("resident")
            seen.resize(50, 14)
            seen.until("hottest")
            assert all(len(line) <= 50 for line in seen.lines)
            seen.send("q")
            assert seen.end() == 0
            assert "Traceback" not in seen.text

    @pytest.mark.parametrize(
        ("columns", "lines"),
        [(20, 8), pytest.param(40, 12, marks=pytest.mark.long), pytest.param(200, 50, marks=pytest.mark.long)],
    )
    def test_any_size(self, busy, columns: int, lines: int) -> None:
        with terminal("top", "--interval", 0.2, "--server", busy.url, columns=columns, lines=lines) as seen:
            seen.until("lorasrv top", "tokens/s")
            seen.interrupt()
            assert seen.end() == 130
            assert "Traceback" not in seen.raw.decode()

    def test_nobody_there(self) -> None:
        with terminal("top", "--server", "http://127.0.0.1:1") as seen:
            assert seen.end() == 3
            assert "lorasrv: no server answers at http://127.0.0.1:1" in seen.text


class TestPiped:
    def test_a_line_a_look(self, cli, busy) -> None:
        done = cli("top", "--count", 2, "--interval", 0.1, "--server", busy.url)
        first, second = (dict(cell.split("=") for cell in line.split()[1:]) for line in done.out.splitlines())
        assert (done.code, done.err) == (0, "")
        assert first["pages_free"] == "100%"
        assert first["hottest"].startswith("mia:")
        assert (first["first_token_p50_ms"], first["steps_per_s"], second["steps_per_s"]) == ("35.0", "-", "0.0")

    def test_once(self, cli, busy) -> None:
        assert cli("top", "--once", "--server", busy.url).out.count("\n") == 1

    def test_json_and_a_server_that_goes_and_comes(self, busy, dispatcher) -> None:
        command = [sys.executable, "-c", "from api.cli.main import main; main()"]
        flags = ["top", "--json", "--interval", "0.1", "--server", busy.url]
        process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            app, dispatcher[0].app = dispatcher[0].app, gone
            while (down := json.loads(process.stdout.readline()))["up"]:
                pass
            dispatcher[0].app = app
            while not (again := json.loads(process.stdout.readline()))["up"]:
                pass
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert "503" in down["error"]
        assert set(first) == set(again)
        assert [hot["id"] for hot in first["hottest"]] == ["mia", "tom", "tiny-base"]
        assert first["pages"] == {"total": 10, "kv": 0, "prefix": 0, "adapters": 0, "free": 10}
        assert process.returncode == 130
        assert err.count("trying again") == 1


class TestFigures:
    def sample(self, time_s: float, tokens: float, buckets: tuple[float, float, float], **more: float) -> Sample:
        metrics = {"lorasrv_generated_tokens_total": tokens, "lorasrv_steps_total": tokens, **more}
        for bound, count in zip(("0.1", "0.2", "+Inf"), buckets, strict=True):
            metrics[f'lorasrv_time_to_first_token_seconds_bucket{{le="{bound}"}}'] = count
        pages = {f"pages_{part}": 1 for part in ("total", "kv", "prefix", "adapters", "free")}
        return Sample(time_s, metrics, {**pages, "traffic": {"tokens_per_s": 5.5, "hottest": []}})

    def test_rates_are_differences(self) -> None:
        history = History()
        first = history.add(self.sample(0.0, 100, (0, 0, 0)))
        assert first["rates"]["output_tokens_per_s"] == 5.5, "what the server says of the last seconds"
        assert first["latency_ms"]["first_token"] is None
        assert history.add(self.sample(2.0, 130, (0, 0, 0)))["rates"]["output_tokens_per_s"] == 15.0

    def test_a_server_that_was_restarted(self) -> None:
        history = History()
        history.add(self.sample(0.0, 100, (0, 0, 0)))
        assert history.add(self.sample(2.0, 3, (0, 0, 0)))["rates"]["steps_per_s"] is None

    def test_latencies_are_those_of_the_last_minute(self) -> None:
        history = History()
        assert history.add(self.sample(0.0, 1, (10, 10, 10)))["latency_ms"]["first_token"]["p50"] == 50.0
        later = history.add(self.sample(50.0, 2, (10, 20, 20)))["latency_ms"]["first_token"]
        assert later == {"p50": 150.0, "p95": 195.0}
        assert history.add(self.sample(100.0, 2, (10, 20, 24)))["latency_ms"]["first_token"]["p50"] == 200.0
        assert len(history.samples) == 2

    def test_quantiles(self) -> None:
        inf = float("inf")
        assert quantile({1.0: 0.0, 2.0: 4.0, inf: 4.0}, 0.25) == 1.25
        assert quantile({1.0: 0.0, 2.0: 0.0, inf: 4.0}, 0.5) == 2.0, "longer than the last bound: at least that"

    @pytest.mark.parametrize("width", [1, 9, 33, 80, 300])
    @pytest.mark.parametrize("pages", [(0, 0, 0, 0), (1, 1, 1, 997), (400, 300, 300, 0), (0, 0, 1000, 0)])
    def test_the_bar_is_as_wide_as_the_screen(self, width: int, pages: tuple[int, ...]) -> None:
        from api.cli.top.view import SMALL_BAR, _bar

        parts = dict(zip(("kv", "prefix", "adapters", "free"), pages, strict=True))
        bar = _bar({"total": sum(pages), **parts}, width)
        assert len(bar.plain) == max(SMALL_BAR, width - 1)
        if width > 33:
            assert {char for char in "█▓▒" if char in bar.plain} == {
                char for char, part in zip("█▓▒", parts, strict=False) if parts[part]
            }

    def test_ids_are_no_markup(self) -> None:
        from rich.console import Console

        history = History()
        sample = self.sample(0.0, 1, (0, 0, 0))
        hot = {"id": "[red]x[/red]", "tier": "disk", "requests": 1, "tokens": 2, "tokens_per_s": 3.0}
        sample.pool["traffic"]["hottest"].append(hot)
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(screen(history.add(sample), "t", None, 100, 30))
        assert "[red]x[/red]  disk" in console.export_text()
