"""Stored sums of an archive: what their parts may be."""

import pytest

from adapter_store.errors import InvalidArchive
from adapter_store.maintenance.archive_format import Archive, ArchivedUpload
from adapter_store.maintenance.archived_sums import ArchivedPart, check_sums
from adapter_store.registry.records import AdapterRecord, VersionRecord
from adapter_store.spec import AdapterId, AdapterKey

NIGHT, MIA, ZOE = AdapterId("night"), AdapterId("mia"), AdapterId("zoe")
KEYS = [AdapterKey(digit * 64) for digit in "abc"]


def record(adapter_id: AdapterId, *keys: AdapterKey | None) -> AdapterRecord:
    versions = [VersionRecord(number, key, 1.0, 4, 100) for number, key in enumerate(keys, 1)]
    return AdapterRecord.of(adapter_id, 1, 1.0, versions)


def check(*parts: ArchivedPart, uploads: bool = False) -> None:
    """Check night@1 of an archive that has mia@1, and had mia@2 and gone@1; the store has zoe@1 and zoe@2."""
    at = (NIGHT, 1)
    records = record(MIA, KEYS[0]), record(NIGHT, None)
    upload = {at: ArchivedUpload(KEYS[1], {})} if uploads else {}
    archive = Archive("", {}, records, upload, {MIA: 2, AdapterId("gone"): 1, NIGHT: 1})
    check_sums(archive, {at: parts, (MIA, 1): ()}, {ZOE: record(ZOE, KEYS[1], None)}, {ZOE: 2})


def part(reference: str, key: AdapterKey = KEYS[0], weight: float = 1.0) -> ArchivedPart:
    return ArchivedPart(reference, f"sha256:{key}", weight)


def test_parts_of_the_archive_and_of_the_store() -> None:
    check(part("mia@1"), part("zoe@1", KEYS[1], -0.5))
    check()


def test_parts_that_were_deleted_are_missed_when_it_is_asked() -> None:
    check(part("mia@2", KEYS[2]), part("gone@1", KEYS[1]))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([part("mia@3")], "neither the archive nor the store has"),
        ([part("ann@1")], "neither the archive nor the store has"),
        ([part("mia@1"), part("zoe@1")], "zoe@1', which is not the content"),
        ([part("zoe@2")], "not the content"),
        ([part("mia")], "names no version"),
        ([part("mia:prod")], "names no version"),
        ([part("../mia")], "names no version"),
        ([ArchivedPart("mia@1", None, 1.0)], "names no version and its digest"),
        ([part("mia@1"), part("mia@1", weight=-1.0)], "nothing"),
    ],
)
def test_what_is_no_sum(parts: list[ArchivedPart], says: str) -> None:
    with pytest.raises(InvalidArchive, match=says):
        check(*parts)


def test_weights_of_its_own() -> None:
    with pytest.raises(InvalidArchive, match="weights of its own"):
        check(part("mia@1"), uploads=True)
