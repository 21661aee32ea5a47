"""docs/security.md against the code: its table of routes, the tests that it names, and what it says is nowhere."""

import re
from pathlib import Path

from api.auth.scopes import NEEDS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
PACKAGES = ("api", "lorasrv", "adapter_store", "sgmv_kernels")
SENDERS = re.compile(
    r"^\s*(?:import|from) (httpx2?|requests|aiohttp|urllib3|urllib\.request|http\.client|ftplib)\b", re.M
)
# Commands that ask a server, on the machine of whoever types them.
# The last asks the registry that its operator named.
# What asks servers whose addresses come with the cluster's secret.
PEERS = {"api/replication/page_client.py"}
CLIENTS = {"api/client.py", "api/batches/remote.py", "api/replication/registry_client.py"}
FETCHERS = re.compile(r"\b(?:hf_hub_download|snapshot_download|from_hub|create_connection|open_connection)\b")
UNSAFE = re.compile(r"\b(?:torch\.load|allow_pickle=True|marshal\.loads?|shelve|cloudpickle|joblib|np\.load)\b")


def sources() -> dict[str, str]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def table() -> str:
    """The page's lines of `NEEDS`: `python -c "from tests.api.auth.test_scopes import table; print(table())"`."""
    rows: dict[str, list[str]] = {}
    for (method, path), scopes in NEEDS.items():
        rows.setdefault(" or ".join(sorted(scopes)), []).append(f"`{method} {path}`")
    return "\n".join(f"| {', '.join(routes)} | `{scope.replace(' or ', '` or `')}` |" for scope, routes in rows.items())


def test_the_table_is_the_codes() -> None:
    assert table() in PAGE


def test_every_test_that_is_named_is_there() -> None:
    for name, parts in re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)*)", PAGE):
        text = (ROOT / name).read_text("utf-8")
        for part in filter(None, parts.split("::")):
            assert re.search(rf"^\s*(?:def|class) {part}\b", text, re.M), (name, part)


def test_nothing_is_fetched() -> None:
    """No module that serves can send a request to an address that a client gives."""
    found = {path for path, text in sources().items() if SENDERS.search(text)}
    assert found == CLIENTS | PEERS
    # The edge, which asks its own replicas; the operator's own base, when the server starts: what opens it is not asked
    # by any route; and the load client, a command.
    known = {"api/cluster/upstream.py", "lorasrv/models/loader/locate.py", "api/cli/bench/connections.py"}
    assert {path for path, text in sources().items() if FETCHERS.search(text)} == known
    opens = re.compile(r"\blorasrv\.models\.loader\b")
    assert [path for path, text in sources().items() if path.startswith("api/routes/") and opens.search(text)] == []
    importers = re.compile(r"^(?:from|import) api\.(?:client|batches\.remote|cli)\b", re.M)
    serving = {path for path in sources() if path.startswith("api/") and not path.startswith("api/cli/")}
    # At their tops; the file of batches that asks a server is for the command.
    assert {path for path in serving if importers.search(sources()[path])} <= {"api/batches/remote.py"}


def test_nothing_is_unpickled() -> None:
    assert [path for path, text in sources().items() if UNSAFE.search(text)] == []
