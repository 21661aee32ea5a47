"""Build the application of Ray Serve: replicas, the registry that they follow, and edges in front.

`serve run api.cluster.app:build model=... replicas=2 store=...` takes the options of `lorasrv serve` by their names,
and those of `ClusterShape`. `lorasrv serve --replicas N` runs the same replicas and registry, with the edge in its own
process. An update restarts all processes of an application. To keep the registry up meanwhile, deploy it as its own
application (`build_registry`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from adapter_store.errors import StoreLocked
from api.cluster.autoscale import DOWN_AFTER_S, FIGURES, LOOK_BACK_S, UP_AFTER_S, BacklogPolicy
from api.cluster.chooser import ReplicaAddress
from api.cluster.edge import Edge
from api.cluster.hosted import LEFT_S, HostedServer
from api.cluster.pick import ReplicaWatch
from api.cluster.replica import ReplicaPlan, ReplicaServer, Sealed, opened, sealed
from api.cluster.shape import ClusterShape, parse
from api.config import replication_settings as roles
from api.config.settings import ServerSettings
from api.server import CannotListen
from lorasrv.engine.replica_load import ReplicaLoad
from lorasrv.errors import ConfigError
from lorasrv.placement.kinds import make_placement

REPLICA, PREFILL, REGISTRY, EDGE = "Replica", "Prefill", "Registry", "Edge"
NOTICED_S = 2.0
"""Time for edges to notice that a replica is leaving, before it refuses requests: several periods of `pick.py`."""
SINGLE_CALLS = 8
"""Single calls, to replicas of Ray's choice, when a broadcast times out because one replica hangs."""
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
MAX_STARTS = 3
"""Attempts to start a replica before the deployment fails."""
HANDOVER_S, HANDOVER_LOOK_S = 60.0, 0.5
"""Time in which a registry must release its store to its successor."""
CALLS = 1000
"""Concurrent actor calls from edges. Requests are not actor calls; the server has its own queue for them."""
STREAMS = 100_000
"""Requests that an edge pipes at a time; the real limit is set by the replicas."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application from options by name, as strings, as `serve run` passes them.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    return application(*parse(args))


def build_registry(args: Mapping[str, Any]) -> serve.Application:
    """Build the registry alone, from the same options. `build` finds it by the name of its application, `registry_app`.

    Raises:
        ConfigError: an option is unknown or wrong, or names another registry.
    """
    settings, shape = parse(args)
    if settings.registry is not None or shape.registry_app is not None:
        raise ConfigError("registry, registry_app: a registry follows no other; leave them out")
    return registry_application(settings, shape)


def application(settings: ServerSettings, shape: ClusterShape) -> serve.Application:
    """Build the application. Without edges, the replicas are its ingress, and an edge elsewhere uses their handle.

    With `--registry`, replicas follow that server. Otherwise they follow a registry in the cluster that owns `--store`,
    in the application `registry_app` or in this one.

    Args:
        settings: must include the cluster's secret.
    """
    in_cluster = registry_application if shape.registry_app is None else _found
    registry = settings.registry or in_cluster(settings, shape)
    prefill = None
    if settings.prefill_replicas is not None:
        own = settings.model_copy(update={"role": roles.PREFILL})
        prefill = _replicas(PREFILL, own, shape, registry, num_replicas=settings.prefill_replicas)
    replicas = _replicas(REPLICA, settings, shape, registry, prefill, **_numbers(settings))
    if not shape.edges:
        return replicas
    return serve.deployment(
        serve.ingress()(EdgeDeployment), name=EDGE, num_replicas=shape.edges, max_ongoing_requests=STREAMS
    ).bind(replicas, prefill, registry, settings.placement, settings.read_cluster_secret())


def _replicas(
    name: str,
    settings: ServerSettings,
    shape: ClusterShape,
    registry: "serve.Application | RegistryApp | str",
    beside: serve.Application | None = None,
    **numbers: Any,
) -> serve.Application:
    """Return a deployment of replicas; `beside` is deployed with it."""
    drain = NOTICED_S + settings.drain_s + LEFT_S
    return serve.deployment(
        ReplicaDeployment,
        name=name,
        max_ongoing_requests=CALLS,
        ray_actor_options={"num_cpus": shape.cpus, "num_gpus": shape.gpus},
        graceful_shutdown_wait_loop_s=NOTICED_S,
        graceful_shutdown_timeout_s=drain,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=MAX_STARTS,
        **numbers,
    ).bind(ReplicaPlan(sealed(settings), shape.cache, shape.threads, shape.log), registry, beside)


@dataclass(frozen=True, slots=True)
class RegistryApp:
    """Name the application that has the registry."""

    name: str

    def handle(self) -> Any:
        """Return the registry's handle.

        Raises:
            RayServeException: there is no such application, or it has no registry.
        """
        return serve.get_deployment_handle(REGISTRY, self.name)


def _found(_: ServerSettings, shape: ClusterShape) -> RegistryApp:
    return RegistryApp(str(shape.registry_app))


def registry_application(settings: ServerSettings, shape: ClusterShape) -> serve.Application:
    """Build the registry, which owns `--store`."""
    return serve.deployment(
        RegistryDeployment,
        name=REGISTRY,
        num_replicas=1,
        max_ongoing_requests=CALLS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=NOTICED_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=MAX_STARTS,
    ).bind(sealed(settings), shape.registry_port, shape.log)


def look_at(*deployments: Any) -> Callable[[], Awaitable[list[ReplicaAddress | BaseException]]]:
    """Return a function that asks all running replicas of some deployments, given by handle, for their addresses."""

    async def ask(replicas: Any) -> list[ReplicaAddress | BaseException]:
        said: list[ReplicaAddress | BaseException]
        # Within Ray's own timeout a cancellation leaves a future whose exception is never read, and asyncio logs it.
        try:
            said = await asyncio.wait_for(
                replicas.broadcast("address").results_async(return_exceptions=True), NOTICED_S
            )
        except TimeoutError as late:
            # One hanging replica delays the whole broadcast; Ray sends most of the single calls to other replicas.
            said = [
                *await asyncio.gather(*(ask_one(replicas) for _ in range(SINGLE_CALLS)), return_exceptions=True),
                late,
            ]
        return said

    async def ask_one(replicas: Any) -> ReplicaAddress:
        one: ReplicaAddress = await asyncio.wait_for(replicas.address.remote(), NOTICED_S)
        return one

    async def look() -> list[ReplicaAddress | BaseException]:
        return [one for said in await asyncio.gather(*map(ask, deployments)) for one in said]

    return look


class RegistryDeployment(HostedServer):
    """Run the server that owns the store, without an engine, as the deployment's only replica.

    Its predecessor may still hold the store and the port while it drains.
    """

    async def __init__(self, settings: Sealed, port: int, log: str | None) -> None:  # type: ignore[misc]
        self._running = None
        host, until_s = ray.util.get_node_ip_address(), time.monotonic() + HANDOVER_S
        while self._running is None:
            try:
                await asyncio.to_thread(
                    HostedServer.__init__, self, opened(settings), "registry", host, port, log, computes=False
                )
            except (StoreLocked, CannotListen):
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(HANDOVER_LOOK_S)

    def address(self) -> str:
        """Return the URL that it listens on."""
        return self.ready().url

    def __del__(self) -> None:
        self.close()


class ReplicaDeployment(ReplicaServer):
    """Run a server as Ray Serve's replica."""

    # Not a plain `super().__init__`: another actor must first be asked for the registry's address.
    async def __init__(self, plan: ReplicaPlan, registry: Any, beside: Any) -> None:  # type: ignore[misc]
        del beside
        self._running = None
        address = await address_of(registry)
        host, replica_id = ray.util.get_node_ip_address(), serve.get_replica_context().replica_id.unique_id
        await asyncio.to_thread(ReplicaServer.__init__, self, plan, address, replica_id, host)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures that determine the number of replicas."""
        load = ReplicaLoad.of(self.running.services.engine.metrics.stats())
        return {name: float(getattr(load, name)) for name in FIGURES}

    def __del__(self) -> None:
        self.close()


class EdgeDeployment:
    """Run an edge behind Ray's proxy."""

    async def __init__(  # type: ignore[misc]
        self, replicas: Any, prefill: Any, registry: Any, placement: str, secret: str
    ) -> None:
        deployments = (replicas,) if prefill is None else (replicas, prefill)
        self._watch = ReplicaWatch(look_at(*deployments), make_placement(placement))
        self._secret = secret
        self._registry = await address_of(registry)
        await self._watch.refresh()
        self._keeping = asyncio.create_task(self._watch.run())

    def __serve_build_asgi_app__(self) -> Edge:
        return Edge(self._watch, self._registry, self._secret)


async def address_of(registry: Any) -> str:
    """Return a registry's address: the given one, or the one that the handle's deployment reports once it serves."""
    if isinstance(registry, str):
        return registry
    handle = registry.handle() if isinstance(registry, RegistryApp) else registry
    return str(await handle.address.remote())


def _numbers(settings: ServerSettings) -> dict[str, Any]:
    """Return the fixed number of replicas, or the range that Ray scales within."""
    least = settings.replicas or 1
    most = settings.max_replicas or least
    if most == least:
        return {"num_replicas": least}
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        initial_replicas=least,
        upscale_delay_s=UP_AFTER_S,
        downscale_delay_s=DOWN_AFTER_S,
        look_back_period_s=LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function=BacklogPolicy, policy_kwargs={"target_s": settings.target_backlog_s}),
    )
    return {"autoscaling_config": scaling}
