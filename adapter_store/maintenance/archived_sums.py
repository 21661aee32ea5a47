"""Check stored sums of an archive: versions whose weights are a sum of other versions, each pinned to its content."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from adapter_store.composition import Composition
from adapter_store.errors import AdapterNotFound, InvalidArchive, InvalidDigest, show
from adapter_store.maintenance.archive_format import Archive
from adapter_store.registry.records import AdapterRecord
from adapter_store.registry.references import check_digest, parse_reference
from adapter_store.spec import AdapterId, AdapterKey


class ArchivedPart(NamedTuple):
    """Name one part of a sum as the sum's defaults do: a version (`mia@3`), its content's digest, and its weight."""

    reference: str
    digest: str | None
    weight: float


Sums = Mapping[tuple[AdapterId, int], Sequence[ArchivedPart]]


def check_sums(
    archive: Archive,
    sums: Sums,
    records: Mapping[AdapterId, AdapterRecord],
    last_versions: Mapping[AdapterId, int],
) -> None:
    """Check that every part of a sum is in the archive or the store, or was in one of them: parts may be deleted.

    Args:
        sums: the parts of each version; empty for versions that are not a sum.
        records: the ids of the store.
        last_versions: highest version number that each id of the store has used.

    Raises:
        InvalidArchive: a part never existed or has another content, the version also has its own weights, or its parts
            add up to nothing.
    """
    known = {**records, **{record.adapter_id: record for record in archive.records}}
    used = {**last_versions, **archive.last_versions}
    for (adapter_id, version), parts in sums.items():
        if not parts:
            continue
        name = f"{adapter_id}@{version} of the archive"
        if (adapter_id, version) in archive.uploads:
            raise InvalidArchive(f"{name} has weights of its own and is a sum of others")
        keys = [_key(part, name, known, used) for part in parts]
        weights = [part.weight for part in parts]
        if Composition.of(zip(keys, weights, strict=True)).key is None:
            raise InvalidArchive(f"{name} is a sum that is nothing: the base would answer")


def _key(
    part: ArchivedPart, name: str, known: Mapping[AdapterId, AdapterRecord], used: Mapping[AdapterId, int]
) -> AdapterKey:
    """Return the key of a part's content."""
    why = f"{name} is a sum of {show(part.reference)}"
    try:
        reference, key = parse_reference(part.reference), AdapterKey(check_digest(part.digest or ""))
    except (AdapterNotFound, InvalidDigest):
        raise InvalidArchive(f"{why}, which names no version and its digest") from None
    adapter_id, number = reference.adapter_id, reference.version
    if number is None:
        raise InvalidArchive(f"{why}, which names no version")
    versions = known[adapter_id].versions if adapter_id in known else ()
    found = next((version for version in versions if version.version == number), None)
    if found is None and number > used.get(adapter_id, 0):
        raise InvalidArchive(f"{why}, which neither the archive nor the store has")
    if found is not None and found.key != key:
        raise InvalidArchive(f"{why}, which is not the content that it was made of")
    return key
