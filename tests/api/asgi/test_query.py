"""Pages of /v1/adapters and /v1/models: complete by default, each continues the one before."""

from typing import Any

import pytest

NAMES = ("a1", "a2", "b1", "b2", "c1")


@pytest.fixture
def full(server: Any, make_adapter: Any) -> Any:
    for name in NAMES:
        server.upload(make_adapter(), name)
    return server


def ids(server: Any, route: str, **query: Any) -> list[str]:
    return [entry["id"] for entry in server.http.get(f"/v1/{route}", params=query).json()["data"]]


@pytest.mark.parametrize(("route", "first"), [("adapters", []), ("models", ["tiny-base"])])
def test_pages(full, route: str, first: list[str]) -> None:
    everything = [*first, *NAMES]
    assert ids(full, route) == everything
    for limit in range(1, len(everything) + 2):
        pages, after = [], {}
        while True:
            body = full.http.get(f"/v1/{route}", params={"limit": limit, **after}).json()
            pages += [entry["id"] for entry in body["data"]]
            assert len(body["data"]) <= limit
            if not body["has_more"]:
                break
            after = {"after": pages[-1]}
        assert pages == everything


def test_search(full) -> None:
    assert ids(full, "adapters", search="B") == ["b1", "b2"]
    assert ids(full, "adapters", search="1", after="a1") == ["b1", "c1"]
    assert ids(full, "models", search="1", after="a1", limit=1) == ["b1"]
    assert ids(full, "adapters", search="tiny") == []
    assert ids(full, "models", search="tiny") == ["tiny-base"]
    assert ids(full, "models", search="2") == ["a2", "b2"]


def test_a_page_after_an_id_that_is_gone(full) -> None:
    full.http.delete("/v1/adapters/b1")
    for route in ("adapters", "models"):
        assert ids(full, route, after="b1") == ["b2", "c1"]
        assert ids(full, route, after="zzz") == []


@pytest.mark.parametrize("limit", ["0", "-1", "many", "100001"])
def test_limits(server, limit: str) -> None:
    for route in ("adapters", "models"):
        response = server.http.get(f"/v1/{route}", params={"limit": limit})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")
