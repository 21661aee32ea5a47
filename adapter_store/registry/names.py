"""Name table in memory: resolving a reference reads a dictionary and never waits for a disk or a lock.

The dictionary is replaced, never changed; the caller that replaces it holds the store's lock.
"""

from collections.abc import Callable, Collection, Mapping

from adapter_store.errors import AdapterNotFound, IdExpected, InvalidAlias, StoreUnusable, VersionNotFound
from adapter_store.registry.index import Index
from adapter_store.registry.near_names import NEAR_NAMES, near_names
from adapter_store.registry.records import AdapterRecord, VersionRecord
from adapter_store.registry.references import Reference, Shares, draw_version, parse_reference, sticky_number
from adapter_store.spec import AdapterId, AdapterRef


class Names:
    """Resolve references.

    Args:
        records: every id.
        draw: returns random numbers in [0, 1), for aliases that are split between versions.
    """

    def __init__(self, records: Mapping[AdapterId, AdapterRecord], draw: Callable[[], float]) -> None:
        self._records = dict(records)
        self._draw = draw

    def find(self, adapter_id: str) -> AdapterRecord | None:
        """Return an id's record, or None."""
        return self._records.get(AdapterId(adapter_id))

    def get(self, adapter_id: str) -> AdapterRecord:
        """Return an id's record.

        Raises:
            AdapterNotFound: there is no such id; as its subclass IdExpected if a version or alias is named instead.
        """
        if (record := self.find(adapter_id)) is not None:
            return record
        name = _name_in(adapter_id)
        if (record := self.find(name)) is not None:
            raise IdExpected(adapter_id, name, _numbers(record), tuple(record.aliases))
        raise AdapterNotFound(adapter_id, self._near(adapter_id[:64]))

    def all(self) -> list[AdapterRecord]:
        """Return every id, sorted."""
        records = self._records
        return [records[name] for name in sorted(records)]

    @property
    def records(self) -> Mapping[AdapterId, AdapterRecord]:
        """Return the current records; the mapping never changes, a new state is a new mapping."""
        return self._records

    def replace(self, adapter_id: AdapterId, record: AdapterRecord | None) -> None:
        """Update one id; None removes it."""
        self.update({adapter_id: record})

    def update(self, changed: Mapping[AdapterId, AdapterRecord | None]) -> None:
        """Update several ids at once; None removes an id."""
        records = dict(self._records)
        for name, record in changed.items():
            if record is None:
                records.pop(name, None)
            else:
                records[name] = record
        self._records = records

    def resolve(self, reference: str, sticky_to: tuple[str, ...] = ()) -> AdapterRef:
        """Return the version that a reference names, as `AdapterStore.resolve`."""
        record, shares = self.targets(reference)
        if len(shares) == 1:
            return record.ref(*shares)
        number = sticky_number(reference, list(shares), *sticky_to) if sticky_to else self._draw()
        return record.ref(draw_version(shares, number))

    def resolve_one(self, reference: str) -> AdapterRef:
        """Return the only version that a reference names.

        Raises:
            AdapterNotFound: there is none.
            InvalidAlias: the alias is split between versions; the message names them.
        """
        record, shares = self.targets(reference)
        if len(shares) > 1:
            versions = " and ".join(f"{record.adapter_id}@{version}" for version in shares)
            raise InvalidAlias(
                reference.partition(":")[2], f"{reference} is split between {versions}; name one of them"
            )
        return record.ref(*shares)

    def targets(self, reference: str) -> tuple[AdapterRecord, Shares]:
        """Return an id and the shares of its versions, as `AdapterStore.targets`."""
        parsed, record = self._record_of(reference)
        if parsed.alias is not None:
            return record, self._alias(reference, record, parsed.alias)
        if parsed.version is None and parsed.key_prefix is None:
            return record, {record.current_version: 1.0}
        matches = _pinned(record, parsed)
        if len({v.key for v in matches}) != 1:
            raise AdapterNotFound(reference, (record.adapter_id,))
        return record, {matches[-1].version: 1.0}

    def select(self, reference: str) -> tuple[AdapterRecord, tuple[VersionRecord, ...]]:
        """Return an id and the versions that a reference pins; all of them if it pins none.

        Raises:
            AdapterNotFound: there is nothing of that name.
            InvalidAlias: it is an alias, not a version.
        """
        parsed, record = self._record_of(reference)
        if parsed.alias is not None:
            self._alias(reference, record, parsed.alias)
            raise InvalidAlias(
                parsed.alias,
                f"{reference} is an alias; remove it alone with: lorasrv alias {reference} --remove "
                f'(PATCH {{"aliases": {{"{parsed.alias}": null}}}}), or name a version',
            )
        versions = _pinned(record, parsed)
        if not versions:
            raise AdapterNotFound(reference, self._near(record.adapter_id))
        return record, versions

    def _record_of(self, reference: str) -> tuple[Reference, AdapterRecord]:
        try:
            parsed = parse_reference(reference)
        except AdapterNotFound:
            raise AdapterNotFound(reference, self._near(_name_in(reference[:64]))) from None
        record = self._records.get(parsed.adapter_id)
        if record is None:
            raise AdapterNotFound(reference, self._near(parsed.adapter_id))
        return parsed, record

    def _alias(self, reference: str, record: AdapterRecord, alias: str) -> Shares:
        if alias not in record.aliases:
            near = near_names(alias, record.aliases)[: NEAR_NAMES - 1]
            raise AdapterNotFound(reference, (*(f"{record.adapter_id}:{name}" for name in near), record.adapter_id))
        return record.aliases[alias]

    def _near(self, name: str) -> tuple[str, ...]:
        return near_names(name, self._records)


def read_records(index: Index, reserved: Collection[str], *, follows: bool) -> dict[AdapterId, AdapterRecord]:
    """Return the records of a store that is being opened; a follower hides reserved ids.

    Raises:
        StoreUnusable: a row cannot be read, or an adapter's id is reserved in a store that owns its names.
    """
    records = index.checked_records()
    if follows:
        return {name: record for name, record in records.items() if name not in reserved}
    if taken := sorted(records.keys() & reserved):
        raise StoreUnusable(f"it holds an adapter named {taken[0]!r}, which is the base's name (--served-model-name)")
    return records


def _name_in(reference: str) -> str:
    """Return the id in a text that may be a reference."""
    return reference.partition("@")[0].partition(":")[0]


def _numbers(record: AdapterRecord) -> tuple[int, ...]:
    return tuple(version.version for version in record.versions)


def _pinned(record: AdapterRecord, pin: Reference) -> tuple[VersionRecord, ...]:
    """Return the versions that a reference pins, all if it pins none; a prefix of a key may match none.

    Raises:
        VersionNotFound: the version named does not exist.
    """
    if pin.version is not None:
        if (version := record.version(pin.version)) is None:
            raise VersionNotFound(record.adapter_id, pin.version, _numbers(record))
        return (version,)
    if pin.key_prefix is not None:
        return tuple(v for v in record.versions if v.key is not None and v.key.startswith(pin.key_prefix))
    return record.versions
