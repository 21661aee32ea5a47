"""Values that a route does not take: refused by name, before anything of the request is done."""

from itertools import groupby

import pytest
from answers import refused
from fake_engine import FakeEngine
from refused_fields import ROUTES, TGI, Row
from spelled_engine import tiny_tokenizer

FIELDS = [
    pytest.param(route, list(rows), id=f"{route} {param}")
    for route, (_, table) in ROUTES.items()
    for param, rows in groupby(sorted(table, key=lambda row: row[1] or ""), key=lambda row: row[1])
]


@pytest.mark.parametrize(("route", "rows"), FIELDS)
def test_it_is_refused_by_name(server, engine: FakeEngine, make_adapter, route: str, rows: list[Row]) -> None:
    (method, path), (body, table) = route.split(), ROUTES[route]
    engine.tokenizer = tiny_tokenizer()
    if "/mia" in path:
        for seed in (1, 2):
            server.upload(make_adapter(str(seed), seed=seed), "mia").raise_for_status()
    for fields, param, says in rows:
        if table is TGI:
            outside = {"stream": True} if "stream" in fields else {}
            inside = {name: value for name, value in fields.items() if name not in outside}
            refused(server.http.post(path, json=body | outside | {"parameters": inside}), 422, param, *says)
        else:
            refused(server.http.request(method, path, json=body | fields), 400, param, *says)
        assert (engine.added, engine.asked, engine.limits) == ([], [], {}), fields
        if "/mia" in path:
            shown = server.http.get("/v1/adapters/mia").json()
            assert (shown["version"], shown["aliases"], shown["limits"], shown["verified"]) == (2, {}, {}, None), fields
