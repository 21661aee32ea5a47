"""Run one replica: a whole server that follows the registry, with its own folder, threads and files."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.cluster.chooser import ReplicaAddress
from api.cluster.folders import free_folder
from api.cluster.hosted import HostedServer

if TYPE_CHECKING:
    from api.config.settings import ServerSettings


Sealed = tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]
"""Settings in the form that Ray compares: values by name and the names that were given, both in a fixed order. The
order of a set differs between processes, which would make every deployment look like a new version."""


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Hold what each replica serves, and where."""

    # `sealed` settings, with the cluster's secret.
    settings: "Sealed"
    # Parent of the replicas' folders, which hold what they fetch from the registry.
    folder: Path
    # CPU threads; None: as OpenMP chooses.
    threads: int | None = None
    # File that log lines go to; None: stderr of the replica's process.
    log: str | None = None


class ReplicaServer(HostedServer):
    """Serve as a replica.

    Args:
        registry: address of the server that it follows.
        replica_id: unique among all replicas, past ones included.
        host: address of this machine, as edges reach it.

    Raises:
        LorasrvError, AdapterError, OSError: the server does not start.
    """

    def __init__(self, plan: ReplicaPlan, registry: str, replica_id: str, host: str) -> None:
        if plan.threads is not None:
            # Ray sets it to the CPUs that it reserved for the replica. Read when torch is imported.
            os.environ["OMP_NUM_THREADS"] = str(plan.threads)
        self._opened = ExitStack()
        folder = self._opened.enter_context(free_folder(plan.folder))
        super().__init__(
            own_settings(opened(plan.settings), registry, folder, replica_id), replica_id, host, log=plan.log
        )

    def address(self) -> ReplicaAddress:
        """Return the replica's address and current state."""
        return ReplicaAddress(
            self.name,
            self.ready().url,
            is_ready=self.is_ready,
            role=self.settings.role,
            kernels=self.running.services.engine.fingerprint,
        )

    def close(self) -> None:
        super().close()
        self._opened.close()


def sealed(settings: "ServerSettings") -> Sealed:
    """Return settings for Ray."""
    return tuple((name, getattr(settings, name)) for name in type(settings).model_fields), tuple(
        sorted(settings.model_fields_set)
    )


def opened(settings: Sealed) -> "ServerSettings":
    """Return the settings that were sealed, without validating them again."""
    from api.config.settings import ServerSettings

    values, given = settings
    return ServerSettings.model_construct(set(given), **dict(values))


def own_settings(settings: "ServerSettings", registry: str, folder: Path, replica_id: str) -> "ServerSettings":
    """Return the settings of one replica: with its own folder and files, and no adapters to register."""
    changed: dict[str, Any] = {"store": folder, "lora_modules": (), "replicas": None, "registry": registry}
    if (trace := settings.record_trace) is not None:
        changed["record_trace"] = trace.with_name(f"{trace.stem}-{replica_id}{trace.suffix}")
    return settings.model_copy(update=changed)
