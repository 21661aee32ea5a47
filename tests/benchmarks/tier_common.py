"""What the measures of `bench_tiers.py` share: stores, servers with pools of a size, tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peer_servers import ROOT, Served, lorasrv
from tier_assets import FEW
from tier_load import Answer

FOLDER = ROOT / "build" / "bench" / "tiers"
FEW_FOLDER = FOLDER.with_name(f"tiers-{FEW}")
BLOCK_BYTES = 2 * 192 * 16 * 2 * 30
"""A page of the pool: keys and values of 16 tokens in all layers of the built-in base, bf16."""
ADAPTER_PAGES = 2
PAGE_TOKENS = 16
PROMPT_TOKENS = 80


@contextmanager
def served(folder: Path, more_flags: str = "", **flags: object) -> Iterator[Served]:
    """A server on a store that `make` has filled; `pool_bytes=1` is `--pool-bytes 1`."""
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with lorasrv(folder, [], [*given, *more_flags.split()]) as server:
        yield server


def pool_bytes(kv_tokens: int, requests: int, adapters: int) -> int:
    """A pool with room for the keys and values of so many requests, and for so many adapters beside them."""
    return BLOCK_BYTES * (requests * -(-kv_tokens // PAGE_TOKENS) + adapters * ADAPTER_PAGES)


def table(titles: Sequence[str]) -> None:
    print(f"\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def complain(answers: Sequence[Answer]) -> None:
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors:
        print(f"\n{len(errors)} of {len(answers)} failed; the first: {errors[0]}", flush=True)
