"""What the store tells about an id: plain frozen facts."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from adapter_store.errors import AdapterChanged, AdapterExists, VersionNotFound
from adapter_store.formats.adapter_config import canonical_json
from adapter_store.registry.references import AliasTarget, Shares, check_alias, check_shares
from adapter_store.spec import AdapterId, AdapterKey, AdapterRef
from adapter_store.validation.report import UploadReport


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One immutable version of an id. `bytes` counts the weights alone, whose SHA-256 is `weights_digest`."""

    version: int
    key: AdapterKey
    created_s: float
    rank_max: int
    bytes: int
    weights_digest: str = ""


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An id and its versions, oldest first. `key` is the current version's.

    `limits` of the id are numbers by name: kept here, understood elsewhere. `aliases` are sorted by name. `etag` are 32
    hex digits of all this but the times: another state has another one. Version numbers are not used twice, so an id
    that was deleted and made again never has an old one.
    """

    adapter_id: AdapterId
    current_version: int
    key: AdapterKey
    created_s: float
    versions: tuple[VersionRecord, ...]
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, Shares] = field(default_factory=lambda: MappingProxyType({}))
    etag: str = ""

    @classmethod
    def of(
        cls,
        adapter_id: AdapterId,
        current_version: int,
        created_s: float,
        versions: Sequence[VersionRecord],
        limits: Mapping[str, float] | None = None,
        aliases: Mapping[str, Shares] | None = None,
    ) -> "AdapterRecord":
        key = next(v.key for v in versions if v.version == current_version)
        own = MappingProxyType(dict(limits or {}))
        names = MappingProxyType({alias: MappingProxyType(dict(to)) for alias, to in sorted((aliases or {}).items())})
        etag = _etag(adapter_id, current_version, versions, own, names)
        return cls(adapter_id, current_version, key, created_s, tuple(versions), own, names, etag)

    def version(self, number: int) -> VersionRecord | None:
        return next((v for v in self.versions if v.version == number), None)

    def aliases_of(self, versions: Collection[int]) -> tuple[str, ...]:
        """The aliases that name any of these versions, also for a share only."""
        return tuple(alias for alias, shares in self.aliases.items() if not shares.keys().isdisjoint(versions))

    def ref(self, number: int) -> AdapterRef:
        """A version that this id has, resolved."""
        if number == self.current_version:
            return AdapterRef(self.adapter_id, number, self.key)
        version = self.version(number)
        assert version is not None, "ids and aliases name versions that there are"
        return AdapterRef(self.adapter_id, number, version.key)


def _etag(
    adapter_id: AdapterId,
    current_version: int,
    versions: Sequence[VersionRecord],
    limits: Mapping[str, float],
    aliases: Mapping[str, Shares],
) -> str:
    pointers = {alias: {str(version): share for version, share in to.items()} for alias, to in aliases.items()}
    state = [adapter_id, current_version, [[v.version, v.key] for v in versions], dict(limits), pointers]
    return hashlib.sha256(canonical_json(state).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Change:
    """What is to change about an id; None leaves it as it is.

    `version` becomes the current one. Of `aliases` those that are named change, to None: they go. `limits` replace all.
    """

    version: int | None = None
    aliases: Mapping[str, AliasTarget | None] = field(default_factory=dict)
    limits: Mapping[str, float] | None = None

    def check(self) -> None:
        """Raises: InvalidAlias: a name or a target is none, whatever versions there are."""
        for alias, target in self.aliases.items():
            check_alias(alias)
            if target is not None:
                check_shares(alias, target)

    def check_versions(self, record: AdapterRecord) -> None:
        """Raises: VersionNotFound: it is about a version that the id does not have."""
        wanted = [] if self.version is None else [self.version]
        for alias, target in self.aliases.items():
            wanted += check_shares(alias, target) if target is not None else ()
        for version in wanted:
            if record.version(version) is None:
                raise VersionNotFound(record.adapter_id, version, tuple(v.version for v in record.versions))


@dataclass(frozen=True, slots=True)
class Deletion:
    """What deleting came to: the contents of the versions that went, of these the ones that no version names any more,
    and the aliases gone."""

    adapter_id: AdapterId
    contents: tuple[AdapterKey, ...]
    unnamed: tuple[AdapterKey, ...]
    aliases: tuple[str, ...] = ()

    @property
    def num_versions(self) -> int:
        return len(self.contents)


@dataclass(frozen=True, slots=True)
class Registration:
    """What registering came to: `created` is False where the id had this content already."""

    ref: AdapterRef
    created: bool
    report: UploadReport


def check_state(
    adapter_id: str, record: AdapterRecord | None, tags: Collection[str] | None, *, if_not_exists: bool = False
) -> None:
    """Whether an id is as a caller expects. A tag is a record's `etag`, `sha256:` and the digest of its current
    content, or `*` for any state at all; None expects nothing.

    Raises:
        AdapterExists: it does, and the caller expects that it does not.
        AdapterChanged: it is in another state, or there is no such id.
    """
    if if_not_exists and record is not None:
        raise AdapterExists(adapter_id)
    if tags is None or (record is not None and {"*", record.etag, f"sha256:{record.key}"} & set(tags)):
        return
    raise AdapterChanged(adapter_id, record is not None)
