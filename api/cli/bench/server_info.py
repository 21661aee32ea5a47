"""Read a server's description: models, version, and the costs of its model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapter_store.registry.references import parse_reference
from api.cli.bench.roofline import Work
from api.client import Client, Refused, ServerUnreachable

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Served:
    """Describe a server."""

    # `lorasrv`, or the name that the server reports.
    name: str
    # None if not reported.
    version: str | None
    # The first model that is not an adapter.
    base: str
    adapters: tuple[str, ...]
    # Response of /info of a lorasrv server; empty for others.
    info: Mapping[str, Any]

    def to_dict(self) -> dict[str, object]:
        reported = {name: self.info[name] for name in ("quantization", "model_dtype") if name in self.info}
        return {"name": self.name, "version": self.version, "base": self.base, **reported}


def read_server_info(client: Client) -> Served:
    """Read the description.

    Raises:
        ServerUnreachable: the server does not respond, or lists no models.
        Refused: the server refuses the request.
    """
    cards = client.models()
    if not cards:
        raise ServerUnreachable(f"the server at {client.url} lists no models at /v1/models")
    # Servers with adapters report each adapter's parent.
    adapters = tuple(str(card["id"]) for card in cards if card.get("parent"))
    bases = [str(card["id"]) for card in cards if not card.get("parent")]
    base = bases[0] if bases else str(cards[0]["id"])
    info = _optional(client, "/info")
    if info.get("router") == "lorasrv":
        return Served("lorasrv", str(info["version"]), base, adapters, info)
    version = _optional(client, "/version").get("version") or info.get("version")
    owner = str(cards[0].get("owned_by") or "unknown")
    return Served(owner, None if version is None else str(version), base, adapters, {})


def work_of(client: Client, served: Served, adapters: Sequence[str]) -> Work | None:
    """Return the costs of a lorasrv server's model, with the size of the first adapter; None for other servers, which
    do not report costs.
    """
    info = served.info
    if "operations" not in info:
        return None
    ops = info["operations"]
    weights = _adapter_weights(client, adapters[0]) if adapters else 0
    return Work(
        model_bytes=info["weight_bytes"],
        kv_token_bytes=info["kv_token_bytes"],
        adapter_bytes=weights * ITEM_BYTES.get(info["model_dtype"], 2),
        token_ops=ops["token"],
        sampled_ops=ops["sampled_token"],
        context_ops=ops["context_token"],
        adapter_ops=2 * weights,
        is_int8=info["quantization"] not in ("none", "fp8"),
    )


def _adapter_weights(client: Client, name: str) -> int:
    """Count an adapter's weights; 0 if it has none of its own, or their dtype is unknown."""
    # For a version (`mia@3`) or an alias, use the id: sizes seldom differ.
    report = client.adapter(parse_reference(name).adapter_id)["report"]
    itemsize = ITEM_BYTES.get(report["dtype"]) if report is not None else None
    return int(report["weights_bytes"]) // itemsize if itemsize else 0


def _optional(client: Client, path: str) -> dict[str, Any]:
    """Return the JSON at a path that other servers may not have, {} if missing."""
    try:
        return client.get(path)
    except (Refused, ServerUnreachable):
        return {}
