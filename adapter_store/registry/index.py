"""The store's index: versions, aliases and limits of every id, and the content and origin of each version.

A content (one AdapterKey) is written once and shared by every version that refers to it. Everything else belongs to one
version: the config as sent, the report, the verdict, the defaults. Version numbers are never reused, not even after an
id was deleted, so `mia@3` always means the same. Not thread-safe: the caller holds the store's lock.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from adapter_store.errors import StoreUnusable
from adapter_store.formats.adapter_config import canonical_json, decisive_fields
from adapter_store.quota import ANONYMOUS
from adapter_store.registry.database import sql_errors
from adapter_store.registry.feed import ChangeFeed
from adapter_store.registry.feed_page import WRONG
from adapter_store.registry.records import AdapterRecord, Change, VersionRecord
from adapter_store.registry.references import Shares, check_digest, check_shares
from adapter_store.spec import BF16, AdapterId, AdapterKey, Form
from adapter_store.validation.report import UploadReport

_NO_WEIGHTS = '{"rank_max": 0, "weights_bytes": 0}'


@dataclass(frozen=True, slots=True)
class Content:
    """Describe one immutable content: the weights' digest, the form and, as JSON, the config fields that decide the
    result.
    """

    key: AdapterKey
    weights_digest: str
    config_json: str
    stored: Form = BF16

    @property
    def config(self) -> Mapping[str, object]:
        """Return the parsed config. Parsed on each call: do not call it while holding the store's lock."""
        return _parsed(self.config_json)


@dataclass(frozen=True, slots=True)
class Upload:
    """Describe the origin of one version: its content and, as JSON, the config as sent and the report as answered.

    Other versions of the content have their own origin, perhaps from another uploader.
    """

    content: Content
    config_json: str
    report_json: str

    @classmethod
    def of(cls, config: Mapping[str, object], weights_digest: str, report: UploadReport) -> Self:
        """Build the upload of an adapter that passed the check."""
        content = Content(report.digest, weights_digest, _config_json(decisive_fields(config)), report.stored)
        return cls(content, _config_json(config), canonical_json(report.to_dict()))

    @property
    def config(self) -> Mapping[str, object]:
        """Return the parsed config, as it was sent."""
        return _parsed(self.config_json)

    @property
    def report(self) -> UploadReport:
        """Return the parsed report."""
        return UploadReport.from_dict(_parsed(self.report_json))


def _config_json(config: Mapping[str, object]) -> str:
    # Not sorted: the first pattern that matches counts, so the order of keys is part of a config's meaning.
    return json.dumps(config, separators=(",", ":"), allow_nan=False, default=dict)


def _parsed(text: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(text)
    return values


class Index(ChangeFeed):
    """Read and write the index through one connection.

    Every writing method is one transaction: complete when it returns, undone when it raises. Return values are read
    before the commit, since nothing that can fail may come after it.
    """

    def bind_base(self, fingerprint: str) -> None:
        """Record the base that adapters are checked for."""
        if self.base() == fingerprint:
            return
        with self._transaction():
            self._db.execute("DELETE FROM base")
            self._db.execute("INSERT INTO base VALUES (?)", (fingerprint,))

    def is_empty(self) -> bool:
        """Return whether there is no id."""
        with sql_errors():
            return self._db.execute("SELECT 1 FROM adapters").fetchone() is None

    def records(self, adapter_id: AdapterId | None = None) -> dict[AdapterId, AdapterRecord]:
        """Return every id with its versions, or only the one given."""
        return self._records(*(("WHERE adapter_id = ?", (adapter_id,)) if adapter_id is not None else ("", ())))

    def checked_records(self) -> dict[AdapterId, AdapterRecord]:
        """Return every id with its versions, for a store that is being opened, after checking every row: an earlier
        lorasrv may have accepted rows that this one cannot read.

        Raises:
            StoreUnusable: a row cannot be read, or has a malformed digest (digests become paths).
        """
        try:
            for digest in self.referenced_digests():
                check_digest(digest)
            return self.records()
        except WRONG as error:
            fix = "put back a copy of the folder"
            if self.position() is not None:
                fix = "delete the folder, and everything comes again from the registry"
            raise StoreUnusable(f"its index has a row that cannot be read ({error!r:.200}): {fix}") from error

    def changed_since(self, revision: int) -> dict[AdapterId, AdapterRecord | None]:
        """Return the ids that changed after a revision, with their versions; None for deleted ids."""
        changed = "SELECT adapter_id FROM last_versions WHERE revision > ?"
        with sql_errors():
            names = [AdapterId(name) for (name,) in self._db.execute(changed, (revision,))]
        found = self._records(f"WHERE adapter_id IN ({changed})", (revision,))
        return {name: found.get(name) for name in names}

    def _records(self, where: str, values: tuple[str | int, ...]) -> dict[AdapterId, AdapterRecord]:
        versions: dict[AdapterId, list[VersionRecord]] = {}
        with sql_errors():
            rows = self._db.execute(
                "SELECT adapter_id, version, key, versions.created_s, coalesce(report, ?), "
                "coalesce(weights_digest, ''), coalesce(stored, ?), coalesce(digest, '') "
                "FROM versions LEFT JOIN contents USING (key) LEFT JOIN uploads USING (adapter_id, version) "
                f"LEFT JOIN personas USING (adapter_id, version) {where} ORDER BY adapter_id, version",
                (_NO_WEIGHTS, BF16, *values),
            )
            for name, version, key, created_s, report, *content in rows:
                facts = json.loads(report)
                numbers = int(facts["rank_max"]), int(facts["weights_bytes"])
                record = VersionRecord(version, key, created_s, *numbers, *content)
                versions.setdefault(name, []).append(record)
            rows = self._db.execute(f"SELECT adapter_id, limits FROM adapter_limits {where}", values)
            limits = {name: json.loads(text) for name, text in rows}
            aliases = self._aliases(where, values)
            heads = self._db.execute(f"SELECT adapter_id, current_version, created_s FROM adapters {where}", values)
            return {
                name: AdapterRecord.of(name, current, created_s, versions[name], limits.get(name), aliases.get(name))
                for name, current, created_s in heads
            }

    def _aliases(self, where: str, values: tuple[str | int, ...]) -> dict[AdapterId, dict[str, dict[int, float]]]:
        found: dict[AdapterId, dict[str, dict[int, float]]] = {}
        query = f"SELECT adapter_id, alias, version, share FROM aliases {where} ORDER BY adapter_id, alias, version"
        for name, alias, version, share in self._db.execute(query, values):
            found.setdefault(name, {}).setdefault(alias, {})[version] = share
        return found

    def content(self, key: AdapterKey) -> Content | None:
        """Return a content by its key, or None."""
        with sql_errors():
            query = "SELECT weights_digest, config, stored FROM contents WHERE key = ?"
            row = self._db.execute(query, (key,)).fetchone()
        return Content(key, *row) if row is not None else None

    def upload(self, adapter_id: AdapterId, version: int) -> Upload | None:
        """Return the origin of a version's weights, or None if there is no such version or it has no weights."""
        query = (
            "SELECT key, weights_digest, contents.config, stored, uploads.config, report "
            "FROM uploads JOIN versions USING (adapter_id, version) JOIN contents USING (key) "
            "WHERE adapter_id = ? AND version = ?"
        )
        with sql_errors():
            row = self._db.execute(query, (adapter_id, version)).fetchone()
        return Upload(Content(*row[:4]), *row[4:]) if row is not None else None

    def defaults(self, adapter_id: AdapterId, version: int) -> str | None:
        """Return a version's defaults as they were sent, or None."""
        query = "SELECT defaults FROM personas WHERE adapter_id = ? AND version = ?"
        with sql_errors():
            row = self._db.execute(query, (adapter_id, version)).fetchone()
        return row[0] if row is not None else None

    def all_defaults(self) -> dict[tuple[AdapterId, int], str]:
        """Return the defaults of every version with defaults."""
        with sql_errors():
            rows = self._db.execute("SELECT adapter_id, version, defaults FROM personas")
            return {(adapter_id, version): defaults for adapter_id, version, defaults in rows}

    def persona_digest(self, adapter_id: AdapterId, principal: str, key: AdapterKey | None, defaults: str) -> str:
        """Return the keyed digest of defaults and weights, comparable only within a store, an id and an owner."""
        with sql_errors():
            secret: str = self._db.execute("SELECT hex FROM persona_key").fetchone()[0]
        facts = json.dumps([adapter_id, principal, key, defaults])
        return hmac.new(secret.encode(), facts.encode(), hashlib.sha256).hexdigest()

    def keys(self) -> set[AdapterKey]:
        """Return the keys of all contents, whether or not a version refers to them."""
        with sql_errors():
            return {key for (key,) in self._db.execute("SELECT key FROM contents")}

    def referenced_digests(self) -> set[str]:
        """Return the digests that contents refer to."""
        with sql_errors():
            return {row[0] for row in self._db.execute("SELECT weights_digest FROM contents")}

    def may_reference(self, digest: str) -> bool:
        """Return whether a content refers to a digest, now or after any crash."""
        self.discard_failed_commit()
        return self.is_referenced(digest)

    def is_referenced(self, digest: str) -> bool:
        """Return whether a content refers to a digest."""
        with sql_errors():
            return self._db.execute("SELECT 1 FROM contents WHERE weights_digest = ?", (digest,)).fetchone() is not None

    def uploads(self) -> Iterator[tuple[AdapterId, int, Upload]]:
        """Yield every version that has weights with its origin, ordered by content."""
        with sql_errors():
            query = "SELECT adapter_id, version FROM versions WHERE key IS NOT NULL ORDER BY key, 1, 2"
            found = self._db.execute(query).fetchall()
        for adapter_id, version in found:
            upload = self.upload(adapter_id, version)
            assert upload is not None
            yield adapter_id, version, upload

    def versions_by_digest(self) -> dict[str, list[str]]:
        """Return the versions (`mia@3`) that use each digest of weights."""
        found: dict[str, list[str]] = {}
        with sql_errors():
            query = "SELECT weights_digest, adapter_id, version FROM versions JOIN contents USING (key) ORDER BY 2, 3"
            for digest, adapter_id, version in self._db.execute(query):
                found.setdefault(digest, []).append(f"{adapter_id}@{version}")
        return found

    def owners(self, adapter_id: AdapterId | None = None) -> dict[tuple[AdapterId, int], str]:
        """Return the principals of versions, without "anonymous": of all versions, or of one id's."""
        where, values = ("", ()) if adapter_id is None else (" WHERE adapter_id = ?", (adapter_id,))
        with sql_errors():
            rows = self._db.execute(f"SELECT adapter_id, version, principal FROM owners{where}", values)
            return {(adapter_id, version): principal for adapter_id, version, principal in rows}

    def owner(self, adapter_id: AdapterId, version: int) -> str:
        """Return the principal of a version."""
        query = "SELECT principal FROM owners WHERE adapter_id = ? AND version = ?"
        with sql_errors():
            row = self._db.execute(query, (adapter_id, version)).fetchone()
        return row[0] if row is not None else ANONYMOUS

    def last_versions(self) -> dict[AdapterId, int]:
        """Return the highest number that each id has used, including deleted ids and versions."""
        with sql_errors():
            return dict(self._db.execute("SELECT adapter_id, version FROM last_versions ORDER BY 1").fetchall())

    def add_version(
        self,
        adapter_id: AdapterId,
        upload: Upload | None,
        now_s: float,
        *,
        defaults: str = "",
        alias: str | None = None,
        principal: str = ANONYMOUS,
        admit: Callable[[], None] = lambda: None,
    ) -> tuple[int, bool, AdapterRecord]:
        """Point the id, and the alias, to this content with these defaults. A version is added unless the id already
        has one with both. A version whose defaults have another owner does not count.

        Args:
            upload: the weights, or None.
            defaults: JSON, or "" for no defaults.
            admit: called before a version is added; nothing changes if it raises.

        Returns:
            The version, whether it is new, and the id's new record.
        """
        with self._changing(adapter_id):
            version = self._find_version(
                adapter_id, None if upload is None else upload.content.key, defaults, principal
            )
            created = version is None
            if version is None:
                admit()
                version = self._add_version(adapter_id, upload, defaults, now_s, principal)
            else:
                self._set_current(adapter_id, version)
            if alias is not None:
                self._set_alias(adapter_id, alias, {version: 1.0})
            return version, created, self.records(adapter_id)[adapter_id]

    def _add_version(
        self, adapter_id: AdapterId, upload: Upload | None, defaults: str, now_s: float, principal: str
    ) -> int:
        if upload is not None:
            self._insert_content(upload.content, now_s)
        version = self._next_version(adapter_id)
        self._db.execute(
            "INSERT INTO adapters VALUES (?, ?, ?) "
            "ON CONFLICT (adapter_id) DO UPDATE SET current_version = excluded.current_version",
            (adapter_id, version, now_s),
        )
        self._insert_version(adapter_id, version, upload, defaults, now_s, principal)
        return version

    def _insert_version(
        self,
        adapter_id: AdapterId,
        version: int,
        upload: Upload | None,
        defaults: str,
        created_s: float,
        principal: str,
    ) -> None:
        key = None if upload is None else upload.content.key
        self._db.execute("INSERT INTO versions VALUES (?, ?, ?, ?)", (adapter_id, version, key, created_s))
        if upload is not None:
            texts = (adapter_id, version, upload.report_json, upload.config_json)
            self._db.execute("INSERT INTO uploads VALUES (?, ?, ?, ?)", texts)
        if defaults:
            digest = self.persona_digest(adapter_id, principal, key, defaults)
            row = (adapter_id, version, digest, defaults)
            self._db.execute("INSERT INTO personas VALUES (?, ?, ?, ?)", row)
        if principal != ANONYMOUS:
            self._db.execute("INSERT INTO owners VALUES (?, ?, ?)", (adapter_id, version, principal))

    def _insert_content(self, content: Content, now_s: float) -> None:
        row = (content.key, content.weights_digest, content.config_json, now_s, content.stored)
        self._db.execute("INSERT INTO contents VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING", row)

    def _find_version(self, adapter_id: AdapterId, key: AdapterKey | None, defaults: str, principal: str) -> int | None:
        """Return the version with this content and these defaults; only the owner of defaults finds them."""
        query = (
            "SELECT max(version) FROM versions LEFT JOIN personas USING (adapter_id, version) "
            "LEFT JOIN owners USING (adapter_id, version) "
            "WHERE adapter_id = ? AND key IS ? AND coalesce(defaults, '') = ? "
            "AND (defaults IS NULL OR coalesce(principal, ?) = ?)"
        )
        values = (adapter_id, key, defaults, ANONYMOUS, principal)
        found: int | None = self._db.execute(query, values).fetchone()[0]
        return found

    def _next_version(self, adapter_id: AdapterId) -> int:
        row = self._db.execute(
            "INSERT INTO last_versions VALUES (?, 1, 0) ON CONFLICT (adapter_id) DO UPDATE SET version = version + 1 "
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
        defaults: Mapping[tuple[AdapterId, int], str],
    ) -> None:
        """Add complete ids that do not exist yet; version numbers used so far stay used.

        A version that is not in `uploads` has no weights.
        """
        with self._changing(*last_versions):
            for upload in uploads.values():
                self._insert_content(upload.content, time.time())
            for record in records:
                name = record.adapter_id
                row = (name, record.current_version, record.created_s)
                self._db.execute("INSERT INTO adapters VALUES (?, ?, ?)", row)
                for v in record.versions:
                    at = (name, v.version)
                    owner = owners.get(at, ANONYMOUS)
                    self._insert_version(*at, uploads.get(at), defaults.get(at, ""), v.created_s, owner)
                for alias, shares in record.aliases.items():
                    self._set_alias(name, alias, shares)
                self._set_limits(name, record.limits)
            self._db.executemany(
                "INSERT INTO last_versions VALUES (?, ?, 0) "
                "ON CONFLICT (adapter_id) DO UPDATE SET version = max(version, excluded.version)",
                list(last_versions.items()),
            )

    def change(self, adapter_id: AdapterId, change: Change) -> AdapterRecord:
        """Apply a change to an existing id and return the new record. The caller has checked the change's versions."""
        with self._changing(adapter_id):
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
        """Point an alias to versions; an empty mapping removes it."""
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
        self, record: AdapterRecord, deleted: frozenset[int]
    ) -> tuple[AdapterRecord | None, frozenset[AdapterKey]]:
        """Remove versions and every alias that points to one of them; contents stay until `delete_contents`.

        The id moves to its highest remaining version, or is removed.

        Returns:
            The id's new record (None if it was removed), and the contents that no version refers to any more.
        """
        adapter_id, kept = record.adapter_id, [v.version for v in record.versions if v.version not in deleted]
        with self._changing(adapter_id):
            for alias in record.aliases_of(deleted):
                self._set_alias(adapter_id, alias, {})
            rows = [(adapter_id, version) for version in sorted(deleted)]
            self._db.executemany("DELETE FROM versions WHERE adapter_id = ? AND version = ?", rows)
            if not kept:
                self._db.execute("DELETE FROM adapter_limits WHERE adapter_id = ?", (adapter_id,))
                self._db.execute("DELETE FROM adapters WHERE adapter_id = ?", (adapter_id,))
            elif record.current_version in deleted:
                self._set_current(adapter_id, max(kept))
            keys = {v.key for v in record.versions if v.version in deleted and v.key is not None}
            unnamed = frozenset(key for key in keys if not self.is_named(key))
            return self.records(adapter_id).get(adapter_id), unnamed

    def is_named(self, key: AdapterKey) -> bool:
        """Return whether any version refers to this content."""
        with sql_errors():
            return self._db.execute("SELECT 1 FROM versions WHERE key = ?", (key,)).fetchone() is not None

    def unreferenced_contents(self) -> set[AdapterKey]:
        """Return the contents that no version refers to."""
        with sql_errors():
            rows = self._db.execute(
                "SELECT key FROM contents WHERE key NOT IN (SELECT key FROM versions WHERE key IS NOT NULL)"
            )
            return {key for (key,) in rows}

    def record_verdict(self, adapter_id: AdapterId, version: int, verdict: Mapping[str, object]) -> None:
        """Store the verdict about an existing version, replacing an earlier one."""
        row = (adapter_id, version, json.dumps(dict(verdict), allow_nan=False), time.time())
        with self._changing(adapter_id):
            self._db.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?)", row)

    def verdict(self, adapter_id: AdapterId, version: int) -> Mapping[str, object] | None:
        """Return the last verdict recorded about a version, or None."""
        query = "SELECT verdict FROM verdicts WHERE adapter_id = ? AND version = ?"
        with sql_errors():
            row = self._db.execute(query, (adapter_id, version)).fetchone()
        found: Mapping[str, object] | None = None if row is None else json.loads(row[0])
        return found

    def delete_contents(self, keys: Collection[AdapterKey]) -> set[str]:
        """Remove contents that no version refers to; return the digests that no content refers to any more."""
        query = "DELETE FROM contents WHERE key = ? RETURNING weights_digest"
        with self._transaction():
            dropped = [row for key in sorted(keys) for row in self._db.execute(query, (key,)).fetchall()]
            return {digest for (digest,) in dropped if not self.is_referenced(digest)}
