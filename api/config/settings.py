"""Declare the options of `lorasrv serve`, each once, in `ServerSettings` and its bases.

A declaration determines the flag (`api.cli.common.settings_options`), the environment variable and the key of the
configuration file (`api.config.sources`), and the field of the engine's configuration.
"""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from adapter_store.quota import StoreQuota
from adapter_store.spec import BF16, Form
from api.asgi.address import DEFAULT_HOST, DEFAULT_PORT, is_loopback
from api.asgi.limits import ConnectionLimits
from api.config.cluster_settings import ClusterSettings
from api.config.engine_settings import EngineSettings
from api.config.lora_module_path import LoraModulePath, parse_modules
from api.config.option_spec import OptionSpec, Size, option_specs, texts
from api.config.replication_settings import SECRET, SECRET_RULE
from lorasrv.config import default_store_dir

if TYPE_CHECKING:
    from lorasrv.engine.fault_injection import Fault

DEFAULT_WATCHDOG_S = 60.0
DEFAULT_DRAIN_S = 25.0
"""Below the 30 s after which orchestrators kill a process by default."""


_model = partial(OptionSpec, panel="Model")
_adapters = partial(OptionSpec, panel="Adapters")
_network = partial(OptionSpec, panel="Network")
_faults = partial(OptionSpec, panel="Shutdown and faults")
_observability = partial(OptionSpec, panel="Observability")
_EDGE = ConnectionLimits()
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Count = Annotated[int, Field(ge=0)]
_AtLeastOne = Annotated[int, Field(ge=1)]
_Duration = Annotated[float, Field(ge=0)]
_Seconds = Annotated[float, Field(gt=0, le=86400)]
_NO_LIMIT = "no limit"


class ServerSettings(ClusterSettings, EngineSettings):
    """Hold all options of `serve`. Sizes take 512MiB, 2GB or plain bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    served_model_name: Annotated[
        _Name | None, _model("Name of the base model in the API", default="the model's own", metavar="NAME")
    ] = None

    store: Annotated[Path, _adapters("Folder of the adapter store", default="~/.local/share/lorasrv")] = Field(
        default_factory=default_store_dir
    )
    max_adapters: Annotated[
        _Count | None, _adapters("Maximum number of adapter versions in the store", default=_NO_LIMIT)
    ] = None
    store_bytes: Annotated[
        Size | None, _adapters("Maximum size of the adapter weights in the store, e.g. 20GiB", default=_NO_LIMIT)
    ] = None
    adapter_storage: Annotated[Form, _adapters("Form of new adapters whose upload names none; bf16: as --dtype")] = BF16
    lora_modules: Annotated[
        tuple[LoraModulePath, ...],
        _adapters("Adapters to register at the start: name=folder ..., or JSON as in vLLM", metavar="NAME=FOLDER"),
    ] = ()
    lora_import_root: Annotated[
        Path | None, _adapters("Folder below which requests may register adapters by path", default="none")
    ] = None
    accept_base_change: Annotated[
        bool,
        _adapters("Accept a store that was filled for another base model, and check every adapter against this one"),
    ] = False

    host: Annotated[str, _network("Address to listen on", metavar="ADDRESS")] = DEFAULT_HOST
    port: Annotated[int, Field(ge=0, le=65535), _network("Port to listen on; 0 takes a free one")] = DEFAULT_PORT
    allowed_origins: Annotated[
        tuple[str, ...], _network("Origins whose web pages may call the server; may be repeated", metavar="ORIGIN")
    ] = ()
    api_key: Annotated[
        SecretStr | None,
        _network(
            "API key with every permission, besides those of lorasrv key; safer as LORASRV_API_KEY", metavar="KEY"
        ),
    ] = None
    insecure: Annotated[bool, _network("Serve other machines even without API keys")] = False
    max_connections: Annotated[_AtLeastOne, _network("Maximum number of open connections")] = _EDGE.max_connections
    header_timeout_s: Annotated[_Seconds, _network("Maximum time to receive the headers of a request, in seconds")] = (
        _EDGE.header_timeout_s
    )
    body_timeout_s: Annotated[_Seconds, _network("Maximum time to receive a body at less than 1 KiB/s, in seconds")] = (
        _EDGE.body_timeout_s
    )
    write_timeout_s: Annotated[
        _Seconds, _network("Maximum time a client may leave its response unread, in seconds")
    ] = _EDGE.write_timeout_s
    keep_alive_s: Annotated[_Seconds, _network("Maximum time between two requests of a connection, in seconds")] = (
        _EDGE.keep_alive_s
    )

    drain_s: Annotated[_Duration, _faults("Maximum time for running requests to finish at shutdown, in seconds")] = (
        DEFAULT_DRAIN_S
    )
    watchdog_s: Annotated[
        _Duration,
        _faults("Duration of a step after which the server exits with an error, in seconds; 0 turns this off"),
    ] = DEFAULT_WATCHDOG_S
    inject_faults: Annotated[
        str | None,
        _faults(
            "Faults to raise on purpose, e.g. slow-disk:200ms,step-raises@50; requires --testing", metavar="FAULTS"
        ),
    ] = None
    testing: Annotated[bool, _faults("Allow --inject-faults")] = False

    log_format: Annotated[
        Literal["auto", "json", "text"], _observability("Format of log lines; auto: text in a terminal, else json")
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _observability("Lowest level of log lines; info: one line per request"),
    ] = "info"
    log_prompts: Annotated[bool, _observability("Log the first characters of prompts and answers")] = False
    metrics_compat: Annotated[
        Literal["vllm"] | None, _observability("Additional metric names in /metrics", default="none")
    ] = None
    metrics_adapters: Annotated[
        Annotated[int, Field(ge=0, le=1000)],
        _observability("Maximum number of adapters with metrics of their own; the busiest come first"),
    ] = 50
    otlp_traces_endpoint: Annotated[
        Annotated[str, Field(pattern="^https?://")] | None,
        _observability(
            "URL to send OpenTelemetry spans to, e.g. http://collector:4318",
            default="none",
            metavar="URL",
            example="http://collector:4318",
            aliases=("otlp_endpoint",),
        ),
    ] = None
    record_trace: Annotated[
        Path | None, _observability("File to append a line per finished request to, for lorasrv plan", metavar="FILE")
    ] = None
    profile: Annotated[
        Path | None, _observability("JSON file to write the time per part of a step to, at shutdown", metavar="FILE")
    ] = None

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _parse_modules(cls, value: object) -> object:
        return parse_modules(value)

    @field_validator("lora_import_root")
    @classmethod
    def _check_import_root(cls, value: Path | None) -> Path | None:
        root = value.expanduser().resolve() if value is not None else None
        if root is not None and not root.is_dir():
            raise ValueError(f"{value} is not a folder")
        if root is not None and root == root.parent:
            raise ValueError(f"{value} is the root of the file system; give a folder that contains adapters")
        return root

    @field_validator("allowed_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: object) -> object:
        return texts(value)

    @field_validator("api_key")
    @classmethod
    def _check_api_key(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not SECRET.fullmatch(value.get_secret_value()):
            raise ValueError(f"{SECRET_RULE}; lorasrv key create generates one")
        return value

    @model_validator(mode="after")
    def _require_testing_for_faults(self) -> Self:
        if self.inject_faults and not self.testing:
            raise ValueError("--inject-faults makes this server fail on purpose; add --testing to allow it")
        return self

    @property
    def secret_key(self) -> str | None:
        """Return the key of `--api-key` in clear text."""
        return None if self.api_key is None else self.api_key.get_secret_value()

    @property
    def serves_without_keys(self) -> bool:
        """Return whether clients need no key while the store has none."""
        return self.insecure or is_loopback(self.host)

    @property
    def checks_host(self) -> bool:
        """Return whether requests must name a loopback Host, because only this machine is served."""
        return is_loopback(self.host) and not self.insecure

    def faults(self) -> "tuple[Fault, ...]":
        """Return the faults to inject.

        Raises:
            ConfigError: a part is not a fault; the error names it.
        """
        from lorasrv.engine.fault_injection import parse_faults

        return parse_faults(self.inject_faults or "")

    def connection_limits(self) -> ConnectionLimits:
        """Return the bounds of every connection."""
        return ConnectionLimits(**{field.name: getattr(self, field.name) for field in fields(ConnectionLimits)})

    def store_quota(self) -> StoreQuota:
        """Return the quota of the whole store; a key may have a smaller one."""
        return StoreQuota(self.max_adapters, None if self.store_bytes is None else int(self.store_bytes))


_PANELS = (
    *("Model", "Adapters", "Memory", "Scheduling", "Speculation", "Limits", "Network", "Watermark"),
    *("Shutdown and faults", "Observability", "Partition", "Cluster"),
)
"""Headings of the help, in order."""
OPTIONS: dict[str, OptionSpec] = dict(
    sorted(option_specs(ServerSettings).items(), key=lambda item: _PANELS.index(item[1].panel))
)
"""Declarations of all options by name."""
SPELLINGS: dict[str, str] = {spelling: name for name, option in OPTIONS.items() for spelling in (name, *option.aliases)}
"""Option of each accepted spelling."""
