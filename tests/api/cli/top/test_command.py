"""top: live on a real pseudo-terminal, plain lines when piped, and the arithmetic of its figures."""

import io
import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import cli_process
import pytest
from clock import Clock
from fake_apps import always
from rich.console import Console
from terminal import terminal

from api.cli.top.stats import History, Sample, quantile
from api.cli.top.view import SMALL_BAR, _bar, screen
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.outputs import AdapterTier, FinishReason, RequestId, RequestOutput, RequestTiming
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams


@pytest.fixture
def busy(server, engine, make_adapter):
    """A server whose engine has answered for two adapters and the base."""
    now = Clock(100.0)
    engine.request_stats = RequestStats(now)
    for number, (name, tokens) in enumerate((("mia", 40), ("tom", 20), ("", 10))):
        rid = RequestId(f"r{number}")
        key = server.upload(make_adapter(name, seed=number), name).json()["digest"][7:] if name else None
        message = EngineCoreRequest(rid, (1,), 99, SamplingParams(), adapter_key=key, adapter_id=name)
        first = RequestOutput(rid, "x", (1,), 1, 1, RequestTiming())
        engine.request_stats.on_accepted([message], now.now - 0.03)
        engine.request_stats.on_output(rid, first)
        now.now += 1.0
        last = replace(first, num_generated_tokens=tokens, finish_reason=FinishReason.STOP)
        engine.request_stats.on_output(rid, last)
        engine.request_stats.on_finished(rid)
    return server


GONE = always(503, b"{}")


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
            app, dispatcher[0].app = dispatcher[0].app, GONE
            seen.until("the server answered 503", "trying again", "hottest")
            dispatcher[0].app = app
            seen.until_without("trying again")
            engine.reached = SimpleNamespace(tier=AdapterTier.DISK, load_ms=0.0)
            seen.until_without("resident")
            seen.resize(50, 18)
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

    def test_no_server_answers(self) -> None:
        with terminal("top", "--server", "http://127.0.0.1:1") as seen:
            assert (seen.end(), "lorasrv: no server answers at http://127.0.0.1:1" in seen.text) == (3, True)


class TestPiped:
    def test_lines(self, run, busy) -> None:
        done = run("top", "--count", 2, "--interval", 0.1)
        first, second = (dict(cell.split("=") for cell in line.split()[1:]) for line in done.out.splitlines())
        assert (done.code, done.err) == (0, "")
        assert (first["pages_free"], first["hottest"][:4]) == ("100%", "mia:")
        assert (first["first_token_p50_ms"], first["steps_per_s"], second["steps_per_s"]) == ("35.0", "-", "0.0")
        assert run("top", "--once").out.count("\n") == 1

    def test_json_and_a_server_that_goes_and_comes(self, busy, dispatcher) -> None:
        with cli_process.started("top", "--json", "--interval", "0.1", "--server", busy.url) as process:
            told = map(json.loads, process.stdout)
            first = next(told)
            app, dispatcher[0].app = dispatcher[0].app, GONE
            down = next(one for one in told if not one["up"])
            dispatcher[0].app = app
            again = next(one for one in told if one["up"])
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert "503" in down["error"]
        assert set(first) == set(again)
        assert [hot["id"] for hot in first["hottest"]] == ["mia", "tom", "tiny-base"]
        assert first["pages"] == {"total": 10, "kv": 0, "prefix": 0, "adapters": 0, "free": 10}
        assert (process.returncode, err.count("trying again")) == (130, 1)


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
        restarted = history.add(self.sample(4.0, 3, (0, 0, 0)))
        assert restarted["rates"]["steps_per_s"] is None

    def test_a_restart_is_seen_though_many_steps_followed(self) -> None:
        """Of two samples that are long apart: some counter is behind, if not that of the steps."""
        history = History()
        history.add(self.sample(0.0, 100, (10, 20, 20), lorasrv_steps_total=50))
        again = history.add(self.sample(60.0, 90, (0, 9, 9), lorasrv_steps_total=70))
        assert again["rates"]["output_tokens_per_s"] == 5.5, "what the server says of the last seconds"
        assert again["rates"]["steps_per_s"] is None
        assert again["latency_ms"]["first_token"]["p50"] == 150.0
        assert len(history.samples) == 1

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
        parts = dict(zip(("kv", "prefix", "adapters", "free"), pages, strict=True))
        bar = _bar({"total": sum(pages), **parts}, width)
        assert len(bar.plain) == max(SMALL_BAR, width - 1)
        if width > 33:
            drawn = {char for char in "█▓▒" if char in bar.plain}
            assert drawn == {char for char, part in zip("█▓▒", parts, strict=False) if parts[part]}

    @pytest.mark.parametrize("width", [80, 100])
    def test_nothing_is_cut_off_on_a_busy_server(self, width: int) -> None:
        from rich.console import Console

        metrics = dict.fromkeys((f"lorasrv_{name}" for name in ("generated_tokens_total", "steps_total")), 1e6)
        names = ("requests_running", "requests_waiting", "requests_waiting_for_adapter", "adapters_arriving")
        metrics |= {f"lorasrv_{name}": 4096.0 for name in names} | {"lorasrv_host_cache_bytes": 2.0**35}
        for name in ("time_to_first_token", "inter_token", "e2e"):
            metrics[f'lorasrv_{name}_seconds_bucket{{le="+Inf"}}'] = metrics[
                f'lorasrv_{name}_seconds_bucket{{le="9.9"}}'
            ] = 100.0
        hot = {"id": "a" * 20, "tier": "resident", "requests": 10**6, "tokens": 10**9, "tokens_per_s": 1e4}
        pages = {f"pages_{part}": 14_457 for part in ("total", "kv", "prefix", "adapters", "free")}
        sample = Sample(0.0, metrics, {**pages, "traffic": {"tokens_per_s": 1e4, "hottest": [hot] * 9}})
        console = Console(width=width, height=20, record=True, file=io.StringIO())
        console.print(screen(History().add(sample), "t", None, width, 20))
        lines = console.export_text().splitlines()
        assert [line for line in lines if "…" in line or len(line) > width] == []
        text = " ".join(lines)
        assert all(
            part in text for part in ("4096 for an adapter", "answer 4950 ms (p95 9405 ms)", "0 evicted", "of 14457")
        )
        assert 17 <= len(lines) <= 20, "the busiest adapters fill the rest"

    def test_ids_are_no_markup(self) -> None:
        history = History()
        sample = self.sample(0.0, 1, (0, 0, 0))
        hot = {"id": "[red]x[/red]", "tier": "disk", "requests": 1, "tokens": 2, "tokens_per_s": 3.0}
        sample.pool["traffic"]["hottest"].append(hot)
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(screen(history.add(sample), "t", None, 100, 30))
        assert "[red]x[/red]  disk" in console.export_text()
