"""Manage the keys of a store, with or without a running server (key create, list, rotate, revoke)."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapter_store.registry.near_names import near_names
from api.cli.common.formatting import utc
from api.cli.common.options import JsonOption, configured_store, duration
from api.cli.common.terminal import CliError, ExitCode, note, print_json, print_table, say
from lorasrv.config import size

if TYPE_CHECKING:
    from api.auth.key_store import KeyStore
    from api.auth.principal import Key, KeyLimits, Scope

StoreOption = Annotated[
    Path | None,
    typer.Option("--store", envvar="LORASRV_STORE", metavar="DIR", show_default=False,
                 help=r"The server's store. \[default: as for serve]"),
]  # fmt: skip
app = typer.Typer(help="Manage API keys, their permissions and limits.", no_args_is_help=True)


def create(
    name: Annotated[
        str | None, typer.Option(help="Name of the key, which cannot be changed.", show_default=False)
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help=r"Role of the key: infer, upload, metrics, admin or replicate; may be repeated. \[default: infer]",
            show_default=False,
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help=r"Adapters that the key may see, e.g. 'mia*'; a,b or repeated. \[default: *]",
            show_default=False,
        ),
    ] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Maximum requests per minute.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Maximum tokens per minute.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Maximum concurrent requests.")] = None,
    stored_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum size of its adapters' weights in the store, e.g. 2GiB.")
    ] = None,
    expires_in: Annotated[
        str | None,
        typer.Option(metavar="AGE", help=r"Lifetime, e.g. 12h, 30d. \[default: never]", show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print its secret, which cannot be shown again. Once a key exists, clients need one.

    A running server accepts the key from the next request.
    """
    from api.auth.key_store import InvalidKey
    from api.auth.principal import KeyLimits, new_name

    limits = KeyLimits(rpm, tpm, concurrent, None if stored_bytes is None else _bytes(stored_bytes))
    lasts_s = None if expires_in is None else duration("--expires-in", expires_in)
    patterns = tuple(part.strip() for text in adapters or ["*"] for part in text.split(",") if part.strip())
    with _changing(store) as key_store:
        first = key_store.is_empty()
        try:
            key, secret = key_store.create(
                name or new_name(), _scopes(scope), patterns, limits, None if lasts_s is None else time.time() + lasts_s
            )
        except InvalidKey as error:
            raise CliError(f"{error.option}: {error}", code=ExitCode.USAGE) from None
        place = key_store.path
    if as_json:
        print_json({"key": secret, **_plain(key)})
        return
    note(f"key {key.name}: {_summary(key)}; in {place}")
    if first:
        note("Servers of this store now require a key.")
    note("This secret is shown only once:")
    say(secret)


def list_keys(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List all keys with their permissions, including revoked ones. Secrets are not stored."""
    with _open_keys(_folder(store), must_exist=True) as key_store:
        keys = key_store.all()
    if as_json:
        for key in keys:
            print_json(_plain(key))
        return
    titles = ("key", "state", "scopes", "adapters", "limits", "created", "expires", "last used")
    print_table(titles, [_cells(key) for key in keys], numbers=False)


def rotate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, as in key list.")],
    grace: Annotated[
        str | None,
        typer.Option(metavar="AGE", help=r"How long the old secret stays valid, e.g. 1h, 7d. \[default: not at all]"),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace a key's secret and print the new one, which cannot be shown again.

    The key keeps its permissions, limits, files and batches. A running server accepts the secret from the next request.
    """
    grace_s = 0.0 if grace is None else duration("--grace", grace)
    with _changing(store, must_exist=True) as key_store, _with_near_name(key_store, name):
        key, secret = key_store.rotate(name, grace_s)
    ends_s = time.time() + grace_s
    if as_json:
        print_json({"key": secret, "old_ends_s": round(ends_s, 3), **_plain(key)})
        return
    until = f"are valid until {_day(ends_s)}" if grace_s else "are invalid now"
    note(f"key {name} has a new secret; earlier ones {until}")
    note("This secret is shown only once:")
    say(secret)


def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, as in key list.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key permanently. A running server refuses it from the next request; running requests finish.

    Clients still need a key, even after the last one is revoked.
    """
    with _changing(store, must_exist=True) as key_store, _with_near_name(key_store, name):
        done = key_store.revoke(name)
        key = next(key for key in key_store.all() if key.name == name)
    if as_json:
        print_json(_plain(key))
    else:
        say(f"key {name} is revoked" if done else f"key {name} was revoked before")


def _folder(store: Path | None) -> Path:
    return (store or configured_store()).expanduser()


@contextmanager
def _changing(store: Path | None, *, must_exist: bool = False) -> Iterator["KeyStore"]:
    """Open the keys to change them. Refuses a follower's store: its registry would undo the change."""
    from adapter_store.registry.feed import is_followed
    from api.auth.key_store import FILE

    root = _folder(store)
    if root.is_dir() and not os.access(root, os.W_OK | os.X_OK):
        raise CliError(
            f"--store {root}: its keys ({FILE}) cannot be changed, as the folder cannot be written; do this as the "
            "folder's owner, or give another --store"
        )
    if is_followed(root / "index.sqlite3"):
        raise CliError(
            f"--store {root}: it is the cache of a server that follows a registry, and has that one's keys; change "
            "them in the registry's folder"
        )
    with _open_keys(root, must_exist=must_exist) as key_store:
        yield key_store


@contextmanager
def _open_keys(root: Path, *, must_exist: bool = False) -> Iterator["KeyStore"]:
    from adapter_store.storage.root_lock import opening_errors
    from api.auth.key_store import FILE, KeyStore

    if must_exist and not (root / FILE).exists():
        raise CliError(f"{root} has no keys: lorasrv key create makes one")
    with opening_errors(root), closing(KeyStore(root)) as key_store:
        yield key_store


@contextmanager
def _with_near_name(key_store: "KeyStore", name: str) -> Iterator[None]:
    """Report why the key cannot be changed, and a similar name."""
    from api.auth.key_store import InvalidKey

    try:
        yield
    except InvalidKey as error:
        names = [key.name for key in key_store.all()]
        if name in names:
            raise CliError(str(error)) from None
        near = near_names(name, names)
        raise CliError(f"{error}; {f'did you mean {near[0]}?' if near else 'lorasrv key list names all'}") from None


def _scopes(given: list[str] | None) -> "frozenset[Scope]":
    from api.auth.principal import Scope

    names = [part.strip() for text in given or [Scope.INFER] for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in list(Scope)]
    if unknown:
        raise CliError(f"--scope: {unknown[0]!r} is none of {', '.join(Scope)}", code=ExitCode.USAGE)
    return frozenset(Scope(name) for name in names)


def _bytes(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        count = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        count = 0
    if count < 1:
        raise CliError(f"--stored-bytes {text!r} is not a size; expected 512MiB, 2GB or bytes", code=ExitCode.USAGE)
    return count


# Formatting of keys.
def _plain(key: "Key") -> Mapping[str, Any]:
    return {
        "name": key.name,
        "state": key.state(time.time()),
        "scopes": sorted(key.scopes),
        "adapters": list(key.adapters),
        "limits": {name: value for name, value in asdict(key.limits).items() if value is not None},
        **{name: getattr(key, name) for name in ("created_s", "expires_s", "revoked_s", "last_used_s")},
    }


def _summary(key: "Key") -> str:
    limits = f", limits {_limits(key.limits)}" if _limits(key.limits) != "-" else ""
    ends = f", until {_day(key.expires_s)}" if key.expires_s is not None else ""
    return f"scope {', '.join(sorted(key.scopes))}, adapters {', '.join(key.adapters)}{limits}{ends}"


def _cells(key: "Key") -> tuple[str, ...]:
    return (
        *(key.name, key.state(time.time()), ", ".join(sorted(key.scopes)), ", ".join(key.adapters)),
        *(_limits(key.limits), _day(key.created_s), _day(key.expires_s), _day(key.last_used_s)),
    )


def _limits(limits: "KeyLimits") -> str:
    stored = None if limits.max_stored_bytes is None else f"{size(limits.max_stored_bytes)} stored"
    counts = (
        (limits.requests_per_min, "requests/min"),
        (limits.tokens_per_min, "tokens/min"),
        (limits.max_concurrent, "at a time"),
    )
    parts = [f"{count} {what}" for count, what in counts if count is not None]
    return ", ".join([*parts, *([stored] if stored else [])]) or "-"


def _day(moment_s: float | None) -> str:
    return "-" if moment_s is None else utc(moment_s)
