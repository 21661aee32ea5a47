"""The configuration file: where it is, what is in it. Options of `serve` at its top, those of clients in [client].

No pydantic here: `lorasrv list` reads [client] of it, and a shell that completes a word waits for that.
"""

import os
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adapter_store.registry.near_names import near_names
from lorasrv.errors import ConfigError

ENVIRONMENT = "LORASRV_CONFIG"
CLIENT_KEYS = ("server", "api_key")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says, by names with underscores. Values are as TOML has them; only [client] is checked."""

    path: Path
    serve: dict[str, Any] = field(default_factory=dict)
    client: dict[str, str] = field(default_factory=dict)


def default_path() -> Path:
    """Where a file is read from if it is there and nobody names one."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "lorasrv" / "config.toml"


def find(given: Path | None = None) -> Path | None:
    """The file to read: the given one, else that of LORASRV_CONFIG, else that of the default place; None: there is
    none there."""
    named = given or (Path(text) if (text := os.environ.get(ENVIRONMENT)) else None)
    if named is not None:
        return named.expanduser()
    try:
        path = default_path()
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # no home, or not ours to look into
        return None


def read(path: Path) -> ConfigFile:
    """Raises: ConfigError: it cannot be read, is no TOML, or [client] holds what is unknown; names file and key."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no UTF-8 text, which TOML is") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {str(error)[0].lower()}{str(error)[1:]}") from None
    client = values.pop("client", {})
    return ConfigFile(path, _with_underscores(path, values), _client(path, client))


def client_options() -> dict[str, str]:
    """[client] of the file that is found. Raises: ConfigError."""
    path = find()
    return {} if path is None else read(path).client


def check_keys(path: Path, given: Collection[str], known: Collection[str], table: str = "") -> None:
    """Raises: ConfigError: a key is unknown; with those that it could be."""
    for key in given:
        if key not in known:
            near = near_names(key, known)
            hint = f"did you mean {' or '.join(near)}?" if near else "lorasrv config init lists all there are"
            raise ConfigError(f"{path}: unknown key {table}{key}; {hint}")


def _with_underscores(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Both spellings are understood: of the flag and of the environment."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in named:
            raise ConfigError(f"{path}: {name} stands there twice, with - and with _")
        named[name] = value
    return named


def _client(path: Path, client: object) -> dict[str, str]:
    if not isinstance(client, dict):
        raise ConfigError(f"{path}: client: expected a table, [client] with {' and '.join(CLIENT_KEYS)}")
    named = _with_underscores(path, client)
    check_keys(path, named, CLIENT_KEYS, "client.")
    for key, value in named.items():
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{path}: client.{key}: expected a text that is not empty")
    return named
