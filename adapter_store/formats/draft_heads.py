"""Medusa heads in an adapter's weights file: small blocks that predict the tokens after the next one.

    medusa_head.<head>.<block>.linear.weight [H, H]
    medusa_head.<head>.<block>.linear.bias [H], if the block has one

Head 0 predicts the token after the next one from the last hidden state h: each block adds silu(W h + b) to h, and the
base's output layer turns the result into logits. A folder may have the heads in a separate file, named as in Medusa,
TGI and LoRAX; they are then joined to the adapter's weights.

Source: Medusa (Cai et al. 2024, arXiv:2401.10774).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from adapter_store.errors import AdapterInvalid, Problem, ProblemList, show
from adapter_store.formats.peft_dir import HEADS_NAME
from adapter_store.formats.safetensors_file import ENDED, FILE, LENGTH_BYTES, SafetensorsHeader, read_header
from adapter_store.spec import HeadBlock

PREFIX = "medusa_head."
MAX_HEADS, MAX_BLOCKS = 8, 2
MAX_HEADER_BYTES = 1 << 20
MAX_JOINED_HEADER_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
_NUMBER = "(0|[1-9][0-9]?)"
_BLOCK = re.compile(rf"(?:medusa_head\.|medusa\.)?{_NUMBER}\.{_NUMBER}\.linear\.(weight|bias)")
_OUTPUT = re.compile(rf"(?:medusa_head\.|medusa\.)?{_NUMBER}\.{_NUMBER}\.weight")


def is_head_name(name: str) -> bool:
    """Return whether a tensor of an adapter's file belongs to its heads."""
    return name.startswith(PREFIX)


def max_head_bytes(hidden_size: int) -> int:
    """Return the bytes of the largest heads that are accepted, in float32."""
    return 4 * MAX_HEADS * MAX_BLOCKS * (hidden_size * hidden_size + hidden_size)


def match_heads(
    header: SafetensorsHeader, names: Iterable[str], hidden_size: int, problems: ProblemList
) -> tuple[tuple[HeadBlock, ...], ...]:
    """Return the blocks of each head, with the names of their tensors; record a problem for each name that is not
    part of a head, each shape that does not fit and each missing head or block."""
    blocks: dict[tuple[int, int], dict[str, str]] = {}
    for name in names:
        at = show(name)[1:-1]
        shape = header.tensors[name].shape
        if _OUTPUT.fullmatch(name):
            what = "is an output layer of a head's own; train heads that share the base's"
            problems.add("unsupported_draft_heads", at, what)
        elif (found := _BLOCK.fullmatch(name)) is None:
            what = f"is no part of a Medusa head; expected {PREFIX}0.0.linear.weight"
            problems.add("unsupported_draft_heads", at, what)
        elif shape != ((hidden_size,) if found[3] == "bias" else (hidden_size, hidden_size)):
            problems.add("shape_mismatch", at, f"has shape {list(shape)}; this base has {hidden_size} hidden numbers")
        elif blocks.setdefault((int(found[1]), int(found[2])), {}).setdefault(found[3], name) != name:
            problems.add("unsupported_draft_heads", at, "is there twice, under two names")
    if problems:
        return ()
    return _in_order(blocks, problems)


def _in_order(
    blocks: Mapping[tuple[int, int], Mapping[str, str]], problems: ProblemList
) -> tuple[tuple[HeadBlock, ...], ...]:
    heads: list[tuple[HeadBlock, ...]] = []
    for head in range(len({head for head, _ in blocks})):
        of_head = sorted(block for other, block in blocks if other == head)
        names = [blocks[head, block] for block in of_head]
        if not of_head or of_head != list(range(len(of_head))) or not all("weight" in name for name in names):
            problems.add("unsupported_draft_heads", f"{PREFIX}{head}", "is not whole; heads and blocks count from 0")
            return ()
        if head >= MAX_HEADS or len(of_head) > MAX_BLOCKS:
            most = f"{MAX_HEADS} heads of {MAX_BLOCKS} blocks"
            problems.add("unsupported_draft_heads", f"{PREFIX}{head}", f"is too much; at most {most} are served")
            return ()
        heads.append(tuple(HeadBlock(name["weight"], name.get("bias")) for name in names))
    return tuple(heads)


def read_own_header(file: BinaryIO) -> SafetensorsHeader:
    """Return the header of a file that holds only heads; `file` must be at its beginning.

    Raises:
        AdapterInvalid: it is not a safetensors file; the message names it.
    """
    try:
        return read_header(file, os.fstat(file.fileno()).st_size, MAX_HEADER_BYTES)
    except AdapterInvalid as error:
        raise AdapterInvalid(tuple(map(_of_heads, error.problems))) from None


def _of_heads(problem: Problem) -> Problem:
    """Return a problem of an adapter's file, worded for a file of heads."""
    messages = {
        "no_tensors": "holds no tensors, so no heads",
        "not_safetensors": "is no safetensors file; save the heads as one",
    }
    if problem.field != FILE:
        return problem
    return replace(problem, field=HEADS_NAME, message=messages.get(problem.code, problem.message))


def join_heads(weights: BinaryIO, heads: BinaryIO, target: Path) -> None:
    """Write an adapter's tensors and the heads of a separate file to one file.

    Raises:
        AdapterInvalid: one of them is not a safetensors file, or ends early, or both have heads.
    """
    own = read_header(weights, os.fstat(weights.fileno()).st_size, MAX_JOINED_HEADER_BYTES)
    if any(map(is_head_name, own.tensors)):
        raise AdapterInvalid(
            (Problem("unsupported_draft_heads", HEADS_NAME, "is beside weights that hold heads, too"),)
        )
    added = read_own_header(heads)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for header, shift in ((own, 0), (added, own.data_bytes)):
        for name, info in header.tensors.items():
            shown = name if header is own else PREFIX + name.removeprefix(PREFIX).removeprefix("medusa.")
            offsets = [info.start + shift, info.end + shift]
            if shown in entries:
                raise AdapterInvalid((Problem("unsupported_draft_heads", HEADS_NAME, "names a tensor twice"),))
            entries[shown] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with target.open("wb") as out:
        out.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for file, header, name in ((weights, own, FILE), (heads, added, HEADS_NAME)):
            for chunk in _chunks(file, header.data_bytes, name):
                out.write(chunk)


def _chunks(file: BinaryIO, left: int, name: str) -> Iterator[bytes]:
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise AdapterInvalid((Problem("truncated", name, ENDED),))
        left -= len(chunk)
        yield chunk
