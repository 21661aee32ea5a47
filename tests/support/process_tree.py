"""Descendants of a process, and the ports on which each listens, from /proc."""

import ipaddress
import os
import re
import struct
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the running child processes of this one."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


def descendants(pid: int) -> dict[int, str]:
    """Return all processes below one, with their command lines."""
    found: dict[int, str] = {}
    waiting = children_of(pid)
    while waiting:
        child = waiting.pop()
        try:
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            waiting += children_of(child)
        except OSError:
            found.pop(child, None)
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def listening(pid: int) -> list[tuple[str, int]]:
    """Return address and port of every TCP socket on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(found[1])
        except OSError:
            continue
    places = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                host, _, port = parts[1].partition(":")
                places.append((_address(host), int(port, 16)))
    return places


def _address(hexadecimal: str) -> str:
    words = [int(hexadecimal[at : at + 8], 16) for at in range(0, len(hexadecimal), 8)]
    address = ipaddress.ip_address(b"".join(struct.pack("<I", word) for word in words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
