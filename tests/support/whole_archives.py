"""Reading archives of stores, and writing them with another manifest."""

import io
import json
import tarfile
from collections.abc import Callable
from typing import Any


def opened(data: bytes) -> tarfile.TarFile:
    return tarfile.open(fileobj=io.BytesIO(data))


def manifest_of(data: bytes) -> dict[str, Any]:
    with opened(data) as tar:
        return json.load(tar.extractfile("lorasrv-store.json"))  # type: ignore[arg-type,no-any-return]


def rebuilt(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the archive with another manifest, written by Python's tarfile."""
    manifest = manifest_of(data)
    change(manifest)
    out = io.BytesIO()
    with opened(data) as old, tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as new:
        for member in old.getmembers():
            content = old.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "lorasrv-store.json":
                content = json.dumps(manifest).encode()
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    return out.getvalue()
