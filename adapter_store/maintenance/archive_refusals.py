"""Collect the adapters of an archive that cannot be served, and why, so that all are reported at once."""

from collections.abc import Callable, Mapping, Sequence

from adapter_store.errors import AdaptersRefused, BlobTooLarge, InvalidArchive, show
from adapter_store.maintenance.archive_format import Archive
from adapter_store.maintenance.archived_sums import ArchivedPart, check_sums
from adapter_store.quota import MAX_PER_ID
from adapter_store.registry.records import AdapterRecord
from adapter_store.registry.references import parse_reference
from adapter_store.spec import AdapterId

CheckLimits = Callable[[Mapping[str, float]], object]
CheckDefaults = Callable[[str, Mapping[str, object]], Sequence[ArchivedPart]]
CheckTokens = Callable[[str, int], object]


class Refusals:
    """Hold the first reason for each refused adapter of an archive.

    Args:
        archive: the archive to import.
        check_limits, check_defaults: as in `import_store`.
        max_bytes: most bytes of one version's weights.
        records, last_versions: the ids of the store, and the highest version number that each has used.
    """

    def __init__(
        self,
        archive: Archive,
        check_limits: CheckLimits,
        check_defaults: CheckDefaults,
        max_bytes: int,
        records: Mapping[AdapterId, AdapterRecord],
        last_versions: Mapping[AdapterId, int],
    ) -> None:
        self.reasons: dict[AdapterId, str] = {}
        self._settled: set[AdapterId] = set()
        self._sums: dict[tuple[AdapterId, int], Sequence[ArchivedPart]] = {}
        self._limits(archive, check_limits)
        self._counts(archive)
        self._sizes(archive, max_bytes)
        self._defaults(archive, check_defaults)
        for at, parts in self._sums.items():
            try:
                check_sums(archive, {at: parts}, records, last_versions)
            except InvalidArchive as error:
                self.add(at[0], str(error))

    def add(self, adapter_id: AdapterId, why: str) -> None:
        """Refuse an adapter."""
        self.reasons.setdefault(adapter_id, why)

    def settle(self, skip: Callable[[AdapterId, str], object] | None) -> None:
        """Also refuse sums of refused adapters, and call `skip` for each refused adapter once.

        Raises:
            AdaptersRefused: an adapter is refused and `skip` is None.
        """
        while self._add_sums_of_refused():
            pass
        if self.reasons and skip is None:
            raise AdaptersRefused(list(self.reasons.values()))
        for adapter_id in self.reasons.keys() - self._settled:
            assert skip is not None
            skip(adapter_id, self.reasons[adapter_id])
        self._settled.update(self.reasons)

    def _limits(self, archive: Archive, check: CheckLimits) -> None:
        for record in archive.records:
            try:
                check(record.limits)
            except (ValueError, TypeError) as error:
                self.add(record.adapter_id, f"{record.adapter_id}: limits: {error}")

    def _counts(self, archive: Archive) -> None:
        for record in archive.records:
            name = record.adapter_id
            for what, number in (("versions", len(record.versions)), ("aliases", len(record.aliases))):
                if number > MAX_PER_ID:
                    self.add(name, f"{name}: {number} {what}, and {MAX_PER_ID} are allowed; delete some, then export")

    def _sizes(self, archive: Archive, max_bytes: int) -> None:
        for (adapter_id, version), upload in archive.uploads.items():
            if (num_bytes := archive.contents[upload.key].num_bytes) > max_bytes:
                self.add(adapter_id, f"{adapter_id}@{version}: {BlobTooLarge(num_bytes, max_bytes)}")

    def _defaults(self, archive: Archive, check: CheckDefaults) -> None:
        for at, defaults in archive.defaults.items():
            upload = archive.uploads.get(at)
            try:
                self._sums[at] = check(defaults, {} if upload is None else upload.config)
            except ValueError as error:
                self.add(at[0], f"{at[0]}@{at[1]}: {error}")

    def _add_sums_of_refused(self) -> bool:
        """Refuse sums of refused adapters; return whether there were new ones, which may be parts of other sums."""
        before = len(self.reasons)
        for (adapter_id, version), parts in self._sums.items():
            for part in parts if adapter_id not in self.reasons else ():
                if parse_reference(part.reference).adapter_id in self.reasons:
                    self.add(adapter_id, f"{adapter_id}@{version}: a sum of {show(part.reference)}, which is refused")
        return len(self.reasons) > before
