"""Records that the store returns about an id, and the changes it accepts, as frozen data."""

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from adapter_store.errors import AdapterChanged, AdapterExists, VersionNotFound
from adapter_store.formats.adapter_config import canonical_json
from adapter_store.quota import ANONYMOUS, UsageTotals
from adapter_store.registry.references import AliasTarget, Shares, check_alias, check_shares
from adapter_store.spec import BF16, AdapterId, AdapterKey, AdapterRef, Form
from adapter_store.validation.report import UploadReport


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """Describe one immutable version. `bytes` counts only the weights, whose SHA-256 is `weights_digest`.

    `key` is None without weights; `persona` is the keyed digest of its defaults and weights, "" without defaults.
    """

    version: int
    key: AdapterKey | None
    created_s: float
    rank_max: int
    bytes: int
    weights_digest: str = ""
    stored: Form = BF16
    persona: str = ""


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """Describe an id and its versions, oldest first. `key` is the current version's.

    `limits` maps names to numbers, which the callers interpret. `aliases` are sorted by name. `etag` is a hash (32 hex
    digits) of everything except the times. Version numbers are never reused, so an id that is deleted and created again
    never repeats an etag.
    """

    adapter_id: AdapterId
    current_version: int
    key: AdapterKey | None
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
        """Build a record, with read-only mappings and its etag."""
        key = {v.version: v.key for v in versions}[current_version]
        own = MappingProxyType(dict(limits or {}))
        names = MappingProxyType({alias: MappingProxyType(dict(to)) for alias, to in sorted((aliases or {}).items())})
        etag = _etag(adapter_id, current_version, versions, own, names)
        return cls(adapter_id, current_version, key, created_s, tuple(versions), own, names, etag)

    def version(self, number: int) -> VersionRecord | None:
        """Return a version by number, or None."""
        at = bisect_left(self.versions, number, key=lambda v: v.version)
        return self.versions[at] if at < len(self.versions) and self.versions[at].version == number else None

    def aliases_of(self, versions: Collection[int]) -> tuple[str, ...]:
        """Return the aliases that point to any of these versions, including split aliases."""
        return tuple(alias for alias, shares in self.aliases.items() if not shares.keys().isdisjoint(versions))

    def ref(self, number: int) -> AdapterRef:
        """Return the resolved reference to an existing version."""
        version = self.version(number)
        assert version is not None, "ids and aliases point to existing versions"
        return AdapterRef(self.adapter_id, number, version.key, version.persona)


def _etag(
    adapter_id: AdapterId,
    current_version: int,
    versions: Sequence[VersionRecord],
    limits: Mapping[str, float],
    aliases: Mapping[str, Shares],
) -> str:
    pointers = {alias: {str(version): share for version, share in to.items()} for alias, to in aliases.items()}
    state = [adapter_id, current_version, [[v.version, v.key, v.persona] for v in versions], dict(limits), pointers]
    return hashlib.sha256(canonical_json(state).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Change:
    """Describe a change of an id; None leaves a field as it is.

    `version` becomes the current one. Aliases listed in `aliases` are set, or removed if None. `limits` replace all.
    """

    version: int | None = None
    aliases: Mapping[str, AliasTarget | None] = field(default_factory=dict)
    limits: Mapping[str, float] | None = None

    def check(self) -> None:
        """Check the parts of the change that do not depend on the existing versions.

        Raises:
            InvalidAlias: an alias's name or target is invalid.
        """
        for alias, target in self.aliases.items():
            check_alias(alias)
            if target is not None:
                check_shares(alias, target)

    def aliases_after(self, record: AdapterRecord) -> Collection[str]:
        """Return the names of the aliases that a record has after the change."""
        removed = {alias for alias, target in self.aliases.items() if target is None}
        return (record.aliases.keys() | self.aliases.keys()) - removed

    def check_versions(self, record: AdapterRecord) -> None:
        """Check that the versions of the change exist.

        Raises:
            VersionNotFound: the id has no such version.
        """
        wanted = [] if self.version is None else [("version", self.version)]
        for alias, target in self.aliases.items():
            shares = check_shares(alias, target) if target is not None else ()
            wanted += [(f"aliases.{alias}", version) for version in shares]
        for param, version in wanted:
            if record.version(version) is None:
                there = tuple(v.version for v in record.versions)
                raise VersionNotFound(record.adapter_id, version, there, param)


@dataclass(frozen=True, slots=True)
class Deletion:
    """Describe what was deleted: versions, their contents, the contents left without a version, and aliases."""

    adapter_id: AdapterId
    versions: tuple[int, ...]
    contents: tuple[AdapterKey, ...]
    unnamed: tuple[AdapterKey, ...]
    aliases: tuple[str, ...] = ()

    @property
    def num_versions(self) -> int:
        """Return the number of versions removed."""
        return len(self.versions)


@dataclass(frozen=True, slots=True)
class Registration:
    """Describe a registration: `created` is False if the id already had this content with these defaults.

    `report` is None without weights.
    """

    ref: AdapterRef
    created: bool
    report: UploadReport | None


def usage_of(records: Iterable[AdapterRecord], owners: Mapping[tuple[AdapterId, int], str]) -> UsageTotals:
    """Count the versions and bytes of principals and ids.

    Args:
        records: every id.
        owners: the principal of each version that has one other than "anonymous".
    """
    totals = UsageTotals()
    for record in records:
        for v in record.versions:
            totals.add(owners.get((record.adapter_id, v.version), ANONYMOUS), v.weights_digest, v.bytes)
    return totals


def check_preconditions(
    adapter_id: str, record: AdapterRecord | None, tags: Collection[str] | None, *, if_not_exists: bool = False
) -> None:
    """Check that an id is in the state that the caller expects.

    Args:
        adapter_id: the id.
        record: its record, None if it does not exist.
        tags: accepted states: a record's `etag`, `sha256:` and the digest of its current content, or `*` for any
            state of an existing id; None accepts everything.
        if_not_exists: expect that the id does not exist.

    Raises:
        AdapterExists: it exists, and the caller expected that it does not.
        AdapterChanged: it is in another state, or does not exist.
    """
    if if_not_exists and record is not None:
        raise AdapterExists(adapter_id)
    if tags is None or (record is not None and {"*", record.etag, f"sha256:{record.key}"} & set(tags)):
        return
    raise AdapterChanged(adapter_id, record is not None)
