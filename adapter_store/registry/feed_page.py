"""Page of a feed (`registry/feed.py`): rows of the ids that changed; every value is checked on arrival.

A follower trusts what its registry says about adapters. A malformed page, as from another version, a proxy or a fault,
is still refused as a whole, because its digests become paths and its texts are parsed later, during requests.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from adapter_store.errors import StoreUnusable, show
from adapter_store.registry.database import SCHEMA_VERSION
from adapter_store.registry.references import check_adapter_id, check_digest
from adapter_store.spec import FORMS, AdapterId

CONTENTS = "contents"
"""Table of the contents that the rows of versions refer to."""
MAX_INTEGER = 2**62
MAX_NUMBER = 1e18
WRONG = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""Errors that reading malformed data may raise."""
_Check = Callable[[Any], object]


def _is(condition: bool) -> None:
    if not condition:
        raise ValueError("of the wrong type or size")


def _text(value: Any) -> None:
    _is(isinstance(value, str))
    value.encode()


def _name(value: Any) -> None:
    check_adapter_id(value, frozenset())


def _digest(value: Any) -> None:
    _text(value)
    _is(check_digest(value) == value)


def _optional_digest(value: Any) -> None:
    if value is not None:
        _digest(value)


def _integer(value: Any) -> None:
    _is(type(value) is int and 0 <= value < MAX_INTEGER)


def _number(value: Any) -> None:
    _is(type(value) in (int, float) and abs(value) <= MAX_NUMBER)


def _object(value: Any) -> None:
    _text(value)
    _is(isinstance(json.loads(value), dict))


def _numbers(value: Any) -> None:
    _object(value)
    for limit in json.loads(value).values():
        _number(limit)


def _form(value: Any) -> None:
    _is(value in FORMS)


# Checks are in the order of the columns, tables in an order in which rows can be inserted.
_VERSION: tuple[_Check, ...] = (_name, _integer)
_COLUMNS: Mapping[str, tuple[_Check, ...]] = {
    CONTENTS: (_digest, _digest, _object, _number, _form),
    "adapters": (_name, _integer, _number),
    "versions": (*_VERSION, _optional_digest, _number),
    "uploads": (*_VERSION, _object, _object),
    "personas": (*_VERSION, _digest, _object),
    "owners": (*_VERSION, _text),
    "verdicts": (*_VERSION, _object, _number),
    "aliases": (_name, _text, _integer, _number),
    "adapter_limits": (_name, _numbers),
}
TABLES = tuple(table for table in _COLUMNS if table != CONTENTS)
"""Tables whose first column is the id, in an order in which rows can be inserted."""


@dataclass(frozen=True, slots=True)
class Position:
    """Name a history and the last revision received from it."""

    history: str
    revision: int


@dataclass(frozen=True, slots=True)
class FeedPage:
    """Hold the rows of ids that changed, to be applied in one transaction."""

    position: Position
    # Layout of the rows.
    layout: int
    # Base that the adapters were checked for (`BaseIdentity.to_text`).
    base: str
    # Whether the feed begins again with this page: ids that it does not name from here on are gone.
    is_first: bool
    # Whether no later change existed when the page was read.
    is_last: bool
    # Id, its last version number and its revision.
    ids: list[tuple[AdapterId, int, int]]
    rows: Mapping[str, list[list[Any]]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Parse the output of `to_dict` from bytes that another server has sent.

        Raises:
            StoreUnusable: they are not a page, or are of another layout.
        """
        try:
            if values["layout"] != SCHEMA_VERSION:
                raise StoreUnusable(
                    f"the registry's rows have layout {show(values['layout'])}, this lorasrv reads {SCHEMA_VERSION}; "
                    "run the same version on both"
                )
            for row in values["ids"]:
                _check_row(row, (_name, _integer, _integer))
            ids = [(AdapterId(name), version, revision) for name, version, revision in values["ids"]]
            rows = {table: list(values["rows"][table]) for table in _COLUMNS}
            position = Position(values["position"]["history"], values["position"]["revision"])
            _text(position.history)
            _integer(position.revision)
            _is(all(revision <= position.revision for _, _, revision in ids))
            _check_rows(rows, {name for name, _, _ in ids})
            flags = bool(values["is_first"]), bool(values["is_last"])
            return cls(position, SCHEMA_VERSION, str(values["base"]), *flags, ids, rows)
        except WRONG as error:
            raise StoreUnusable(f"the registry's answer is no page of changes: {error!r:.300}") from None


def _check_rows(rows: Mapping[str, list[Any]], names: set[AdapterId]) -> None:
    for table, columns in _COLUMNS.items():
        for row in rows[table]:
            try:
                _check_row(row, columns)
                _is(table == CONTENTS or row[0] in names)
            except WRONG as error:
                raise ValueError(f"a row of {table} that begins with {show(row)}: {error}") from None


def _check_row(row: Any, columns: tuple[_Check, ...]) -> None:
    for value, check in zip(row, columns, strict=True):
        check(value)
