"""Declare the options of `serve` by which servers of a cluster reach and authenticate each other; `ServerSettings` has
them with all others."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr

from api.config.option_spec import OptionSpec
from lorasrv.errors import ConfigError

PREFILL, DECODE, BOTH = ROLES = ("prefill", "decode", "both")
SECRET = re.compile(r"[!-~]{8,512}")
SECRET_RULE = "must be 8 to 512 printable ASCII characters without spaces"

_cluster = partial(OptionSpec, panel="Cluster")


class ReplicationSettings(BaseModel):
    """Hold the options of a server that is one of several."""

    registry: Annotated[
        Annotated[str, Field(pattern=r"^https?://[^/?#\s]+/?$")] | None,
        _cluster(
            "Server whose adapters and keys this one follows; it then takes no changes itself",
            default="none",
            metavar="URL",
            example="http://registry:8000",
        ),
    ] = None
    registry_key: Annotated[
        SecretStr | None,
        _cluster(
            "Key of scope replicate at the registry; safer as LORASRV_REGISTRY_KEY",
            default="the secret of the cluster",
            metavar="KEY",
        ),
    ] = None
    cluster_secret: Annotated[
        SecretStr | None,
        _cluster(
            "Secret that the servers of a cluster share, with which they ask each other; "
            "safer as LORASRV_CLUSTER_SECRET or --cluster-secret-file",
            metavar="SECRET",
        ),
    ] = None
    cluster_secret_file: Annotated[Path | None, _cluster("File whose first line is the secret of the cluster")] = None
    role: Annotated[
        str,
        _cluster(
            "Whose prompts this server of a cluster computes; decode: those of its own answers; prefill, both: also "
            "those of others, which take the pages",
            choices=ROLES,
        ),
    ] = BOTH

    def read_registry_key(self) -> str | None:
        """Return the key to send to the registry, in clear text.

        Raises:
            ConfigError: as for `read_cluster_secret`.
        """
        return self.registry_key.get_secret_value() if self.registry_key is not None else self.read_cluster_secret()

    def read_cluster_secret(self) -> str | None:
        """Return the cluster's secret in clear text; None if there is none.

        Raises:
            ConfigError: the file cannot be read, the secret is malformed, or both options are given.
        """
        if self.cluster_secret is not None and self.cluster_secret_file is not None:
            raise ConfigError("--cluster-secret and --cluster-secret-file are two secrets; give one of them")
        name = "--cluster-secret"
        secret = None if self.cluster_secret is None else self.cluster_secret.get_secret_value()
        if self.cluster_secret_file is not None:
            name = f"--cluster-secret-file {self.cluster_secret_file}"
            try:
                with self.cluster_secret_file.expanduser().open() as file:
                    secret = file.readline(1024).strip()
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is no text"
                raise ConfigError(f"{name} cannot be read: {why}") from None
        if secret is not None and not SECRET.fullmatch(secret):
            raise ConfigError(f"{name}: the secret {SECRET_RULE}")
        return secret
