"""Measure the CPU time of metrics, logs and the usage ledger: of each call, the best of several runs.

python tests/benchmarks/bench_observing.py
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from harness import arguments, table

from adapter_store.spec import AdapterKey
from api.observability.access_log import request_logger
from api.observability.access_middleware import RequestInfo
from api.observability.logs import written
from api.observability.metrics.requests import HttpFigures, TopAdapters
from lorasrv.metrics.request_stats import FinishedRequestStats, RequestStats
from lorasrv.metrics.step_stats import StepStats
from lorasrv.metrics.usage_ledger import Ledger
from lorasrv.outputs import AdapterTier, FinishReason, RequestId, RequestOutput, RequestTiming
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput

RUNS, CALLS = 7, 2000
KEY = AdapterKey("k" * 64)
ENDED = FinishedRequestStats(
    *("r", "mia", KEY, "p", FinishReason.STOP, "", 0.0, 2.0, 10),
    cached_tokens=4,
    generated_tokens=5,
    steps=5,
    queue_s=0.1,
    load_s=0.2,
    first_token_s=0.5,
    tier=AdapterTier.RESIDENT,
    account=("mia", KEY),
)


def best_us(call: Callable[[], object]) -> float:
    """Return the microseconds of CPU time of a call."""
    seconds = []
    for _ in range(RUNS):
        begun = time.process_time()
        for _ in range(CALLS):
            call()
        seconds.append(time.process_time() - begun)
    return 1e6 * min(seconds) / CALLS


def of_steps(rows: int) -> float:
    book = StepStats()
    names = [(f"a{n}", AdapterKey(f"k{n}")) for n in range(rows)]
    asked = ((1,), 0, ()), (True, SamplingParams(), 1)
    requests = tuple(
        ScheduledRequest(RequestId(name), *asked[0], key, *asked[1], account=(name, key)) for name, key in names
    )
    keys: Any = {scheduled.adapter_key: None for scheduled in requests}
    step = SchedulerOutput(requests, keys, (), AdapterOrders(), 0)
    return best_us(lambda: book.on_step_computed(step, 0.01))


def of_outputs() -> float:
    traffic, rid = RequestStats(), RequestId("a")
    traffic.on_accepted([EngineCoreRequest(rid, (1,), 9, SamplingParams(), adapter_id="mia")], 0.0)
    outputs = iter([RequestOutput(rid, "", (), 1, n, RequestTiming()) for n in range(1, RUNS * CALLS + 2)])
    return best_us(lambda: traffic.on_output(rid, next(outputs)))


def of_ends() -> float:
    with tempfile.TemporaryDirectory() as folder:
        engine = SimpleNamespace(request_stats=RequestStats(), book=StepStats())
        ledger, top = Ledger(cast(Any, engine), cast(Any, None), Path(folder)), TopAdapters(50)
        listeners = ledger.on_request_finished, top.on_request_finished
        return best_us(lambda: [listener(ENDED) for listener in listeners])


def of_requests() -> dict[str, float]:
    seen = RequestInfo({"method": "POST", "path": "/v1/completions", "headers": [], "state": {"request_id": "req-1"}})
    seen.answers.append(ENDED)
    seen.status = 200
    seen.on_response_ended(lambda: None)
    log, figures = request_logger(), HttpFigures()
    found = {"figures by route": best_us(lambda: figures.on_response_ended(seen))}
    with open(os.devnull, "w") as nowhere:
        for shape, level in (("json", "info"), ("text", "info"), ("json", "warning")):
            with written(shape, level, nowhere):
                found[f"log line, {shape}, {level}"] = best_us(lambda: log(seen))
    return found


def main() -> None:
    arguments(__doc__)
    found = {
        "engine: a step of 1 request": of_steps(1),
        "engine: a step of 64 requests": of_steps(64),
        "event loop: an output": of_outputs(),
        "event loop: end of a request, ledger and busiest adapters": of_ends(),
        **{f"event loop: a request, {name}": value for name, value in of_requests().items()},
    }
    table(("operation", "µs of CPU"), found.items())


if __name__ == "__main__":
    main()
