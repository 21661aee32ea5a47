"""Requests beside the event loop: the time that a header takes, and one that does not come."""

import asyncio
import threading
import time

import pytest
from bare_processor import KEY, PROMPT, RID, SMALL, Adapters, processor

from lorasrv.engine.async_input_processor import AsyncInputProcessor
from lorasrv.errors import AdapterLoadTimeout, InvalidRequest, RequestTimeout
from lorasrv.request import EngineCoreRequest, RequestOptions
from lorasrv.sampling_params import SamplingParams


def process(
    adapters: Adapters, timeout_s: float | None, queue_s: float | None = None, load_s: float | None = None
) -> EngineCoreRequest:
    made = AsyncInputProcessor(processor(adapters=adapters), adapters, queue_s, load_s)
    options = RequestOptions(adapter_key=KEY, timeout_s=timeout_s)
    try:
        return asyncio.run(made.process_choices([RID], PROMPT, SamplingParams(), options))[0]
    finally:
        made.close()


def test_time_spent_on_a_header_is_the_requests_own() -> None:
    adapters = Adapters(SMALL)
    adapters.is_known, adapters.delay = False, lambda: time.sleep(0.05)
    request = process(adapters, 30.0)
    assert request.timeout_s is not None
    assert 0 < request.timeout_s <= 30.0 - 0.04
    adapters.is_known = True
    request = process(adapters, 30.0)
    assert request.timeout_s == 30.0, "a layout that is known is not waited for"


@pytest.mark.parametrize(
    ("own_s", "queue_s", "words"),
    [(0.01, None, r"timeout_s, 0\.01 s"), (5.0, 0.01, r"queue timeout of 0\.01 s"), (None, 0.01, "queue timeout")],
)
def test_a_header_that_does_not_come(own_s: float | None, queue_s: float | None, words: str) -> None:
    go_on = threading.Event()
    adapters = Adapters(SMALL)
    adapters.is_known, adapters.delay = False, lambda: go_on.wait(30)
    with pytest.raises(RequestTimeout, match=words):
        process(adapters, own_s, queue_s)
    go_on.set()


def test_a_header_that_does_not_come_is_told_by_its_place() -> None:
    go_on = threading.Event()
    adapters = Adapters(SMALL)
    adapters.is_known, adapters.delay = False, lambda: go_on.wait(30)
    with pytest.raises(AdapterLoadTimeout, match=rf"^{adapters.place} did not return the adapter within 0\.01 s"):
        process(adapters, None, load_s=0.01)
    go_on.set()


def test_a_time_that_is_none_is_refused_as_such() -> None:
    adapters = Adapters(SMALL)
    adapters.is_known = False
    with pytest.raises(InvalidRequest, match="timeout_s must be above 0"):
        process(adapters, -1.0)
