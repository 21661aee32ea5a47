"""Define the server's default address, and which addresses mean this machine."""

import ipaddress
import ssl
from typing import Any
from urllib.parse import urlsplit

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_SERVER = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"


def server_address(url: str) -> str:
    """Return the address of a server, without the /v1 that OpenAI's clients append."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_loopback(host: str) -> bool:
    """Return whether a bind address or a Host name (without port) can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connection_options(url: str) -> dict[str, Any]:
    """Return httpx's options for connections to a server's address."""
    address = urlsplit(url)
    return {
        # For an address on this machine, no proxy from the environment.
        "trust_env": not is_loopback(address.hostname or ""),
        # Plain HTTP needs no certificates, which take 25 ms to read: without any, TLS would trust nobody.
        "verify": address.scheme != "http" or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    }
