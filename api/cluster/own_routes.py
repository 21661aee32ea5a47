"""Answer requests to the edge itself: health, its metrics, and which replicas there are.

The edge knows no keys. A client may read the edge's figures if it may read a replica's: the edge asks a replica with
the client's own headers.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import JSONResponse, Response

from api.cluster.chooser import Chooser, ReplicaAddress, ReplicaFigures
from api.cluster.edge_stats import EdgeStats
from api.errors import ApiError
from api.observability.metrics.registry import as_text
from api.observability.metrics.requests import connections_cut

_SHOWN = frozenset({"/metrics", "/v1/pool", "/info"})
_CHANGED = {"PATCH": re.compile(r"/v1/adapters/[^/]+"), "POST": re.compile(r"/v1/adapters/[^/]+:(warm|snapshot)")}
"""What one replica answers if the query names it, `?replica=ID`: its figures, and requests about its pool."""
Figures = Mapping[str, ReplicaFigures]


def named_replica(chooser: Chooser, method: str, path: str, query: bytes) -> ReplicaAddress | None:
    """Return the replica that a query names; None if it names none, or if no single replica answers such requests.

    Raises:
        ApiError: there is no such replica.
    """
    changed = _CHANGED.get(method)
    is_of_one = path in _SHOWN if method in ("GET", "HEAD") else changed is not None and changed.fullmatch(path)
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True) if is_of_one else {}
    if "replica" not in given:
        return None
    name = given["replica"][0]
    known = {one.id: one for one in chooser.replicas()}
    if name not in known:
        why = f"there is no replica {name[:64]!r}; there are {', '.join(sorted(known)) or 'none'}"
        raise ApiError(404, why, code="not_found", param="replica")
    return known[name]


def without_replica(query: bytes) -> bytes:
    """Return a query without its `replica`, which a replica does not know."""
    return b"&".join(part for part in query.split(b"&") if not part.startswith(b"replica="))


def health(chooser: Chooser, stats: EdgeStats, figures: Figures) -> Response:
    return JSONResponse({"status": "ok"})


def ready(chooser: Chooser, stats: EdgeStats, figures: Figures) -> Response:
    number = sum(one.is_ready for one in chooser.replicas())
    if number:
        return JSONResponse({"status": "ready", "replicas": number})
    return JSONResponse({"status": "no replica is ready"}, 503, {"retry-after": "1"})


def targets(chooser: Chooser, stats: EdgeStats, figures: Figures) -> Response:
    """Return the replicas as Prometheus discovers them over HTTP."""
    found = [
        {
            "targets": [urlsplit(one.url).netloc],
            "labels": {"lorasrv_replica": one.id, "lorasrv_role": one.role},
        }
        for one in chooser.replicas()
    ]
    return JSONResponse(found)


def replicas(chooser: Chooser, stats: EdgeStats, figures: Figures) -> Response:
    loads = chooser.loads_s()
    rows = [
        {
            "id": one.id,
            "url": one.url,
            "role": one.role,
            "is_ready": one.is_ready,
            "load_s": round(loads.get(one.id, 0.0), 3),
            "requests": said and said.requests,
            "adapters": said and said.adapters,
        }
        for one in chooser.replicas()
        for said in [figures.get(one.id)]
    ]
    return JSONResponse({"replicas": rows})


def metrics(chooser: Chooser, stats: EdgeStats, figures: Figures) -> Response:
    return Response(as_text(_metrics(chooser, stats)), media_type=CONTENT_TYPE_LATEST)


def _metrics(chooser: Chooser, stats: EdgeStats) -> Iterator[Metric]:
    text = "Answers to clients, by status: of replicas, of the registry and the edge's own."
    answers = CounterMetricFamily("lorasrv_edge_answers", text, labels=["status"])
    for status, count in sorted(stats.answers.items()):
        answers.add_metric([str(status)], count)
    yield answers
    yield connections_cut(stats.cuts)
    yield CounterMetricFamily("lorasrv_edge_retries", "Times that another replica was asked.", value=stats.retries)
    yield CounterMetricFamily("lorasrv_edge_resumed", "Streams that another replica went on with.", value=stats.resumed)
    yield CounterMetricFamily("lorasrv_edge_moved", "Those of them whose replica drained.", value=stats.moved)
    yield CounterMetricFamily("lorasrv_edge_lost", "Streams that none could go on with.", value=stats.lost)
    peers = CounterMetricFamily(
        "lorasrv_edge_peers", "Replicas that were named to take pages from, by what is asked of them.", labels=["kind"]
    )
    for asked in ("prefill", "pages"):
        peers.add_metric([asked], stats.peers[asked])
    yield peers
    by_replica: list[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, Mapping[str, float]]] = [
        (CounterMetricFamily, "requests", "Requests that were sent to a replica.", stats.sent),
        (CounterMetricFamily, "failures", "Requests that a replica did not answer to their end.", stats.failed),
        (GaugeMetricFamily, "load_seconds", "Work ahead of a replica, as this edge counts it.", chooser.loads_s()),
    ]
    for kind, name, text, values in by_replica:
        family = kind(f"lorasrv_edge_replica_{name}", text, labels=["replica"])
        for one in chooser.replicas():
            family.add_metric([one.id], values.get(one.id, 0))
        yield family
    up = GaugeMetricFamily("lorasrv_edge_replica_ready", "1 if it may be asked.", labels=["replica", "role"])
    for one in chooser.replicas():
        up.add_metric([one.id, one.role], float(one.is_ready))
    yield up


Answer = Callable[[Chooser, EdgeStats, Figures], Response]
OPEN: Mapping[str, Answer] = {"/health": health, "/ping": health, "/ready": ready}
"""Answered to anybody, as by a server."""
GUARDED: Mapping[str, Answer] = {"/metrics": metrics, "/metrics/targets": targets, "/v1/replicas": replicas}
"""Answered to clients that may read a replica's `/v1/pool`."""
