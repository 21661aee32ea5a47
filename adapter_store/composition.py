"""Compositions: sums of adapters with weights, as PEFT computes them with several active adapters.

y = W x + sum over j of weight_j * scaling_j * B_j A_j x. All A_j stacked and all B_j side by side are one adapter of
the summed rank, without cross terms and without rounding A or B. A stored sum is served as this one adapter. A sum that
a request names is computed term by term from its contents, so that other weights need no loading. A composition is
identified by its contents, its weights and whether it is stored, never by names: results of other contents, or of
another order of summation, are never reused for it.
"""

import hashlib
import math
import re
import struct
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from cachetools import LRUCache

from adapter_store.errors import NotComposable, show
from adapter_store.spec import AdapterKey, AdapterRef

MAX_COMPONENTS = 4
NUM_NEWEST = 4096
MAX_WEIGHT = 4.0
"""Largest absolute value of a weight."""
SUM_RULE = "a sum reads mia+0.5*style: up to 4 adapters, each with a weight from -4 to 4 before a *, or without for 1"
_STORED, _NAMED = b"lorasrv composition 1\n", b"lorasrv composition 1 term by term\n"
_NUMBER = re.compile(r"-?[0-9]{1,9}(\.[0-9]{0,20})?|-?\.[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Component:
    """Name one version of a sum, and its weight."""

    ref: AdapterRef
    weight: float


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Composition:
    """Hold a sum in its normal form: (content, weight), sorted, each content once, weights float32 and not 0.

    `key` is the content's own for a single content of weight 1, and None for an empty sum, the base.
    """

    key: AdapterKey | None
    weights: tuple[tuple[AdapterKey, float], ...]
    # Whether the sum is served as one adapter.
    is_stored: bool = False

    @classmethod
    def of(cls, components: Iterable[tuple[AdapterKey | None, float]], *, is_stored: bool = False) -> "Composition":
        """Build the normal form: weights of one content are added up; None is the base, which adds nothing."""
        sums: dict[AdapterKey, float] = {}
        for key, weight in components:
            if key is not None:
                sums[key] = sums.get(key, 0.0) + weight
        rounded = ((key, _float32(weight)) for key, weight in sorted(sums.items()))
        weights = tuple((key, weight) for key, weight in rounded if weight)
        return cls(_key_of(weights, _STORED if is_stored else _NAMED), weights, is_stored)

    @property
    def terms(self) -> tuple[tuple[AdapterKey, float], ...]:
        """Return the contents to load, each with its weight; a stored sum counts as one content."""
        return ((self.key, 1.0),) if self.is_stored and self.key is not None else self.weights

    @property
    def is_sum(self) -> bool:
        """Return whether this is neither the base nor one content with weight 1."""
        return self.key is not None and self.weights != ((self.key, 1.0),)


def _float32(weight: float) -> float:
    """Return the nearest float32 number, the type of weights in the kernels."""
    [rounded] = struct.unpack("<f", struct.pack("<f", weight))
    return float(rounded)


def _key_of(weights: Sequence[tuple[AdapterKey, float]], domain: bytes) -> AdapterKey | None:
    if not weights:
        return None
    if len(weights) == 1 and weights[0][1] == 1.0:
        return weights[0][0]
    text = "".join(f"{key} {weight.hex()}\n" for key, weight in weights)
    return AdapterKey(hashlib.sha256(domain + text.encode()).hexdigest())


class Compositions:
    """Remember the sums that are referenced (by a resolved request or a hold), and the most recently requested ones: a
    sum that was refused as cold is still loaded for later requests. Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[AdapterKey, Composition] = WeakValueDictionary()
        self._newest: LRUCache[AdapterKey, Composition] = LRUCache(NUM_NEWEST)

    def add(self, composition: Composition) -> Composition:
        """Return the only object for a composition, which is remembered while referenced and for some time after."""
        if not composition.is_sum or composition.key is None:
            return composition
        with self._lock:
            known = self._newest[composition.key] = self._known.setdefault(composition.key, composition)
            return known

    def having(self, keys: Collection[AdapterKey]) -> list[AdapterKey]:
        """Return the keys of the remembered sums that contain any of these contents."""
        with self._lock:
            known = list(self._known.items())
        return [key for key, composition in known if not set(keys).isdisjoint(part for part, _ in composition.weights)]

    def find(self, key: AdapterKey) -> Composition | None:
        """Return the sum of a key, or None if it is a content's own key or the sum is no longer remembered."""
        with self._lock:
            return self._known.get(key)


def is_sum(text: str) -> bool:
    """Return whether a reference is written as a sum, with "+" or "*"; ids contain neither."""
    return "+" in text or "*" in text


def parse_sum(text: str) -> list[tuple[str, float]]:
    """Parse `mia+0.5*style@3` into references and weights.

    Raises:
        NotComposable: the text is not a sum, or has too many parts or too large weights.
    """
    _check_number(text.count("+") + 1)
    parts = []
    for part in text.split("+"):
        number, star, reference = part.rpartition("*")
        if not reference or (star and not _NUMBER.fullmatch(number)):
            raise NotComposable(f"{show(text)} is no sum of adapters; {SUM_RULE}")
        parts.append((reference, float(number) if star else 1.0))
    check_weights([weight for _, weight in parts])
    return parts


def check_weights(weights: Sequence[float]) -> None:
    """Check the number and size of the weights of a sum.

    Raises:
        NotComposable: there are no weights or too many, or one is not finite or too large.
    """
    _check_number(len(weights))
    for weight in weights:
        if not (math.isfinite(weight) and abs(weight) <= MAX_WEIGHT):
            raise NotComposable(f"a weight is a number from -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}, not {weight:g}")


def _check_number(number: int) -> None:
    if not 1 <= number <= MAX_COMPONENTS:
        raise NotComposable(f"a sum has 1 to {MAX_COMPONENTS} adapters, not {number}")
