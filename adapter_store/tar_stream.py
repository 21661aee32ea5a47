"""Plain tar (ustar), one member after the other, for files only: nothing is ever unpacked to a name that it gives.

Python's `tarfile` packs and parses the 512 byte headers; its reading of extended headers and links, which an untrusted
archive can turn against the reader, is left out.
"""

import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from adapter_store.errors import InvalidArchive, show

CHUNK_BYTES = 1 << 20


def tar_header(name: str, num_bytes: int) -> bytes:
    """The block before a member's data."""
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    return info.tobuf(tarfile.USTAR_FORMAT)


def tar_padding(num_bytes: int) -> bytes:
    """What follows a member's data, up to the next block."""
    return bytes(-num_bytes % tarfile.BLOCKSIZE)


TAR_END = bytes(2 * tarfile.BLOCKSIZE)


class TarReader:
    """Members of a stream, in its order. Each member's data must be read before the next one is asked for.

    Raises (all methods): InvalidArchive: it is no tar, ends early, or holds anything but plain files.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def next_member(self) -> tuple[str, int] | None:
        """Name and bytes of the next member, None at the end."""
        block = self._read(tarfile.BLOCKSIZE)
        if not any(block):
            return None
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            raise InvalidArchive("this is no tar file that lorasrv store export wrote, or it is damaged") from None
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.size < 0:
            raise InvalidArchive(f"member {show(info.name)} of the archive is no plain file; nothing was imported")
        return info.name, info.size

    def data(self, num_bytes: int) -> Iterator[bytes]:
        """The data of the member that was announced last, in pieces."""
        left = num_bytes
        while left:
            chunk = self._read(min(left, CHUNK_BYTES))
            left -= len(chunk)
            yield chunk
        self._read(len(tar_padding(num_bytes)))

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise InvalidArchive("the archive ends early; copy it again")
        return data
