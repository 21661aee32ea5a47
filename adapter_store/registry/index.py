"""The store's index: which id has which versions, aliases and limits, and what each version is.

A content (one AdapterKey) is written once and shared by every version that names it. What is not part of it belongs to
the one version that it came with: the config as it was sent, the report, the verdict. Version numbers are never used
twice, not even after an id was deleted, so `mia@3` means one thing for ever. Not thread-safe: the store's lock is.
"""

import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from adapter_store.formats.adapter_config import canonical_json, decisive
from adapter_store.quota import ANONYMOUS, StoreQuota, Usage
from adapter_store.registry.database import Database, sql_errors
from adapter_store.registry.records import AdapterRecord, Change, VersionRecord
from adapter_store.registry.references import Shares, check_shares
from adapter_store.spec import AdapterId, AdapterKey
from adapter_store.validation.report import UploadReport

NO_QUOTA = StoreQuota()


@dataclass(frozen=True, slots=True)
class Content:
    """One immutable content: the weights' digest and, as JSON, what of a config decides what they compute."""

    key: AdapterKey
    weights_digest: str
    config_json: str

    @property
    def config(self) -> Mapping[str, object]:
        """Parsed each time: that is not for whoever holds the store's lock."""
        return _parsed(self.config_json)


@dataclass(frozen=True, slots=True)
class Upload:
    """What one version came from: a content, and as JSON the config as it was sent and the report that was the answer.
    Another version of the content has its own, which may be somebody else's."""

    content: Content
    config_json: str
    report_json: str

    @classmethod
    def of(cls, config: Mapping[str, object], weights_digest: str, report: UploadReport) -> Self:
        """Of an adapter that passed."""
        content = Content(report.digest, weights_digest, _config_json(decisive(config)))
        return cls(content, _config_json(config), canonical_json(report.to_dict()))

    @property
    def config(self) -> Mapping[str, object]:
        return _parsed(self.config_json)

    @property
    def report(self) -> UploadReport:
        return UploadReport.from_dict(_parsed(self.report_json))


def _config_json(config: Mapping[str, object]) -> str:
    # Insertion order is kept: the first pattern that matches counts, so sorting would change what a config means.
    return json.dumps(config, separators=(",", ":"), allow_nan=False, default=dict)


def _parsed(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    return values


class Index(Database):
    """One connection. Every writing method is one transaction: done when it returns, undone when it raises. What it
    returns is read before the transaction ends, as nothing that fails may come after it: what is done would be refused.
    """

    def base(self) -> str | None:
        """The base that adapters were checked for, as `bind_base` was told."""
        with sql_errors():
            row = self._db.execute("SELECT fingerprint FROM base").fetchone()
        return row[0] if row is not None else None

    def bind_base(self, fingerprint: str) -> None:
        """Remember which base the adapters are checked for."""
        if self.base() == fingerprint:
            return
        with self._transaction():
            self._db.execute("DELETE FROM base")
            self._db.execute("INSERT INTO base VALUES (?)", (fingerprint,))

    def is_empty(self) -> bool:
        """Whether there is no id."""
        with sql_errors():
            return self._db.execute("SELECT 1 FROM adapters").fetchone() is None

    def records(self, adapter_id: AdapterId | None = None) -> dict[AdapterId, AdapterRecord]:
        """Every id with its versions, or the one asked for."""
        where, values = ("WHERE adapter_id = ?", (adapter_id,)) if adapter_id is not None else ("", ())
        versions: dict[AdapterId, list[VersionRecord]] = {}
        with sql_errors():
            rows = self._db.execute(
                "SELECT adapter_id, version, key, versions.created_s, report, weights_digest "
                "FROM versions JOIN contents USING (key) JOIN uploads USING (adapter_id, version) "
                f"{where} ORDER BY adapter_id, version",
                values,
            )
            for name, version, key, created_s, report, digest in rows:
                facts = json.loads(report)
                record = VersionRecord(version, key, created_s, facts["rank_max"], facts["weights_bytes"], digest)
                versions.setdefault(name, []).append(record)
            rows = self._db.execute(f"SELECT adapter_id, limits FROM adapter_limits {where}", values)
            limits = {name: json.loads(text) for name, text in rows}
            aliases = self._aliases(where, values)
            heads = self._db.execute(f"SELECT adapter_id, current_version, created_s FROM adapters {where}", values)
            return {
                name: AdapterRecord.of(name, current, created_s, versions[name], limits.get(name), aliases.get(name))
                for name, current, created_s in heads
            }

    def _aliases(self, where: str, values: tuple[str, ...]) -> dict[AdapterId, dict[str, dict[int, float]]]:
        found: dict[AdapterId, dict[str, dict[int, float]]] = {}
        query = f"SELECT adapter_id, alias, version, share FROM aliases {where} ORDER BY adapter_id, alias, version"
        for name, alias, version, share in self._db.execute(query, values):
            found.setdefault(name, {}).setdefault(alias, {})[version] = share
        return found

    def content(self, key: AdapterKey) -> Content | None:
        with sql_errors():
            row = self._db.execute("SELECT weights_digest, config FROM contents WHERE key = ?", (key,)).fetchone()
        return Content(key, *row) if row is not None else None

    def upload(self, adapter_id: AdapterId, version: int) -> Upload | None:
        """What a version came from; None: there is no such version."""
        query = (
            "SELECT key, weights_digest, contents.config, uploads.config, report "
            "FROM uploads JOIN versions USING (adapter_id, version) JOIN contents USING (key) "
            "WHERE adapter_id = ? AND version = ?"
        )
        with sql_errors():
            row = self._db.execute(query, (adapter_id, version)).fetchone()
        return Upload(Content(*row[:3]), *row[3:]) if row is not None else None

    def keys(self) -> set[AdapterKey]:
        """Of all contents, named or not."""
        with sql_errors():
            return {key for (key,) in self._db.execute("SELECT key FROM contents")}

    def referenced_digests(self) -> set[str]:
        with sql_errors():
            return {row[0] for row in self._db.execute("SELECT weights_digest FROM contents")}

    def may_name(self, digest: str) -> bool:
        """Whether a content names a digest, now or after any crash."""
        self.settle()
        return self.is_referenced(digest)

    def is_referenced(self, digest: str) -> bool:
        with sql_errors():
            return self._db.execute("SELECT 1 FROM contents WHERE weights_digest = ?", (digest,)).fetchone() is not None

    def uploads(self) -> Iterator[tuple[AdapterId, int, Upload]]:
        """Every version, by content."""
        with sql_errors():
            found = self._db.execute("SELECT adapter_id, version FROM versions ORDER BY key, 1, 2").fetchall()
        for adapter_id, version in found:
            upload = self.upload(adapter_id, version)
            assert upload is not None
            yield adapter_id, version, upload

    def users(self) -> dict[str, list[str]]:
        """Digest of weights -> the versions (`mia@3`) that have them."""
        found: dict[str, list[str]] = {}
        with sql_errors():
            query = "SELECT weights_digest, adapter_id, version FROM versions JOIN contents USING (key) ORDER BY 2, 3"
            for digest, adapter_id, version in self._db.execute(query):
                found.setdefault(digest, []).append(f"{adapter_id}@{version}")
        return found

    def owners(self) -> dict[tuple[AdapterId, int], str]:
        """Who made a version, where that was not "anonymous"."""
        with sql_errors():
            rows = self._db.execute("SELECT adapter_id, version, principal FROM owners")
            return {(adapter_id, version): principal for adapter_id, version, principal in rows}

    def last_versions(self) -> dict[AdapterId, int]:
        """The highest number that an id has used, also one that is gone."""
        with sql_errors():
            return dict(self._db.execute("SELECT adapter_id, version FROM last_versions ORDER BY 1").fetchall())

    def usage(self, principal: str | None = None) -> Usage:
        """What a principal's versions come to, or everybody's."""
        of = (
            "FROM versions LEFT JOIN owners USING (adapter_id, version) JOIN contents USING (key) "
            "JOIN uploads USING (adapter_id, version) WHERE ?1 IS NULL OR coalesce(principal, ?2) = ?1"
        )
        # Every content of one file has the same number of bytes.
        each = f"SELECT max(json_extract(report, '$.weights_bytes')) AS bytes {of} GROUP BY weights_digest"
        values = (principal, ANONYMOUS)
        with sql_errors():
            count = self._db.execute(f"SELECT count(*) {of}", values).fetchone()[0]
            total = self._db.execute(f"SELECT coalesce(sum(bytes), 0) FROM ({each})", values).fetchone()[0]
        return Usage(int(count), int(total))

    def add_version(
        self,
        adapter_id: AdapterId,
        upload: Upload,
        now_s: float,
        *,
        alias: str | None = None,
        principal: str = ANONYMOUS,
        quota: StoreQuota = NO_QUOTA,
    ) -> tuple[int, bool, AdapterRecord]:
        """Move the id, and the alias, to this content: (version, whether it is a new one, the id as it is then). A
        content that the id has had before gets its old version back.

        Raises: QuotaExceeded: a new version would be more than the quota allows.
        """
        with self._transaction():
            version = self._find_version(adapter_id, upload.content.key)
            created = version is None
            if version is None:
                version = self._add_within_quota(adapter_id, upload, now_s, principal, quota)
            else:
                self._set_current(adapter_id, version)
            if alias is not None:
                self._set_alias(adapter_id, alias, {version: 1.0})
            return version, created, self.records(adapter_id)[adapter_id]

    def _add_within_quota(
        self, adapter_id: AdapterId, upload: Upload, now_s: float, principal: str, quota: StoreQuota
    ) -> int:
        counted = (None, principal) if quota.is_set else ()
        before = {whose: self.usage(whose) for whose in counted}
        self._insert_content(upload.content, now_s)
        version = self._next_version(adapter_id)
        self._db.execute(
            "INSERT INTO adapters VALUES (?, ?, ?) "
            "ON CONFLICT (adapter_id) DO UPDATE SET current_version = excluded.current_version",
            (adapter_id, version, now_s),
        )
        self._insert_version(adapter_id, version, upload, now_s, principal)
        if quota.is_set:
            quota.check(principal, before, {whose: self.usage(whose) for whose in counted})
        return version

    def _insert_version(
        self, adapter_id: AdapterId, version: int, upload: Upload, created_s: float, principal: str
    ) -> None:
        row = (adapter_id, version, upload.content.key, created_s)
        self._db.execute("INSERT INTO versions VALUES (?, ?, ?, ?)", row)
        texts = (adapter_id, version, upload.report_json, upload.config_json)
        self._db.execute("INSERT INTO uploads VALUES (?, ?, ?, ?)", texts)
        if principal != ANONYMOUS:
            self._db.execute("INSERT INTO owners VALUES (?, ?, ?)", (adapter_id, version, principal))

    def _insert_content(self, content: Content, now_s: float) -> None:
        row = (content.key, content.weights_digest, content.config_json, now_s)
        self._db.execute("INSERT INTO contents VALUES (?, ?, ?, ?) ON CONFLICT (key) DO NOTHING", row)

    def _find_version(self, adapter_id: AdapterId, key: AdapterKey) -> int | None:
        query = "SELECT max(version) FROM versions WHERE adapter_id = ? AND key = ?"
        found: int | None = self._db.execute(query, (adapter_id, key)).fetchone()[0]
        return found

    def _next_version(self, adapter_id: AdapterId) -> int:
        row = self._db.execute(
            "INSERT INTO last_versions VALUES (?, 1) ON CONFLICT (adapter_id) DO UPDATE SET version = version + 1 "
            "RETURNING version",
            (adapter_id,),
        ).fetchone()
        return int(row[0])

    def restore(
        self,
        records: Collection[AdapterRecord],
        uploads: Mapping[tuple[AdapterId, int], Upload],
        last_versions: Mapping[AdapterId, int],
        owners: Mapping[tuple[AdapterId, int], str],
    ) -> None:
        """Add ids that there are none of, with everything that belongs to them. Numbers used stay used."""
        with self._transaction():
            for upload in uploads.values():
                self._insert_content(upload.content, time.time())
            for record in records:
                name = record.adapter_id
                row = (name, record.current_version, record.created_s)
                self._db.execute("INSERT INTO adapters VALUES (?, ?, ?)", row)
                for v in record.versions:
                    at = (name, v.version)
                    self._insert_version(*at, uploads[at], v.created_s, owners.get(at, ANONYMOUS))
                for alias, shares in record.aliases.items():
                    self._set_alias(name, alias, shares)
                self._set_limits(name, record.limits)
            self._db.executemany(
                "INSERT INTO last_versions VALUES (?, ?) "
                "ON CONFLICT (adapter_id) DO UPDATE SET version = max(version, excluded.version)",
                list(last_versions.items()),
            )

    def change(self, adapter_id: AdapterId, change: Change) -> AdapterRecord:
        """Do all of it about an id that there is, whose versions are known to be there; returns what it is then."""
        with self._transaction():
            if change.version is not None:
                self._set_current(adapter_id, change.version)
            for alias, target in change.aliases.items():
                self._set_alias(adapter_id, alias, {} if target is None else check_shares(alias, target))
            if change.limits is not None:
                self._set_limits(adapter_id, change.limits)
            return self.records(adapter_id)[adapter_id]

    def _set_current(self, adapter_id: AdapterId, version: int) -> None:
        self._db.execute("UPDATE adapters SET current_version = ? WHERE adapter_id = ?", (version, adapter_id))

    def _set_alias(self, adapter_id: AdapterId, alias: str, shares: Shares) -> None:
        """Point an alias to versions; to none: it goes."""
        self._db.execute("DELETE FROM aliases WHERE adapter_id = ? AND alias = ?", (adapter_id, alias))
        rows = [(adapter_id, alias, version, share) for version, share in shares.items()]
        self._db.executemany("INSERT INTO aliases VALUES (?, ?, ?, ?)", rows)

    def _set_limits(self, adapter_id: AdapterId, limits: Mapping[str, float]) -> None:
        if not limits:
            self._db.execute("DELETE FROM adapter_limits WHERE adapter_id = ?", (adapter_id,))
            return
        self._db.execute(
            "INSERT INTO adapter_limits VALUES (?, ?) ON CONFLICT (adapter_id) DO UPDATE SET limits = excluded.limits",
            (adapter_id, json.dumps(dict(limits), allow_nan=False)),
        )

    def delete_versions(
        self, record: AdapterRecord, doomed: frozenset[int]
    ) -> tuple[AdapterRecord | None, frozenset[AdapterKey]]:
        """Remove versions and every alias that names one of them; the id moves to the highest version that is left, or
        goes: (what is left of it, contents that no version names now). Contents stay until they are dropped."""
        adapter_id, kept = record.adapter_id, [v.version for v in record.versions if v.version not in doomed]
        with self._transaction():
            for alias in record.aliases_of(doomed):
                self._set_alias(adapter_id, alias, {})
            rows = [(adapter_id, version) for version in sorted(doomed)]
            self._db.executemany("DELETE FROM versions WHERE adapter_id = ? AND version = ?", rows)
            if not kept:
                self._db.execute("DELETE FROM adapter_limits WHERE adapter_id = ?", (adapter_id,))
                self._db.execute("DELETE FROM adapters WHERE adapter_id = ?", (adapter_id,))
            elif record.current_version in doomed:
                self._set_current(adapter_id, max(kept))
            unnamed = frozenset(v.key for v in record.versions if v.version in doomed and not self.is_named(v.key))
            return self.records(adapter_id).get(adapter_id), unnamed

    def is_named(self, key: AdapterKey) -> bool:
        """Whether any version names this content."""
        with sql_errors():
            return self._db.execute("SELECT 1 FROM versions WHERE key = ?", (key,)).fetchone() is not None

    def unnamed(self) -> set[AdapterKey]:
        """Contents that no version names."""
        with sql_errors():
            rows = self._db.execute("SELECT key FROM contents WHERE key NOT IN (SELECT key FROM versions)")
            return {key for (key,) in rows}

    def record_verdict(self, adapter_id: AdapterId, version: int, verdict: Mapping[str, object]) -> None:
        """Replace the verdict about a version that there is."""
        row = (adapter_id, version, json.dumps(dict(verdict), allow_nan=False), time.time())
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?)", row)

    def verdict(self, adapter_id: AdapterId, version: int) -> Mapping[str, object] | None:
        """What was recorded last about a version."""
        query = "SELECT verdict FROM verdicts WHERE adapter_id = ? AND version = ?"
        with sql_errors():
            row = self._db.execute(query, (adapter_id, version)).fetchone()
        found: Mapping[str, object] | None = None if row is None else json.loads(row[0])
        return found

    def drop(self, keys: Collection[AdapterKey]) -> set[str]:
        """Remove contents that no version names; returns the digests that no content names now."""
        query = "DELETE FROM contents WHERE key = ? RETURNING weights_digest"
        with self._transaction():
            dropped = [row for key in sorted(keys) for row in self._db.execute(query, (key,)).fetchall()]
            return {digest for (digest,) in dropped if not self.is_referenced(digest)}
