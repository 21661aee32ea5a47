"""Exceptions of the adapter store, one class per case that callers distinguish.

    AdapterError
    ├── AdapterNotFound (LookupError)      no such id, alias, version or content; names up to three near ids
    │   └── VersionNotFound                the id has no version of that number; lists those that exist
    ├── InvalidAdapterId (ValueError)      the id breaks the rule or is reserved; carries a valid suggestion
    ├── InvalidAlias (ValueError)          an alias's name or target is invalid
    ├── AdapterInvalid (ValueError)        config or weights refused; carries every problem found
    ├── AdapterExists                      the id exists and the caller asked for a new one
    ├── AdapterChanged                     the id is not in the state that the caller expected
    ├── VersionInUse                       an alias points to a version to be deleted; names the aliases
    ├── QuotaExceeded                      storing it would exceed a quota; carries used, wanted and allowed
    ├── AdapterCorrupt                     stored weights are missing or no longer match their digest
    ├── LoadCancelled                      the load was cancelled; never leaves the server
    ├── InvalidDigest (ValueError)         not 64 hex digits
    ├── BlobNotFound (LookupError)         no weights of that digest were uploaded
    ├── BlobTooLarge (ValueError)          longer than any adapter of this base can be; carries the limit
    ├── BlobLengthMismatch (ValueError)    more or fewer bytes than announced
    ├── DigestMismatch (ValueError)        the bytes have another digest than announced
    ├── StoreFull                          no space left on the disk; nothing changed
    ├── StoreLocked                        another server uses the store
    ├── StoreFollows                       the change belongs to the registry that this store follows
    ├── OriginUnreachable                  the registry cannot be reached now
    ├── CacheFull                          a follower has no room for weights, or for its registry's changes
    │   └── CacheTooSmall                  the weights have more bytes than the whole cache
    ├── InvalidArchive (ValueError)        a file to import is not an archive, damaged, or of an unknown format
    │   └── AdaptersRefused                adapters of it cannot be served; carries the reason for each
    └── StoreUnusable                      the store cannot be read or written, or belongs to another base
        ├── OriginDenied                   the registry refuses this server's key, or is not a registry
        └── OriginRefused                  the registry refuses this server's request

Messages contain no path, except those about a store that cannot be opened; only the operator sees these.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

MAX_PROBLEMS = 100
SHOWN_PLACES = 3
SHOWN_CHARS = 120
SHOWN_VERSIONS = 10


def show(value: object) -> str:
    """Return an untrusted value as printable text: control, bidirectional and surrogate characters are escaped."""
    if isinstance(value, str):
        value = value[: SHOWN_CHARS + 1]
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS + 2 else text[:SHOWN_CHARS] + "…"


def show_name(name: str) -> str:
    """Return an untrusted name as `show` does, but without quotes, for use in the path of a field."""
    return show(name).strip("'\"")


@dataclass(frozen=True, slots=True)
class Problem:
    """Describe one problem of an adapter: a stable `code`, the config key or tensor concerned, and the fix."""

    code: str
    field: str
    message: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class ProblemList:
    """Collect problems; the same problem in many tensors becomes one entry with a count and examples."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, code: str, field: str, message: str) -> None:
        """Record a problem. `field` is printed as given: pass untrusted text through `show` first."""
        self._places.setdefault((code, message), []).append(field)

    def __len__(self) -> int:
        return len(self._places)

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems in the order found; a last entry counts those beyond `MAX_PROBLEMS`."""
        found = [_problem(code, message, at) for (code, message), at in self._places.items()]
        if len(found) <= MAX_PROBLEMS:
            return tuple(found)
        rest = Problem("more_problems", "", f"{len(found) - MAX_PROBLEMS} more problems of other kinds were found")
        return (*found[:MAX_PROBLEMS], rest)

    def raise_if_any(self) -> None:
        """Raise the problems recorded so far, if there are any.

        Raises:
            AdapterInvalid: with every problem recorded.
        """
        if self._places:
            raise AdapterInvalid(self.problems())


def _problem(code: str, message: str, places: list[str]) -> Problem:
    if len(places) > 1:
        dots = ", …" if len(places) > SHOWN_PLACES else ""
        message += f" ({len(places)} places: {', '.join(places[:SHOWN_PLACES])}{dots})"
    return Problem(code, places[0], message)


class AdapterError(Exception):
    """Base class of all exceptions that the adapter store raises on purpose."""


class AdapterNotFound(AdapterError, LookupError):
    """Report an id, version or content that does not exist. `near` holds up to three similar ids."""

    def __init__(self, reference: str, near: tuple[str, ...] = ()) -> None:
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        super().__init__(f"adapter {show(reference)} does not exist{hint}")
        self.reference = reference
        self.near = near


class VersionNotFound(AdapterNotFound):
    """Report a version number that the id does not have. `versions` lists the existing ones.

    `param` is the field of a change that named the version; None if a reference named it.
    """

    def __init__(self, adapter_id: str, version: int, versions: tuple[int, ...], param: str | None = None) -> None:
        super().__init__(f"{adapter_id}@{version}", (adapter_id,))
        self.args = (f"adapter {adapter_id!r} has no version {version}; it has {_shown(versions)}",)
        self.versions = versions
        self.param = param


class IdExpected(AdapterNotFound):
    """Report a version or an alias where only an id is allowed. `versions` lists the id's versions."""

    def __init__(self, reference: str, adapter_id: str, versions: tuple[int, ...], aliases: tuple[str, ...]) -> None:
        super().__init__(reference, (adapter_id,))
        named = f"; its aliases: {', '.join(aliases)}" if aliases else ""
        noun = "version" if len(versions) == 1 else "versions"
        why = f"an id is expected, not {show(reference)}; {adapter_id!r} has {noun} {_shown(versions)}{named}"
        self.args = (why,)
        self.versions = versions


def _shown(versions: tuple[int, ...]) -> str:
    dots = "…, " if len(versions) > SHOWN_VERSIONS else ""
    return dots + ", ".join(map(str, versions[-SHOWN_VERSIONS:]))


class InvalidAdapterId(AdapterError, ValueError):
    """Report an id that breaks the rule or is reserved. `suggestion` is a valid id made from it, or None."""

    def __init__(self, message: str, suggestion: str | None = None) -> None:
        super().__init__(message + (f"; try {suggestion!r}" if suggestion else ""))
        self.suggestion = suggestion


class InvalidAlias(AdapterError, ValueError):
    """Report an alias whose name breaks the rule, or whose target is neither a version nor two versions with shares."""

    def __init__(self, alias: str, message: str) -> None:
        super().__init__(message)
        self.alias = alias


class AdapterInvalid(AdapterError, ValueError):
    """Report a refused config or weights file. `problems` holds every problem found, not only the first."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = (f"{p.field}: {p.message}" if p.field else p.message for p in problems)
        super().__init__(f"adapter refused, {count}: " + "; ".join(lines))
        self.problems = problems


class AdapterExists(AdapterError):
    """Report an id that exists although the caller asked for a new one."""

    def __init__(self, adapter_id: str) -> None:
        super().__init__(
            f"adapter {adapter_id!r} exists, and only a new id was asked for; choose another, or let it get a version"
        )
        self.adapter_id = adapter_id


class AdapterChanged(AdapterError):
    """Report an id that is not in the state that the caller expected. Nothing changed."""

    def __init__(self, adapter_id: str, exists: bool) -> None:
        why = "has changed since you looked" if exists else "does not exist"
        super().__init__(f"adapter {show(adapter_id)} {why} (If-Match); nothing was done. Look again, then decide")
        self.adapter_id = adapter_id


class VersionInUse(AdapterError):
    """Report a version that cannot be deleted because an alias points to it. Nothing changed."""

    def __init__(self, reference: str, adapter_id: str, aliases: tuple[str, ...]) -> None:
        names = ", ".join(f"{adapter_id}:{alias}" for alias in aliases)
        super().__init__(
            f"{reference} cannot be deleted while aliases point to it ({names}); move or remove them first, or delete "
            "with force, which removes them"
        )
        self.aliases = aliases


class NotComposable(AdapterError, ValueError):
    """Report a sum of adapters that cannot be served. `key` is the content that is the reason, or None.

    "It" in the message means that content.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class QuotaExceeded(AdapterError):
    """Report an exceeded quota. Nothing changed. `quota` is the option's name with underscores, if it has an option."""

    def __init__(self, quota: str, what: str, *, used: int, wanted: int, allowed: int) -> None:
        super().__init__(
            f"quota exceeded: {used} {what} are stored, {wanted} more would be {used + wanted}, {allowed} are allowed "
            f"({quota}); nothing was stored. Delete what is not needed any more"
        )
        self.quota, self.used, self.wanted, self.allowed = quota, used, wanted, allowed


class AdapterCorrupt(AdapterError):
    """Report stored weights that are missing or damaged. Uploading the same file again repairs them."""


class LoadCancelled(AdapterError):
    """Report a read of weights that was stopped because its result is no longer needed."""


class InvalidDigest(AdapterError, ValueError):
    """Report text that is not the lower-case hex digits of a SHA-256."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"{show(digest)} is not a digest: expected 64 hex digits (0-9, a-f), as sha256sum prints them")


class BlobNotFound(AdapterError, LookupError):
    """Report weights that were never uploaded, or were removed because no version referred to them."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"no weights with digest sha256:{digest} were uploaded; upload the file first, then register")
        self.digest = digest


class BlobTooLarge(AdapterError, ValueError):
    """Report a file longer than any adapter of this base can be."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(
            f"{length} bytes is more than any adapter of this base can have ({limit} bytes at the highest rank, with a "
            "copy of the embedding and of the head); a file this large has a rank above --max-lora-rank, or copies of "
            "other modules (modules_to_save), or several of one: `lorasrv check`, with this server's --model and "
            "--max-lora-rank, names them"
        )
        self.length = length
        self.limit = limit


class BlobLengthMismatch(AdapterError, ValueError):
    """Report an upload with more or fewer bytes than announced."""

    def __init__(self, expected: int, actual: int) -> None:
        came = f"{actual} came" if actual < expected else f"at least {actual} came"
        super().__init__(f"{expected} bytes were announced, {came}; nothing was stored")
        self.expected = expected
        self.actual = actual


class DigestMismatch(AdapterError, ValueError):
    """Report an upload whose bytes have another digest than announced."""

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(f"the bytes have digest sha256:{actual}, not sha256:{expected}; nothing was stored")
        self.expected = expected
        self.actual = actual


class StoreFull(AdapterError):
    """Report a disk without free space. Nothing changed."""


class StoreLocked(AdapterError):
    """Report a store that another server uses."""


class InvalidArchive(AdapterError, ValueError):
    """Report an import file that is not an archive, is damaged, or has an unknown format."""


class AdaptersRefused(InvalidArchive):
    """Report an archive with adapters that are refused. `reasons` has a line for each of them."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__(f"adapters of the archive are refused, and nothing was imported: {'; '.join(reasons)}")
        self.reasons = reasons


class StoreFollows(AdapterError):
    """Report a change that was sent to a store that follows another. Nothing changed."""

    def __init__(self, address: str) -> None:
        super().__init__(f"this server follows the registry at {address}; send changes there")
        self.address = address


class OriginUnreachable(AdapterError):
    """Report that the registry cannot be reached now. Cached adapters are served until the lease ends."""


class CacheFull(AdapterError):
    """Report weights that have no room in a follower's cache beside those in use, or new names that have none on its
    disk."""


class CacheTooSmall(CacheFull):
    """Report weights that are larger than a follower's whole cache: waiting does not help."""


class StoreUnusable(AdapterError):
    """Report a store that cannot be read or written, or that belongs to another base."""


class OriginDenied(StoreUnusable):
    """Report a server that refuses this server's key, or is not a registry: an operator must correct this."""


class OriginRefused(StoreUnusable):
    """Report that the registry permanently refuses this server's request."""
