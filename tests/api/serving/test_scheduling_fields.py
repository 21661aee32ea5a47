"""What a request says about its turn, and what it hears when its turn does not come."""

from typing import Any

import pytest

from lorasrv.errors import DeadlineUnreachable, InvalidRequest, LimitExceeded, RequestTimeout


@pytest.fixture(params=["chat", "complete"])
def ask(request, server) -> Any:
    return getattr(server, request.param)


class TestWhatReachesTheEngine:
    @pytest.mark.parametrize("stream", [True, False])
    def test_priority_and_timeout(self, ask, engine, stream: bool) -> None:
        assert ask(priority=-7, timeout_s=2.5, stream=stream).status_code == 200
        [added] = engine.added
        assert (added.priority, added.timeout_s) == (-7, 2.5)

    @pytest.mark.parametrize("fields", [{}, {"priority": None, "timeout_s": None}, {"priority": 0}])
    def test_usually(self, ask, engine, fields: dict[str, Any]) -> None:
        assert ask(**fields).status_code == 200
        assert [(added.priority, added.timeout_s) for added in engine.added] == [(0, None)]

    def test_seconds_may_be_whole(self, ask, engine) -> None:
        assert ask(timeout_s=3).status_code == 200
        assert engine.added[0].timeout_s == 3

    def test_whose_request_it_is(self, ask, server, engine, make_adapter) -> None:
        """The id, whatever version was asked for: limits are the id's."""
        for seed in (1, 2):
            server.upload(make_adapter(str(seed), seed=seed), "mia")
        for model in ("mia", "mia@1", "tiny-base"):
            assert ask(model=model).status_code == 200
        assert ask(adapter_id="mia@2").status_code == 200
        assert [added.adapter_id for added in engine.added] == ["mia", "mia", "", "mia"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("error", "status", "code", "param", "retry_after", "retry"),
        [
            (LimitExceeded("'mia' has 2 waiting", retry_after_s=2.4), 429, "limit_exceeded", None, "3", None),
            (DeadlineUnreachable("9 s", retry_after_s=0.1), 503, "deadline_unreachable", "timeout_s", "1", None),
            (RequestTimeout("5 s are over"), 504, "timeout", "timeout_s", None, "false"),
            (InvalidRequest("out of range", param="priority"), 400, "invalid_value", "priority", None, None),
        ],
    )
    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("late", [True, False])
    def test_before_anything_was_said(
        self, ask, engine, error: Exception, status: int, code: str, param: str, retry_after, retry, stream, late
    ) -> None:
        """At the gate, or in the queue: both keep their status, also if a stream was asked for."""
        if late:
            engine.breaks(0, error)
        else:
            engine.add_error = error
        response = ask(stream=stream, timeout_s=5)
        said = response.json()["error"]
        assert (response.status_code, said["code"], said["param"]) == (status, code, param)
        assert said["message"] == str(error)
        assert said["type"] == {429: "rate_limit_error", 400: "invalid_request_error"}.get(status, "server_error")
        assert response.headers.get("retry-after") == retry_after
        assert response.headers.get("x-should-retry") == retry

    def test_in_the_middle_of_an_answer(self, ask, engine) -> None:
        engine.breaks(2, RequestTimeout("5 s are over"))
        whole = ask(timeout_s=5)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
        assert "choices" not in whole.json()

    def test_in_the_middle_of_a_stream(self, ask, engine) -> None:
        engine.breaks(2, RequestTimeout("5 s are over"))
        streamed = ask(stream=True, timeout_s=5)
        assert streamed.status_code == 200
        *pieces, last, done = streamed.text.strip().split("\n\n")
        assert '"e"' in pieces[-1]
        assert done == "data: [DONE]"
        assert last == (
            'data: {"error":{"message":"5 s are over","type":"server_error","param":"timeout_s","code":"timeout"}}'
        )
        assert 'finish_reason":"' not in streamed.text
