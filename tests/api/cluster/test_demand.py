"""What ties a request to a replica, as clients of each protocol write it."""

import json
from typing import Any

import pytest

from api.cluster.demand import adapter_of, read_demand
from lorasrv.placement.work import WorkEstimator, WorkRates

RATES = WorkRates(prompt_token_s=1.0, answer_token_s=100.0)
CHAT: dict[str, Any] = {"messages": [{"role": "system", "content": "s" * 200}, {"role": "user", "content": "u" * 200}]}


async def ask(fields: Any, path: str = "/v1/chat/completions", session: str | None = None) -> Any:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return await read_demand(path, session, body, {"base"}, WorkEstimator(RATES))


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"model": "mia"}, "mia"),
        ({"model": "mia:prod"}, "mia"),
        ({"model": "mia@3"}, "mia"),
        ({"model": "mia@sha256:abc"}, "mia"),
        ({"model": "base"}, None),
        ({"model": "base", "adapter_id": "mia"}, "mia"),
        ({"parameters": {"adapter_id": "mia"}}, "mia"),
        ({"model": "tom+0.5*mia:prod"}, "mia+tom"),
        ({"model": "mia+0.7*tom@2"}, "mia+tom"),
        ({"model": "base", "adapters": [{"id": "tom", "weight": 2}, {"id": "mia@1"}]}, "mia+tom"),
        ({"adapters": [{"id": name} for name in "badcxyz"]}, "a+b+c+d"),
        ({"model": "+"}, "+"),
        ({"model": 3}, None),
        ({"model": ""}, None),
        ({"adapters": [3, {}]}, ""),
        ([], None),
        (b"{", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
async def test_the_adapter(fields: Any, key: str | None) -> None:
    assert (await ask(fields)).adapter_id == key


async def test_the_adapter_that_is_warmed() -> None:
    assert (await ask(b"", "/v1/adapters/mia@3:warm")).adapter_id == "mia"


async def test_the_session() -> None:
    assert (await ask({**CHAT, "user": "u1"}, session="s1")).session == "s1"
    assert (await ask({**CHAT, "user": "u1"})).session == "user u1"
    assert (await ask(CHAT)).session == "s" * 200 + "u" * 56
    turn = {"role": "user", "content": "more"}
    assert (await ask({"messages": [*CHAT["messages"], turn]})).session == "s" * 200 + "u" * 56, "the next turn, too"
    assert (await ask({"prompt": "x" * 300})).session == "x" * 256
    assert (await ask({"inputs": "x"}, "/generate")).session == "x"
    assert (await ask({"prompt": list(range(1000))})).session.startswith("[0, 1, ")
    assert (await ask({"messages": [3, {"content": None}, {"content": [{"type": "text"}]}]})).session
    assert (await ask({})).session is None


async def test_the_work() -> None:
    """Length of the body in tokens, and at most what is asked for."""
    short = await ask({"model": "mia", "prompt": "x" * 4000, "max_tokens": 2})
    assert short.work_s == pytest.approx(1000 + 200, rel=0.05)
    usual = await ask({"model": "mia", "prompt": "x" * 4000})
    assert usual.work_s == pytest.approx(1000 + 12800, rel=0.05)
    assert (await ask({"parameters": {"max_new_tokens": 1}}, "/generate")).work_s < 200


def test_a_body_of_any_kind_is_no_error() -> None:
    assert adapter_of({"adapters": {}}, ()) is None
