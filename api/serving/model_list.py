"""Build and cache the list of models as bytes, because clients with a menu request all of it repeatedly; format
adapters.

A cached list belongs to one state of the store's names, an immutable mapping that is replaced on change: the same
mapping object means the same list. For a new state only the changed entries are encoded. Commands that read a store
without a server format adapters in the same way.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from adapter_store.registry.records import AdapterRecord
from adapter_store.registry.references import target_to_json
from adapter_store.spec import AdapterId, AdapterKey

Records = Mapping[AdapterId, AdapterRecord]
Card = dict[str, Any]
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class _State:
    """Cache one state of the names."""

    records: Records
    # Sorted.
    ids: Sequence[AdapterId]
    # Each card as JSON.
    cards: Mapping[AdapterId, str]
    # The response with all models.
    everything: bytes


class ModelList:
    """Return pages of model cards. Thread-safe: a state is replaced atomically, and at worst built twice.

    Args:
        card: builds an adapter's card; must depend on the record alone.
    """

    def __init__(self, base: Card, card: Callable[[AdapterRecord], Card]) -> None:
        self._base_id = str(base["id"])
        self._base = _encode(base)
        self._card = card
        self._state = self._make({}, None)

    def page(self, records: Records, search: str, limit: int | None, after: str | None) -> bytes:
        """Return the base, then adapters ordered by id: those whose id contains `search`, after `after`."""
        state = self._state
        if state.records is not records:
            state = self._state = self._make(records, state)
        if not search and limit is None and after is None:
            return state.everything
        wanted = search.lower()
        first = [self._base] if after is None and wanted in self._base_id.lower() else []
        begin = 0 if after in (None, self._base_id) else bisect_right(state.ids, after)
        found = (state.cards[name] for name in islice(state.ids, begin, None) if wanted in name)
        if limit is None:
            return _listing([*first, *found], has_more=False)
        cards = first + list(islice(found, limit + 1 - len(first)))
        return _listing(cards[:limit], has_more=len(cards) > limit)

    def _make(self, records: Records, known: _State | None) -> _State:
        ids = sorted(records)
        cards = {name: self._encoded(name, records[name], known) for name in ids}
        return _State(records, ids, cards, _listing([self._base, *cards.values()], has_more=False))

    def _encoded(self, name: AdapterId, record: AdapterRecord, known: _State | None) -> str:
        if known is not None and known.records.get(name) is record:
            return known.cards[name]
        return _encode(self._card(record))


def _listing(cards: Sequence[str], has_more: bool) -> bytes:
    return f'{{"object":"list","data":[{",".join(cards)}],"has_more":{_encode(has_more)}}}'.encode()


def base_card(name: str, created_s: int, max_model_len: int, weights: Card, *, batch_invariant: bool) -> Card:
    """Build the model card of the base.

    Args:
        weights: format of the weights; for a quantized file also its method, bits, and whether they are kept exactly.
        batch_invariant: whether an answer is bit-identical alone and in any batch.
    """
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "lorasrv",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "weights": weights,
        "batch_invariant": batch_invariant,
    }


def adapter_card(base: Card, record: AdapterRecord) -> Card:
    """Build the model card of an adapter; `root` is the digest of its current version."""
    return {
        **base,
        "id": record.adapter_id,
        "created": int(record.created_s),
        "root": digest_text(record.key),
        "parent": base["id"],
    }


def digest_text(key: str | None) -> str | None:
    """Return a digest in the form of responses; None for None."""
    return None if key is None else f"sha256:{key}"


def adapter_json(record: AdapterRecord, corrupt: Collection[AdapterKey]) -> dict[str, Any]:
    """Describe an id with its versions, aliases and limits; `corrupt` holds contents known to be damaged."""
    versions = [
        {
            "version": v.version,
            "digest": digest_text(v.key),
            "created": int(v.created_s),
            "rank": v.rank_max,
            "bytes": v.bytes,
            "stored": v.stored,
            "corrupt": v.key in corrupt,
            "persona": digest_text(v.persona or None),
        }
        for v in record.versions
    ]
    return {
        "object": "adapter",
        "id": record.adapter_id,
        "version": record.current_version,
        "digest": digest_text(record.key),
        "created": int(record.created_s),
        "corrupt": record.key in corrupt,
        "etag": record.etag,
        "limits": dict(record.limits),
        "aliases": aliases_json(record),
        "versions": versions,
    }


def aliases_json(record: AdapterRecord) -> dict[str, int | dict[str, float]]:
    """Return the targets of the id's aliases."""
    return {alias: target_to_json(shares) for alias, shares in record.aliases.items()}
