"""Format of an archive, a whole store in one file: a JSON manifest followed by every blob, in a plain tar.

    lorasrv-store.json       format number, base, contents, ids with versions, their configs and defaults, aliases,
                             limits
    blobs/sha256/<digest>    weights, each once

Verdicts are not included: they describe the machine they were found on.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from adapter_store.errors import AdapterError, InvalidArchive, show
from adapter_store.registry.base_identity import BaseIdentity
from adapter_store.registry.records import AdapterRecord, VersionRecord
from adapter_store.registry.references import (
    Shares,
    check_adapter_id,
    check_alias,
    check_digest,
    check_shares,
    target_from_json,
    target_to_json,
)
from adapter_store.spec import BF16, FORMS, INT8, AdapterId, AdapterKey, Form

FORMAT = 4
# In format 1, all versions of a content had the config of its first uploader. Up to format 2, all forms were bf16. Up
# to format 3, every version had weights and none had defaults.
READABLE = (1, 2, 3, FORMAT)
KIND = "lorasrv-store"
MANIFEST = "lorasrv-store.json"
BLOBS = "blobs/sha256/"
# A version takes about 2 KB, and its defaults up to 256 KiB: enough for 100,000 versions with defaults of 16 KB, and
# small enough to read at once.
MAX_MANIFEST_BYTES = 2 << 30
MAX_VERSION = 2**62
MAX_NUMBER = 1e18
UPLOADERS_OWN = ("base_model_name_or_path", "revision")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ArchivedContent:
    """Describe a content in the archive; `num_bytes` is the size of its blob including the header."""

    key: AdapterKey
    weights_digest: str
    num_bytes: int
    stored: Form = BF16


@dataclass(frozen=True, slots=True)
class ArchivedUpload:
    """Describe the origin of a version. `is_partial`: its uploader allowed missing modules."""

    key: AdapterKey
    config: Mapping[str, object]
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Archive:
    """Hold the manifest. Ranks and bytes in `records` are 0: an import reads them from the weights.

    A version that is not in `uploads` has no weights. `defaults` are JSON, as in `AdapterStore.register`.
    """

    base: str
    contents: Mapping[AdapterKey, ArchivedContent]
    records: tuple[AdapterRecord, ...]
    uploads: Mapping[tuple[AdapterId, int], ArchivedUpload] = field(default_factory=dict)
    last_versions: Mapping[AdapterId, int] = field(default_factory=dict)
    owners: Mapping[tuple[AdapterId, int], str] = field(default_factory=dict)
    defaults: Mapping[tuple[AdapterId, int], str] = field(default_factory=dict)

    @property
    def blobs(self) -> dict[str, int]:
        """Return the number of bytes of each blob by digest, sorted."""
        return dict(sorted((c.weights_digest, c.num_bytes) for c in self.contents.values()))

    def without(self, refused: Collection[AdapterId]) -> "Archive":
        """Return the archive without some ids and the contents that only these refer to."""
        uploads = {at: upload for at, upload in self.uploads.items() if at[0] not in refused}
        keys = {upload.key for upload in uploads.values()}
        return Archive(
            self.base,
            {key: content for key, content in self.contents.items() if key in keys},
            tuple(record for record in self.records if record.adapter_id not in refused),
            uploads,
            {name: version for name, version in self.last_versions.items() if name not in refused},
            {at: owner for at, owner in self.owners.items() if at[0] not in refused},
            {at: defaults for at, defaults in self.defaults.items() if at[0] not in refused},
        )

    def to_json(self) -> bytes:
        """Return the manifest as JSON. The order of a config's fields is kept, since it can matter."""
        manifest = {
            "kind": KIND,
            "format": FORMAT,
            "base": self.base,
            "contents": {c.key: _content_json(c) for c in self.contents.values()},
            "adapters": {r.adapter_id: self._adapter_json(r) for r in self.records},
            "last_versions": dict(self.last_versions),
        }
        return json.dumps(manifest, indent=1, allow_nan=False, default=dict).encode()

    def _adapter_json(self, record: AdapterRecord) -> Json:
        versions: dict[str, Json] = {}
        for v in record.versions:
            at = (record.adapter_id, v.version)
            shown = versions[str(v.version)] = {"content": v.key, "created": v.created_s}
            if (upload := self.uploads.get(at)) is not None:
                shown |= {"config": dict(upload.config)} | ({"partial": True} if upload.is_partial else {})
            if owner := self.owners.get(at):
                shown["owner"] = owner
            if defaults := self.defaults.get(at):
                shown["defaults"] = json.loads(defaults)
        return {
            "version": record.current_version,
            "created": record.created_s,
            "limits": dict(record.limits),
            "aliases": {alias: target_to_json(shares) for alias, shares in record.aliases.items()},
            "versions": versions,
        }


def _content_json(content: ArchivedContent) -> Json:
    return {"weights": content.weights_digest, "bytes": content.num_bytes, "stored": content.stored}


def read_manifest_json(data: bytes) -> Archive:
    """Parse the output of `Archive.to_json` from untrusted bytes.

    Raises:
        InvalidArchive: a value is missing or invalid; the message names its path.
    """
    try:
        manifest = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise InvalidArchive(f"{MANIFEST} of the archive is not JSON") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise InvalidArchive("this is not an archive of an adapter store")
    if manifest.get("format") not in READABLE:
        raise InvalidArchive(
            f"the archive has format {show(manifest.get('format'))}; this lorasrv reads {FORMAT} and older: use the "
            "one that wrote it, or a newer one"
        )
    at = _Place(manifest, "")
    places = dict(at.children("contents"))
    contents = {AdapterKey(key): _content(key, of) for key, of in places.items()}
    records: list[AdapterRecord] = []
    uploads: dict[tuple[AdapterId, int], ArchivedUpload] = {}
    owners: dict[tuple[AdapterId, int], str] = {}
    defaults: dict[tuple[AdapterId, int], str] = {}
    for name, of in at.children("adapters"):
        records.append(_record(name, of, places, uploads, owners, defaults))
    if unnamed := contents.keys() - {upload.key for upload in uploads.values()}:
        raise at.wrong(f"contents.{min(unnamed)}", "no version refers to it")
    last = at.get("last_versions", dict)
    for name, version in last.items():
        if not _is_version(version):
            raise InvalidArchive(f"last_versions.{show(name)} of the archive's manifest is not a version")
        at.checked(f"last_versions.{show(name)}", partial(check_adapter_id, name, frozenset()))
    for record in records:
        last[record.adapter_id] = max(last.get(record.adapter_id, 0), *(v.version for v in record.versions))
    return Archive(_base(at), contents, tuple(records), uploads, last, owners, defaults)


def _no_constant(name: str) -> float:
    raise ValueError(name)


@dataclass(frozen=True, slots=True)
class _Place:
    """Hold an object of the manifest and its path."""

    values: Json
    name: str

    def get(self, field: str, kind: type | tuple[type, ...]) -> Any:
        value = self.values.get(field)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(field)
        return value

    def number(self, field: str) -> float:
        value = self.get(field, (int, float))
        if not abs(value) <= MAX_NUMBER:
            raise self.wrong(show(field))
        return float(value)

    def children(self, field: str) -> list[tuple[str, "_Place"]]:
        of: Json = self.get(field, dict)
        if not all(isinstance(value, dict) for value in of.values()):
            raise self.wrong(field)
        return [(name, _Place(value, f"{self.name}{field}.{show(name)}.")) for name, value in of.items()]

    def wrong(self, field: str, why: object = "missing or of the wrong type") -> InvalidArchive:
        return InvalidArchive(f"{self.name}{field} of the archive's manifest: {why}")

    def checked(self, field: str, check: Callable[[], Any]) -> Any:
        """Return the result of `check`, turning its errors into InvalidArchive with this path."""
        try:
            return check()
        except AdapterError as error:
            raise self.wrong(field, error) from None


def _base(at: _Place) -> str:
    text: str = at.get("base", str)
    try:
        BaseIdentity.from_text(text)
    except (ValueError, RecursionError) as error:
        raise at.wrong("base", error) from None
    return text


def _owner(version: _Place) -> str:
    owner: str = version.get("owner", str)
    if not (owner and owner.isprintable()):
        raise version.wrong("owner", "not the name of a key")
    return owner


def _content(key: str, of: _Place) -> ArchivedContent:
    of.checked("key", lambda: check_digest(key))
    digest = of.checked("weights", lambda: check_digest(of.get("weights", str)))
    num_bytes = of.get("bytes", int)
    if num_bytes < 0:
        raise of.wrong("bytes")
    return ArchivedContent(AdapterKey(key), digest, num_bytes, _form(of))


def _form(content: _Place) -> Form:
    if "stored" not in content.values:
        return BF16
    form = content.get("stored", str)
    if form not in FORMS:
        raise content.wrong("stored", f"not one of {', '.join(FORMS)}")
    return INT8 if form == INT8 else BF16


def _upload(key: str, version: _Place, content: _Place) -> ArchivedUpload:
    own = "config" in version.values
    source = version if own else content
    is_partial = source.values.get("partial", False)
    if not isinstance(is_partial, bool):
        raise source.wrong("partial")
    config: Json = source.get("config", dict)
    # The config's uploader is unknown, and other uploaders must not learn which base it was trained on.
    shown = config if own else {name: value for name, value in config.items() if name not in UPLOADERS_OWN}
    return ArchivedUpload(AdapterKey(key), shown, is_partial)


def _record(
    name: str,
    of: _Place,
    contents: Mapping[str, _Place],
    uploads: dict[tuple[AdapterId, int], ArchivedUpload],
    owners: dict[tuple[AdapterId, int], str],
    defaults: dict[tuple[AdapterId, int], str],
) -> AdapterRecord:
    """Return an id's record, adding origin, owner and defaults of its versions to the other arguments."""
    adapter_id: AdapterId = of.checked("id", lambda: check_adapter_id(name, frozenset()))
    versions: list[VersionRecord] = []
    for number, version in of.children("versions"):
        if not (number.isascii() and number.isdigit() and _is_version(int(number[:20])) and number[0] != "0"):
            raise of.wrong(f"versions.{show(number)}", "not a version number")
        at = (adapter_id, int(number))
        versions.append(VersionRecord(int(number), _key(version, contents), version.number("created"), 0, 0))
        if (key := versions[-1].key) is not None:
            uploads[at] = _upload(key, version, contents[key])
        if "defaults" in version.values:
            defaults[at] = json.dumps(version.get("defaults", dict), separators=(",", ":"), ensure_ascii=False)
        if "owner" in version.values:
            owners[at] = _owner(version)
    numbers = {v.version for v in versions}
    current = of.get("version", int)
    if current not in numbers:
        raise of.wrong("version", "no such version")
    aliases = {alias: _shares(alias, to, of, numbers) for alias, to in of.get("aliases", dict).items()}
    limits = of.get("limits", dict)
    for limit in limits:
        _Place(limits, f"{of.name}limits.").number(limit)
    ordered = sorted(versions, key=lambda v: v.version)
    created_s = of.number("created")
    return AdapterRecord.of(adapter_id, current, created_s, ordered, limits, aliases)


def _key(version: _Place, contents: Mapping[str, _Place]) -> AdapterKey | None:
    """Return the key of a version's content, or None without weights, which only a version with defaults may lack."""
    if "content" in version.values and version.values["content"] is None and "defaults" in version.values:
        return None
    key = version.get("content", str)
    if key not in contents:
        raise version.wrong("content", "no such content in the archive")
    return AdapterKey(key)


def _shares(alias: str, target: object, of: _Place, versions: set[int]) -> Shares:
    def check() -> Shares:
        return check_shares(check_alias(alias), target_from_json(alias, target))

    shares: Shares = of.checked("aliases", check)
    if not versions.issuperset(shares):
        raise of.wrong(f"aliases.{alias}", "no such version")
    return shares


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_VERSION
