"""Rendezvous hashing (Thaler and Ravishankar 1998), weighted: every router ranks the replicas of a key in the same
order.

Each pair of key and replica has its own random number, which ranks the replicas of the key. Nothing is shared or
stored: if a replica comes or goes, only the keys that it wins or loses move. A key is hashed once; the finalizer of
splitmix64 mixes this hash with the hash of each replica.
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
        replicas: (id, hash of the id, weight); a replica with twice the weight is the first of twice as many keys.
    """
    hashed = hash_of(key)
    scored = [(-weight / math.log(_uniform(hashed ^ seed)), name) for name, seed, weight in replicas]
    scored.sort(key=lambda one: (-one[0], one[1]))
    return [name for _, name in scored]


def _uniform(bits: int) -> float:
    """Return a number in the open interval (0, 1) that depends on each of 64 bits."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    # 52 bits plus one half are exact in a float.
    return (((bits ^ (bits >> 31)) >> 12) + 0.5) / (1 << 52)
