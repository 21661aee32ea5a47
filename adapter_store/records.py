"""What the store tells about an id: plain frozen facts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from adapter_store.report import UploadReport
from adapter_store.spec import AdapterId, AdapterKey, AdapterRef


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One immutable version of an id. `bytes` counts the weights alone."""

    version: int
    key: AdapterKey
    created_s: float
    rank_max: int
    bytes: int


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An id and its versions, oldest first. `key` is the current version's.

    `limits` of the id are numbers by name: kept here, understood elsewhere.
    """

    adapter_id: AdapterId
    current_version: int
    key: AdapterKey
    created_s: float
    versions: tuple[VersionRecord, ...]
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(
        cls,
        adapter_id: AdapterId,
        current_version: int,
        created_s: float,
        versions: Sequence[VersionRecord],
        limits: Mapping[str, float] | None = None,
    ) -> "AdapterRecord":
        key = next(v.key for v in versions if v.version == current_version)
        own = MappingProxyType(dict(limits or {}))
        return cls(adapter_id, current_version, key, created_s, tuple(versions), own)

    def ref(self, version: VersionRecord | None = None) -> AdapterRef:
        """A version of this id, resolved; the current one by default."""
        if version is None:
            return AdapterRef(self.adapter_id, self.current_version, self.key)
        return AdapterRef(self.adapter_id, version.version, version.key)


@dataclass(frozen=True, slots=True)
class Deletion:
    """What deleting came to: how many versions went, and the contents that no version names any more."""

    num_versions: int
    contents: tuple[AdapterKey, ...]


@dataclass(frozen=True, slots=True)
class Registration:
    """What registering came to: `created` is False where the id had this content already."""

    ref: AdapterRef
    created: bool
    report: UploadReport
