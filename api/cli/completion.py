"""Adapter ids for a shell that completes a command: from the server, at once or not at all."""

from typing import Any

from api.address import DEFAULT_SERVER

WAIT_S = 1.0
"""A shell waits for this; nobody presses Tab to read an error."""
MOST = 200


def complete_adapter_ids(ctx: Any, incomplete: str) -> list[str]:
    """Ids that begin so; none if the server is not there, is slow, or refuses."""
    try:
        found = _ids(ctx.params.get("server"), ctx.params.get("api_key"), incomplete)
    except Exception:
        return []
    return [adapter_id for adapter_id in found if adapter_id.startswith(incomplete)]


def _ids(server: str | None, key: str | None, incomplete: str) -> list[str]:
    import os

    from api.client import Client
    from api.config_file import client_options

    configured = client_options()
    url = server or os.environ.get("LORASRV_SERVER") or configured.get("server") or DEFAULT_SERVER
    key = key or os.environ.get("LORASRV_API_KEY") or configured.get("api_key")
    with Client(url, key, wait_s=WAIT_S) as client:
        found = client.get("/v1/adapters", search=incomplete, limit=MOST)["data"]
    return [str(adapter["id"]) for adapter in found]
