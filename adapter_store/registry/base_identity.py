"""Identity of the base that a store was filled for: its shapes and a sample of weights that survives quantization.

The shapes that adapters are checked against (family, layers, linears) are compared exactly. Only some weights can be
compared: each quantization rounds linears and embeddings differently, but leaves norms in floating point, at worst in
bfloat16. The caller therefore samples a norm, and two samples agree if no number differs by more than rounding to
bfloat16. Training that changes a norm by one unit of bfloat16 is noticed; training of linears alone (a merged adapter)
is not.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from adapter_store.errors import AdapterCorrupt, AdapterInvalid, StoreUnusable
from adapter_store.formats.adapter_config import canonical_json
from adapter_store.registry.index import Content, Index
from adapter_store.spec import BaseShapes

MAX_SAMPLES = 512
MAX_NUMBER = 3.5e38
_SHAPES = re.compile("([0-9a-f]{64})?")
# Rounding to bfloat16 changes a number by up to 2^-8 of itself; an earlier rounding to float16 adds 2^-11.
TOLERANCE = 2**-8 + 2**-11


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """Identify a base. `shapes` is a digest; `sample` is empty if none was taken, and then agrees with any other."""

    shapes: str
    sample: tuple[float, ...] = ()

    @classmethod
    def of(cls, base: BaseShapes, sample: Sequence[float] = ()) -> Self:
        """Return a base's identity, keeping at most `MAX_SAMPLES` evenly spaced numbers of the sample."""
        modules = {name: list(shape) for name, shape in base.modules.items()}
        # Without the base's name: renaming a base does not change it.
        facts: list[object] = [base.family, base.num_layers, base.layer_prefix, modules]
        if base.lacking:
            facts.append(sorted(base.lacking))
        step = -(-len(sample) // MAX_SAMPLES) or 1
        kept = tuple(float(f"{value:.6g}") for value in sample[::step])
        return cls(hashlib.sha256(canonical_json(facts).encode()).hexdigest(), kept)

    def to_text(self) -> str:
        """Return the text stored in the index: the digest, followed by the sample if there is one."""
        return f"{self.shapes} {json.dumps(self.sample)}" if self.sample else self.shapes

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the output of `to_text`; the empty text is an unknown base.

        Raises:
            ValueError: the text is malformed. Archives are untrusted.
        """
        shapes, _, sample = text.partition(" ")
        numbers = json.loads(sample) if sample else []
        if not (_SHAPES.fullmatch(shapes) and isinstance(numbers, list) and len(numbers) <= MAX_SAMPLES):
            raise ValueError("expected a digest of shapes, optionally followed by a sample of weights")
        if not all(type(number) in (int, float) and abs(number) <= MAX_NUMBER for number in numbers):
            raise ValueError("the sample of its weights contains values that are not finite numbers")
        return cls(shapes, tuple(float(number) for number in numbers))

    def has_shapes_of(self, other: Self) -> bool:
        """Return whether the same adapters fit both bases."""
        return self.shapes == other.shapes

    def has_weights_of(self, other: Self) -> bool:
        """Return whether the samples agree; True if one was never taken."""
        if not self.sample or not other.sample:
            return True
        if len(self.sample) != len(other.sample):
            return False
        return all(
            abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) for a, b in zip(self.sample, other.sample, strict=True)
        )


def stored_base(index: Index) -> BaseIdentity:
    """Return the base that a store was filled for.

    Raises:
        StoreUnusable: its record in the index is malformed.
    """
    try:
        return BaseIdentity.from_text(index.base() or "")
    except (ValueError, RecursionError) as error:
        raise StoreUnusable(f"the record of its base is damaged in the index: {error}") from None


def check_same_base(ours: BaseIdentity, theirs: str) -> None:
    """Check that adapters of another store fit this base.

    Args:
        theirs: the base that those adapters were checked for, as text.

    Raises:
        StoreUnusable: they are of another base; the message says how the bases differ.
    """
    try:
        other = BaseIdentity.from_text(theirs)
    except (ValueError, RecursionError) as error:
        raise StoreUnusable(f"the registry does not say which base its adapters are for: {error}") from None
    if not ours.has_shapes_of(other):
        raise StoreUnusable(
            f"the registry's adapters are for a base of shapes {other.shapes[:12] or 'unknown'}, this server's base "
            f"has {ours.shapes[:12]}; give both the same --model"
        )
    if not ours.has_weights_of(other):
        raise StoreUnusable(
            "the registry's adapters are for a base of other weights, in the same shapes; give both the same --model"
        )


def bind_base(index: Index, identity: BaseIdentity, check: Callable[[Content], object], accept_change: bool) -> None:
    """Bind a store to this base; rebind one filled for another only if accepted and `check` passes every adapter.

    Raises:
        StoreUnusable: it has adapters of another base; the message names the first that does not fit, and why.
    """
    filled = not index.is_empty()
    before = stored_base(index)
    if filled and not (identity.has_shapes_of(before) and identity.has_weights_of(before)):
        if not accept_change:
            what = "weights, in the same shapes," if identity.has_shapes_of(before) else "shapes"
            raise StoreUnusable(
                f"it holds adapters that were checked for a base of other {what} than this one; give each base a "
                "folder of its own (--store), or have every adapter checked against this one (--accept-base-change)"
            )
        _check_all(index, check)
    elif filled and not identity.sample:
        identity = before
    index.bind_base(identity.to_text())


def _check_all(index: Index, check: Callable[[Content], object]) -> None:
    misfits: list[str] = []
    records = index.records().values()
    for record in records:
        for key in sorted({version.key for version in record.versions if version.key is not None}):
            content = index.content(key)
            assert content is not None
            try:
                check(content)
            except (AdapterInvalid, AdapterCorrupt) as error:
                misfits.append(f"{record.adapter_id} ({error})")
    if misfits:
        raise StoreUnusable(
            f"--accept-base-change: {len(misfits)} adapters do not fit this base, and nothing was changed; give it a "
            f"folder of its own (--store). The first is {misfits[0]}"
        )
