"""Find and read the configuration file: options of `serve` at its top level, options of clients in [client].

Does not import pydantic, because `lorasrv list` and shell completion read [client] and must start fast.
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
    """Hold the parsed file, with underscores in names. Values are TOML's; only [client] is checked."""

    path: Path
    serve: dict[str, Any] = field(default_factory=dict)
    client: dict[str, str] = field(default_factory=dict)


def default_path() -> Path:
    """Return the path to read if no other is given and it exists."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "lorasrv" / "config.toml"


def find(given: Path | None = None) -> Path | None:
    """Return the file to read: the given one, else the one of LORASRV_CONFIG, else the default one.

    Returns: None if no file is named and the default one does not exist.
    """
    named = given or (Path(text) if (text := os.environ.get(ENVIRONMENT)) else None)
    if named is not None:
        return named.expanduser()
    try:
        path = default_path()
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # no home folder, or no permission
        return None


def read(path: Path) -> ConfigFile:
    """Read and parse a file.

    Raises:
        ConfigError: the file cannot be read or is not TOML, or [client] has an unknown key; the error names both.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        named = os.environ.get(ENVIRONMENT)
        source = ENVIRONMENT if named and Path(named).expanduser() == path else "--config"
        raise ConfigError(f"{source}: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8, which TOML requires") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {str(error)[0].lower()}{str(error)[1:]}") from None
    if isinstance(values.get("serve"), dict):
        raise ConfigError(f"{path}: [serve]: options of serve stand at the top, outside any table")
    client = values.pop("client", {})
    return ConfigFile(path, _with_underscores(path, values), _client(path, client))


def client_options() -> dict[str, str]:
    """Return [client] of the configuration file, empty without one.

    Raises: ConfigError.
    """
    path = find()
    return {} if path is None else read(path).client


def check_keys(path: Path, given: Collection[str], known: Collection[str], table: str = "") -> None:
    """Check that all keys are known.

    Raises:
        ConfigError: a key is unknown; the message suggests similar ones.
    """
    for key in given:
        if key not in known:
            near = near_names(key, known)
            hint = f"did you mean {' or '.join(near)}?" if near else "lorasrv config init lists all keys"
            raise ConfigError(f"{path}: unknown key {table}{key}; {hint}")


def _with_underscores(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Accept both spellings of names: the flag's and the environment's."""
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in named:
            raise ConfigError(f"{path}: {name} appears twice, with - and with _")
        named[name] = value
    return named


def _client(path: Path, client: object) -> dict[str, str]:
    if not isinstance(client, dict):
        raise ConfigError(f"{path}: client: expected a table, [client] with {' and '.join(CLIENT_KEYS)}")
    named = _with_underscores(path, client)
    check_keys(path, named, CLIENT_KEYS, "client.")
    for key, value in named.items():
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{path}: client.{key}: expected text that is not empty")
    return named
