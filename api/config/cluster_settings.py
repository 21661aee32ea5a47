"""Declare the options of `serve` for several replicas; `ServerSettings` has them with all others."""

import secrets
from functools import partial
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr

from api.config.option_spec import OptionSpec, flag
from api.config.replication_settings import BOTH, ReplicationSettings
from lorasrv.errors import ConfigError

Routed = Literal["bounded", "least", "random", "hash", "p2c"]
"""Placements for an edge: those that need not know what replicas have in memory."""
DEFAULT_PLACEMENT: Routed = "bounded"
DEFAULT_TARGET_BACKLOG_S = 2.0

_cluster = partial(OptionSpec, panel="Cluster")
_AtLeastOne = Annotated[int, Field(ge=1)]
_OF_SEVERAL = ("max_replicas", "prefill_replicas", "target_backlog_s", "placement")


class ClusterSettings(ReplicationSettings):
    """Hold the options of `serve` for several replicas, and for each replica."""

    replicas: Annotated[
        _AtLeastOne | None,
        _cluster(
            "Number of replicas behind one address, each a server in a process of its own; needs the extra cluster",
            default="one server without Ray",
        ),
    ] = None
    max_replicas: Annotated[
        _AtLeastOne | None,
        _cluster("Number up to which replicas are started when there is a backlog", default="that of --replicas"),
    ] = None
    prefill_replicas: Annotated[
        _AtLeastOne | None,
        _cluster("Number of replicas beside these that compute the long prompts of the others", default="none"),
    ] = None
    target_backlog_s: Annotated[
        float,
        Field(gt=0),
        _cluster("Work ahead of each replica, in seconds, above which further ones are started"),
    ] = DEFAULT_TARGET_BACKLOG_S
    placement: Annotated[
        Routed, _cluster("How a replica is chosen for a request; bounded: by its adapter and by load")
    ] = DEFAULT_PLACEMENT

    def check_is_registry(self) -> None:
        """Refuse options that have no effect in a registry.

        Raises:
            ConfigError: names the option.
        """
        if self.registry is not None:
            raise ConfigError("--registry: a registry follows no other; leave it out")
        for name in ("replicas", *_OF_SEVERAL):
            if name in self.model_fields_set:
                raise ConfigError(f"{flag(name)} is of servers that answer prompts, a registry is one; leave it out")

    def check_alone(self) -> None:
        """Refuse options that have no effect in a single server.

        Raises:
            ConfigError: names the option.
        """
        for name in _OF_SEVERAL:
            if name in self.model_fields_set:
                raise ConfigError(f"{flag(name)} is of several replicas; give --replicas, or leave it out")
        if self.registry_key is not None and self.registry is None:
            raise ConfigError("--registry-key is for the server that --registry names; give that, or leave it out")
        if self.role != BOTH and self.read_cluster_secret() is None:
            raise ConfigError(
                f"--role {self.role} needs --cluster-secret-file: only servers of a cluster ask each other for pages"
            )

    def check_replicated(self) -> None:
        """Refuse options that have no effect in replicas behind an edge, or contradict each other there.

        Raises:
            ConfigError: names the option.
        """
        if self.role != BOTH:
            raise ConfigError(
                f"--role {self.role} is of one server; --prefill-replicas N starts replicas that compute the prompts "
                "of the others"
            )
        if self.max_replicas is not None and self.max_replicas < (self.replicas or 1):
            raise ConfigError(f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}")

    def with_cluster_secret(self) -> Self:
        """Return the settings with the cluster's secret instead of its file; generate a secret if none is given.

        Raises:
            ConfigError: as for `read_cluster_secret`.
        """
        secret = self.read_cluster_secret() or secrets.token_urlsafe(24)
        return self.model_copy(update={"cluster_secret": SecretStr(secret), "cluster_secret_file": None})
