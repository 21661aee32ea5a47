"""Define the options of a Ray cluster that `serve` does not have. Imports no ray."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.config.settings import ServerSettings
from api.config.sources import Sources
from lorasrv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Hold the options of a Ray cluster that `serve` does not have."""

    # Edges that Ray's proxy may choose from; 0: none.
    edges: int = 1
    # CPUs and GPUs that Ray reserves for each replica.
    cpus: float = 1.0
    gpus: float = 0.0
    # Folder on each machine for what its replicas fetch.
    cache: Path = Path("/tmp/lorasrv-replicas")
    # Port of the registry that runs in the cluster; it is the same after a restart.
    registry_port: int = 8700
    # Ray Serve's application that has the registry (`build_registry`); None: it is started with the replicas.
    registry_app: str | None = None
    # CPU threads of a replica; None: as OpenMP chooses.
    threads: int | None = None
    # File that log lines of all processes go to; None: Ray's files.
    log: str | None = None

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> "ClusterShape":
        """Read the options from strings by name.

        Raises:
            ConfigError: a value is not a number.
        """
        found: dict[str, Any] = {}
        for name, kind in ARGUMENTS.items():
            try:
                found |= {name: kind(args[name])} if name in args else {}
            except ValueError:
                raise ConfigError(f"{name}: {args[name]!r} is not a number") from None
        return cls(**found)


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "edges": int,
    "cpus": float,
    "gpus": float,
    "cache": Path,
    "registry_port": int,
    "registry_app": str,
    "threads": int,
}


def parse(args: Mapping[str, Any]) -> tuple[ServerSettings, ClusterShape]:
    """Read options by name, as `serve run` passes them.

    Raises:
        ConfigError: an option is unknown or wrong, or there is no secret.
    """
    settings = Sources.of_flags({name: value for name, value in args.items() if name not in ARGUMENTS}).settings()
    if settings.read_cluster_secret() is None:
        raise ConfigError(
            "cluster_secret_file: a cluster needs a secret that its next deployment has, too; make one with: "
            "head -c 24 /dev/urandom | base64 > FILE"
        )
    if settings.registry is not None and "registry_app" in args:
        raise ConfigError("registry_app: replicas follow the server that registry names; leave one of both out")
    settings.check_replicated()
    return settings, ClusterShape.of(args)
