"""Several observers as one: told in their order, and one that fails keeps nothing from the others."""

import pytest

from lorasrv.metrics.request_observer import RequestObserver, RequestObservers
from lorasrv.outputs import RequestId, RequestOutput, RequestTiming
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams

RID = RequestId("a")
REQUEST = EngineCoreRequest(RID, (1,), 1, SamplingParams())
OUTPUT = RequestOutput(RID, "x", (1,), 1, 1, RequestTiming())


class Notes(RequestObserver):
    """Writes down what it is told, and then fails if it is to."""

    def __init__(self, told: list[tuple[object, ...]], name: str, *, fails: bool = False) -> None:
        self._told, self._name, self._fails = told, name, fails

    def on_accepted(self, *news: object) -> None:
        self._note("accepted", *news)

    def on_output(self, *news: object) -> None:
        self._note("output", *news)

    def on_finished(self, *news: object) -> None:
        self._note("finished", *news)

    def on_refused(self, *news: object) -> None:
        self._note("refused", *news)

    def _note(self, *news: object) -> None:
        self._told.append((self._name, *news))
        if self._fails:
            raise ZeroDivisionError


def test_each_is_told_of_everything_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[object, ...]] = []
    error = ValueError()
    observers = RequestObservers([Notes(told, "first", fails=True), RequestObserver(), Notes(told, "second")])
    observers.on_accepted([REQUEST], 7.0)
    observers.on_output(RID, OUTPUT)
    observers.on_finished(RID, "client")
    observers.on_refused(error)
    news = [("accepted", [REQUEST], 7.0), ("output", RID, OUTPUT), ("finished", RID, "client"), ("refused", error)]
    assert told == [(name, *each) for each in news for name in ("first", "second")]
    assert caplog.text.count("was not recorded") == 4
