"""Restrict the adapter store to what one caller may see. Routes have no other access to it.

A caller's references are looked up among only the names that it may see. Other ids are therefore missing in exactly the
same way as ids that do not exist, and nothing has to be hidden in responses, similar names or timing.
"""

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from adapter_store.composition import Component, Composition
from adapter_store.errors import AdapterNotFound, InvalidDigest, QuotaExceeded, VersionNotFound, show
from adapter_store.quota import SHARED_QUOTAS
from adapter_store.registry.names import Names
from adapter_store.registry.records import AdapterRecord, Change, Deletion, Registration
from adapter_store.registry.references import RESERVED_IDS, Shares, check_adapter_id, check_digest
from adapter_store.spec import AdapterId, AdapterKey, AdapterRef, AdapterSpec
from adapter_store.storage.blobs import BlobUpload
from adapter_store.storage.pending_uploads import Uploader
from adapter_store.store import AdapterStore
from api.auth.principal import Caller, Scope
from api.errors import ApiError
from api.serving.model_list import ModelList
from lorasrv.errors import InvalidRequest

Records = Mapping[AdapterId, AdapterRecord]
MAX_CACHED = 64
"""Number of pattern sets whose matches are cached."""


class ScopedStore:
    """Present the store to one caller. Cheap to create; as current and thread-safe as the store.

    Args:
        user: the caller's user who asks. For a split alias, each user always gets the same version. None: unknown.
        versions: versions to use for references, as `id@version`: those that were resolved earlier for this request.

    Methods that the store also has behave and raise as in the store.
    """

    def __init__(
        self, views: "ScopedStores", caller: Caller, user: str | None = None, versions: Mapping[str, str] | None = None
    ) -> None:
        self.caller = caller
        self.versions = dict(versions or {})
        self._user = user
        self._views = views
        self._store = views.store

    @property
    def is_unrestricted(self) -> bool:
        """Return whether the caller sees everything, including the usage of others."""
        return self.caller.sees_all and self.caller.may(Scope.ADMIN)

    def sees(self, adapter_id: str) -> bool:
        """Return whether the caller may see this id, if it exists."""
        return self.caller.may_see(adapter_id)

    # Names.

    def resolve(self, reference: str) -> AdapterRef:
        sticky_to = (self.caller.principal, self._user) if self._user else ()
        ref = self._names.resolve(self.versions.get(reference, reference), sticky_to)
        self.versions[reference] = f"{ref.adapter_id}@{ref.version}"
        return ref

    def resolve_one(self, reference: str) -> AdapterRef:
        return self._names.resolve_one(reference)

    def resolve_weights(self, reference: str) -> tuple[AdapterRef, AdapterKey]:
        """Return the version that a reference names, as `resolve_one`, and its weights.

        Raises:
            InvalidRequest: the version has no weights.
        """
        ref = self.resolve_one(reference)
        if ref.key is None:
            raise InvalidRequest(f"{ref.adapter_id}@{ref.version} has no weights of its own", param="id")
        return ref, ref.key

    def spec(self, key: AdapterKey) -> AdapterSpec:
        """Return the spec of weights that a reference was resolved to. May read a file's header."""
        return self._store.spec(key)

    def compose(self, components: Iterable[Component], *, is_stored: bool = False) -> Composition:
        """Return the sum of resolved versions. The store knows it as long as something references it.

        Args:
            is_stored: whether the sum is itself a version, which is served as one adapter.
        """
        composition = Composition.of(((c.ref.key, c.weight) for c in components), is_stored=is_stored)
        return self._store.compositions.add(composition)

    def check_composable(self, composition: Composition) -> None:
        """Check that a sum can be served, by reading its files' headers.

        Raises:
            NotComposable: the adapters cannot be summed.
            AdapterError: an adapter of the sum is damaged, or was deleted.
        """
        if composition.key is not None:
            self._store.spec(composition.key)

    def targets(self, reference: str) -> tuple[AdapterRecord, Shares]:
        return self._names.targets(reference)

    def get(self, adapter_id: str) -> AdapterRecord:
        return self._names.get(adapter_id)

    def records(self) -> Records:
        """Return the visible records; as with `AdapterStore.records`, the same object until something changes."""
        return self._visible().records

    def list_adapters(self) -> list[AdapterRecord]:
        records = self.records()
        return [records[name] for name in sorted(records)]

    def models(self, search: str, limit: int | None, after: str | None) -> bytes:
        """Return a page of `ModelList`."""
        visible = self._visible()
        return visible.models.page(visible.records, search, limit, after)

    # Changes.

    def register(self, adapter_id: str, config: Mapping[str, object], digest: str, **options: Any) -> Registration:
        """Register a version for the caller, as `AdapterStore.register` does.

        Raises:
            ApiError: 403, the caller may not use such ids.
        """
        self.check_may_name(adapter_id)
        options |= self.owner
        with self.hide_usage_of_others():
            return self._store.register(adapter_id, config, digest, is_known=self._knows(digest), **options)

    def read_upload(self, digest: str, max_bytes: int) -> bytes:
        """Return a tokenizer that the caller uploaded, as `AddedTokens.read_upload`."""
        tokens, principal = self._store.added_tokens, self.caller.principal
        return tokens.read_upload(digest, max_bytes, principal=principal, is_known=self._knows(digest))

    def check_may_name(self, adapter_id: str, param: str = "id") -> None:
        """Check that the caller may use an id.

        Raises:
            InvalidAdapterId: malformed.
            ApiError: 403, the caller may not use such ids.
        """
        check_adapter_id(adapter_id, RESERVED_IDS)
        if not self.sees(adapter_id):
            globs = ", ".join(self.caller.adapters) or "none at all"
            message = f"this key may use adapter ids like {globs}, and not {show(adapter_id)}"
            raise ApiError(403, message, code="forbidden", param=param)

    def register_defaults(
        self, adapter_id: str, defaults: str, weights_of: AdapterRef | None = None, **options: Any
    ) -> Registration:
        """Register a version for the caller, as `AdapterStore.register_defaults` does.

        Raises:
            ApiError: 403, the caller may not use such ids.
        """
        self.check_may_name(adapter_id)
        options |= self.owner
        with self.hide_usage_of_others(), _without_suggestions():
            return self._store.register_defaults(adapter_id, defaults, weights_of, **options)

    def may_read_defaults(self, owner: str) -> bool:
        """Return whether the caller may read the defaults of a version with this owner."""
        return self.caller.may(Scope.ADMIN) or self.caller.principal == owner

    @property
    def owner(self) -> dict[str, Any]:
        """Return the owner of a new version and its quota, for `AdapterStore.register`."""
        return {"principal": self.caller.principal, "max_bytes": self.caller.limits.max_stored_bytes}

    @contextmanager
    def hide_usage_of_others(self) -> Iterator[None]:
        """Replace quota errors that would reveal how much others have stored.

        Raises:
            ApiError: 507, in place of such an error.
        """
        try:
            yield
        except QuotaExceeded as error:
            if self.is_unrestricted or error.quota not in SHARED_QUOTAS:
                raise
            message = f"quota exceeded: there is no room for it among the adapters of all keys ({error.quota})"
            never = {"x-should-retry": "false"}
            raise ApiError(507, message, code="quota_exceeded", headers=never) from None

    def change(self, adapter_id: str, change: Change, *, if_match: Collection[str] | None = None) -> AdapterRecord:
        self.get(adapter_id)
        with _without_suggestions():
            return self._store.change(adapter_id, change, if_match=if_match)

    def delete(self, reference: str, *, force: bool = False, if_match: Collection[str] | None = None) -> Deletion:
        if self.caller.sees_all:
            return self._store.delete(reference, force=force, if_match=if_match)
        self._visible().names.select(reference)
        with _without_suggestions():
            return self._store.delete(reference, force=force, if_match=if_match)

    # Weights and what is known of them.

    def open_blob(self, digest: str, length: int) -> tuple[BlobUpload, bool]:
        """Open an upload as `AdapterStore.open_blob` does, and return whether the caller may know that the weights
        exist.
        """
        is_known = self._knows(digest)
        exists = self._store.blob_exists(digest) and is_known
        uploader = Uploader(self.caller.principal, self.caller.limits.max_stored_bytes, is_known)
        with self.hide_usage_of_others():
            return self._store.open_blob(digest, length, uploader), exists

    def _knows(self, digest: str) -> bool:
        """Return whether the caller may know that weights exist: it sees an id that has them, or has uploaded them."""
        try:
            hex_digest = check_digest(digest)
        except InvalidDigest:
            return True
        is_sent = self._store.pending_uploads.has_uploaded(self.caller.principal, hex_digest)
        return self.is_unrestricted or is_sent or hex_digest in self._visible().digests

    def _visible(self) -> "_VisibleNames":
        return self._views.visible_to(self.caller)

    @property
    def _names(self) -> AdapterStore | Names:
        return self._store if self.caller.sees_all else self._visible().names


@dataclass(frozen=True)
class _VisibleNames:
    """Cache the visible part of one state of the store's names."""

    # The whole state.
    source: Records
    records: Records
    models: ModelList

    @cached_property
    def names(self) -> Names:
        return Names(self.records, random.random)

    @cached_property
    def digests(self) -> frozenset[str]:
        """Return the digests of the weights of all visible versions."""
        return frozenset(version.weights_digest for record in self.records.values() for version in record.versions)


class ScopedStores:
    """Create the views of a store. Pattern matches are cached; for a new state of names, only new ids are matched."""

    def __init__(self, store: AdapterStore, make_list: Callable[[], ModelList]) -> None:
        self.store = store
        self._make_list = make_list
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[str, ...], _VisibleNames] = OrderedDict()

    def of(self, caller: Caller, user: str | None = None, versions: Mapping[str, str] | None = None) -> ScopedStore:
        """Return the store as visible to a caller; arguments as for `ScopedStore`."""
        return ScopedStore(self, caller, user, versions)

    def visible_to(self, caller: Caller) -> _VisibleNames:
        """Return the names that the caller's patterns match now."""
        patterns = ("*",) if caller.sees_all else caller.adapters
        records = self.store.records()
        with self._lock:
            cached = self._cached.get(patterns)
            if cached is None or cached.source is not records:
                cached = self._cached[patterns] = self._match(caller, records, cached)
            self._cached.move_to_end(patterns)
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
            return cached

    def _match(self, caller: Caller, records: Records, known: _VisibleNames | None) -> _VisibleNames:
        if caller.sees_all:
            return _VisibleNames(records, records, known.models if known is not None else self._make_list())
        if known is None:
            return _VisibleNames(records, {k: r for k, r in records.items() if caller.may_see(k)}, self._make_list())
        visible, source = known.records, known.source
        found = {k: r for k, r in records.items() if (k in visible if k in source else caller.may_see(k))}
        # A change to names that the caller does not see must keep the object, whose identity marks a list as unchanged.
        return _VisibleNames(records, visible if found == visible else found, known.models)


@contextmanager
def _without_suggestions() -> Iterator[None]:
    """Remove similar names from errors that the store raises if a name vanishes between lookup and action: they are
    chosen from all ids."""
    try:
        yield
    except VersionNotFound:
        raise
    except AdapterNotFound as error:
        raise AdapterNotFound(error.reference) from None
