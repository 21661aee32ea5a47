"""What can go wrong with adapters, for the caller to tell apart.

    AdapterError
    ├── AdapterNotFound (LookupError)      no such id, alias, version or content; names up to three near ids
    │   └── VersionNotFound                the id has no version of that number; names those that it has
    ├── InvalidAdapterId (ValueError)      the id breaks the rule or is taken; carries the id it could be
    ├── InvalidAlias (ValueError)          an alias's name, or what it is to point to, is none
    ├── AdapterInvalid (ValueError)        config or weights refused; carries every problem found
    ├── AdapterExists                      the id is taken and the caller asked for a new one
    ├── AdapterChanged                     the id is not in the state that the caller expected
    ├── VersionInUse                       an alias names what is to be deleted; says which
    ├── QuotaExceeded                      it would be more than may be stored; says what is used, and what may be
    ├── AdapterCorrupt                     stored weights are missing or no longer have their digest
    ├── LoadCancelled                      nobody wants the weights any more; never leaves the server
    ├── InvalidDigest (ValueError)         not 64 hex digits
    ├── BlobNotFound (LookupError)         no weights of that digest were uploaded
    ├── BlobTooLarge (ValueError)          longer than any adapter of this base can be; carries the limit
    ├── BlobLengthMismatch (ValueError)    more or fewer bytes than announced
    ├── DigestMismatch (ValueError)        the bytes have another digest than announced
    ├── StoreFull                          no room on the disk; nothing changed
    ├── StoreLocked                        another server uses the store
    ├── InvalidArchive (ValueError)        a file to import is none of ours, damaged, or of an unknown format
    └── StoreUnusable                      the store cannot be read or written, or belongs to another base

Messages carry no path, except those of a store that cannot be opened: that one is for whoever starts the server.
"""

from dataclasses import asdict, dataclass

MAX_PROBLEMS = 100
SHOWN_PLACES = 3
SHOWN_CHARS = 120
SHOWN_VERSIONS = 10


def show(value: object) -> str:
    """An untrusted value as text that is safe to print: control, bidirectional and surrogate characters escaped."""
    if isinstance(value, str):
        value = value[: SHOWN_CHARS + 1]
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS + 2 else text[:SHOWN_CHARS] + "…"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with an adapter: a stable `code`, the config key or tensor it is about, and what to do."""

    code: str
    field: str
    message: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class ProblemList:
    """Collects problems; the same complaint about many tensors becomes one problem with a count and examples."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, code: str, field: str, message: str) -> None:
        """Note a problem. `field` is printed as given: pass untrusted text through `show` first."""
        self._places.setdefault((code, message), []).append(field)

    def __len__(self) -> int:
        return len(self._places)

    def problems(self) -> tuple[Problem, ...]:
        """In the order found; what is beyond `MAX_PROBLEMS` is counted in a last entry."""
        found = [_problem(code, message, at) for (code, message), at in self._places.items()]
        if len(found) <= MAX_PROBLEMS:
            return tuple(found)
        rest = Problem("more_problems", "", f"{len(found) - MAX_PROBLEMS} more problems of other kinds were found")
        return (*found[:MAX_PROBLEMS], rest)

    def raise_if_any(self) -> None:
        """Raises: AdapterInvalid: with every problem noted so far."""
        if self._places:
            raise AdapterInvalid(self.problems())


def _problem(code: str, message: str, places: list[str]) -> Problem:
    if len(places) > 1:
        dots = ", …" if len(places) > SHOWN_PLACES else ""
        message += f" ({len(places)} places: {', '.join(places[:SHOWN_PLACES])}{dots})"
    return Problem(code, places[0], message)


class AdapterError(Exception):
    """Root of everything the adapter store raises on purpose."""


class AdapterNotFound(AdapterError, LookupError):
    """No such id, version or content. `near` holds up to three ids that look like it."""

    def __init__(self, reference: str, near: tuple[str, ...] = ()) -> None:
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        super().__init__(f"adapter {show(reference)} does not exist{hint}")
        self.reference = reference
        self.near = near


class VersionNotFound(AdapterNotFound):
    """The id has no version of that number. `versions` are those that it has."""

    def __init__(self, adapter_id: str, version: int, versions: tuple[int, ...]) -> None:
        super().__init__(f"{adapter_id}@{version}")
        shown = ", ".join(map(str, versions[-SHOWN_VERSIONS:]))
        dots = "…, " if len(versions) > SHOWN_VERSIONS else ""
        self.args = (f"adapter {adapter_id!r} has no version {version}; it has {dots}{shown}",)
        self.versions = versions


class InvalidAdapterId(AdapterError, ValueError):
    """The id breaks the rule or is taken. `suggestion` is a valid id made from it, None if nothing is left of it."""

    def __init__(self, message: str, suggestion: str | None = None) -> None:
        super().__init__(message + (f"; try {suggestion!r}" if suggestion else ""))
        self.suggestion = suggestion


class InvalidAlias(AdapterError, ValueError):
    """An alias's name breaks the rule, or what it is to point to is neither a version nor two with shares."""

    def __init__(self, alias: str, message: str) -> None:
        super().__init__(message)
        self.alias = alias


class AdapterInvalid(AdapterError, ValueError):
    """Config or weights are refused. `problems` holds every problem found, not only the first."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = (f"{p.field}: {p.message}" if p.field else p.message for p in problems)
        super().__init__(f"adapter refused, {count}: " + "; ".join(lines))
        self.problems = problems


class AdapterExists(AdapterError):
    """The id is taken and the caller asked for a new one."""

    def __init__(self, adapter_id: str) -> None:
        super().__init__(f"adapter {adapter_id!r} exists; leave if_not_exists out to add a version to it")
        self.adapter_id = adapter_id


class AdapterChanged(AdapterError):
    """The id is not in the state that the caller expected. Nothing changed."""

    def __init__(self, adapter_id: str, exists: bool) -> None:
        why = "has changed since you looked" if exists else "does not exist"
        super().__init__(f"adapter {show(adapter_id)} {why} (If-Match); nothing was done. Look again, then decide")
        self.adapter_id = adapter_id


class VersionInUse(AdapterError):
    """An alias names a version that is to be deleted. Nothing changed."""

    def __init__(self, adapter_id: str, aliases: tuple[str, ...]) -> None:
        names = ", ".join(f"{adapter_id}:{alias}" for alias in aliases)
        super().__init__(
            f"what is to be deleted is named by {names}; point the alias elsewhere first, or force it, "
            "which removes the alias too"
        )
        self.aliases = aliases


class QuotaExceeded(AdapterError):
    """It would be more than may be stored. Nothing changed. `quota` is the option's name with underscores."""

    def __init__(self, quota: str, what: str, *, used: int, wanted: int, allowed: int) -> None:
        super().__init__(
            f"quota exceeded: {used} {what} are stored, {wanted} more would be {used + wanted}, {allowed} are allowed "
            f"({quota}); nothing was stored. Delete what is not needed any more"
        )
        self.quota, self.used, self.wanted, self.allowed = quota, used, wanted, allowed


class AdapterCorrupt(AdapterError):
    """Stored weights are missing or no longer have their digest. Uploading the same file again repairs it."""


class LoadCancelled(AdapterError):
    """Reading weights has stopped half-way because nobody wants them any more."""


class InvalidDigest(AdapterError, ValueError):
    """Not the lower-case hex digits of a SHA-256."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"{show(digest)} is not a digest: expected 64 hex digits (0-9, a-f), as sha256sum prints them")


class BlobNotFound(AdapterError, LookupError):
    """No weights of that digest were uploaded, or they were removed because nothing named them."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"no weights with digest sha256:{digest} were uploaded; upload the file first, then register")
        self.digest = digest


class BlobTooLarge(AdapterError, ValueError):
    """Longer than any adapter of this base can be."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(
            f"{length} bytes is more than any adapter of this base can have ({limit} bytes at the highest rank); "
            "a file this large usually also holds full embeddings or heads (modules_to_save): merge them into the base"
        )
        self.length = length
        self.limit = limit


class BlobLengthMismatch(AdapterError, ValueError):
    """More or fewer bytes than announced."""

    def __init__(self, expected: int, actual: int) -> None:
        came = f"{actual} came" if actual < expected else f"at least {actual} came"
        super().__init__(f"{expected} bytes were announced, {came}; nothing was stored")
        self.expected = expected
        self.actual = actual


class DigestMismatch(AdapterError, ValueError):
    """The bytes have another digest than announced."""

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(f"the bytes have digest sha256:{actual}, not sha256:{expected}; nothing was stored")
        self.expected = expected
        self.actual = actual


class StoreFull(AdapterError):
    """No room on the disk. Nothing changed."""


class StoreLocked(AdapterError):
    """Another server uses the store."""


class InvalidArchive(AdapterError, ValueError):
    """A file to import is none of ours, is damaged, or of a format that this version does not know."""


class StoreUnusable(AdapterError):
    """The store cannot be read or written, or belongs to another base."""
