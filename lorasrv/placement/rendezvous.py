"""Rendezvous hashing (Thaler and Ravishankar 1998), weighted: every router ranks the replicas of a key alike.

Each pair of key and replica has a random number of its own; a key's replicas are ranked by it. Nothing is shared or
remembered: where a replica comes or goes, only the keys move that it wins or had. A key is hashed once; its pairs are
mixed from that hash and the replicas' by the finalizer of splitmix64.
"""

import math
from collections.abc import Iterable
from hashlib import blake2b

MASK = (1 << 64) - 1


def hash_of(text: str) -> int:
    """Return 64 bits that are the same on every machine."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def order(key: str, replicas: Iterable[tuple[str, int, float]]) -> list[str]:
    """Return the replicas' ids as this key ranks them.

    Args:
        replicas: id, hash of the id, and weight: one of twice the weight is the first of twice the keys.
    """
    hashed = hash_of(key)
    scored = [(-weight / math.log(_uniform(hashed ^ seed)), name) for name, seed, weight in replicas]
    scored.sort(key=lambda one: (-one[0], one[1]))
    return [name for _, name in scored]


def _uniform(bits: int) -> float:
    """Return a number between 0 and 1, neither of them, that depends on each of 64 bits."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    # 52 bits and a half are exact in a float.
    return (((bits ^ (bits >> 31)) >> 12) + 0.5) / (1 << 52)
