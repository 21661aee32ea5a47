"""What `lorasrv serve` is told, by flags, LORASRV_* variables or a file, and what the engine is built from."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ByteSize, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from adapter_store.quota import StoreQuota
from api.asgi.address import DEFAULT_HOST, DEFAULT_PORT, is_loopback
from api.asgi.limits import ConnectionLimits
from api.config.lora_modules import LoraModulePath, parse_modules
from lorasrv.config import (
    BUILTIN_MODEL,
    EngineConfig,
    Limits,
    MemoryOptions,
    ModelOptions,
    SchedulerOptions,
    default_store_dir,
)
from lorasrv.engine.fault_injection import Fault, parse_faults
from lorasrv.errors import ConfigError, InvalidLimits
from lorasrv.sampling_params import Watermark

DEFAULT_WATCHDOG_S = 60.0
DEFAULT_DRAIN_S = 25.0
"""Orchestrators kill after 30 s, if nobody tells them otherwise."""
DEFAULT_ALLOWED_ORIGINS: tuple[str, ...] = ()
_MODEL = ModelOptions()
_MEMORY = MemoryOptions()
_SCHEDULER = SchedulerOptions()
_WATERMARK = Watermark()
_EDGE = ConnectionLimits()
_Seconds = Annotated[float, Field(gt=0, le=86400)]

_SECRET = re.compile(r"[!-~]{8,512}")
_SIZES = (
    "store_bytes",
    "pool_bytes",
    "host_cache_bytes",
    "swap_bytes",
    "resident_bytes_per_adapter",
    "resident_bytes_per_key",
)


class ServerSettings(BaseSettings):
    """Every option of `serve`. Field names are the flags' with underscores; sizes take 512MiB, 2GB or plain bytes."""

    model_config = SettingsConfigDict(
        env_prefix="LORASRV_", extra="forbid", frozen=True, env_ignore_empty=True, hide_input_in_errors=True
    )

    model: str = BUILTIN_MODEL
    quantization: str = _MODEL.quantization
    quantization_group: int | None = _MODEL.quantization_group
    bf16_linears: str = _MODEL.bf16_linears
    quantized_weights: Path | None = None
    dtype: str = _MODEL.dtype
    device: str = _MODEL.device
    kernels: str = _MODEL.kernels
    load_format: str = _MODEL.load_format
    served_model_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    max_model_len: int | None = None
    store: Path = Field(default_factory=default_store_dir)
    max_adapters: Annotated[int, Field(ge=0)] | None = None
    store_bytes: ByteSize | None = None
    accept_base_change: bool = False
    lora_modules: Annotated[tuple[LoraModulePath, ...], NoDecode] = ()
    lora_import_root: Path | None = None
    host: str = DEFAULT_HOST
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    kv_dtype: str = _MEMORY.kv_dtype
    pool_bytes: ByteSize | None = None
    host_cache_bytes: ByteSize = ByteSize(_MEMORY.host_cache_bytes)
    swap_bytes: ByteSize = ByteSize(_MEMORY.swap_bytes)
    enable_prefix_caching: bool = _MEMORY.prefix_caching
    adapter_pool_fraction: float | None = _MEMORY.adapter_pool_fraction
    max_lora_rank: int = _MEMORY.max_lora_rank
    max_num_seqs: int = _SCHEDULER.max_num_seqs
    max_num_batched_tokens: int = _SCHEDULER.max_num_batched_tokens
    preemption: str = _SCHEDULER.preemption
    policy: str = _SCHEDULER.policy
    target_itl_ms: float | None = _SCHEDULER.target_itl_ms
    max_wait_steps: int = _SCHEDULER.max_wait_steps
    max_queued: Annotated[int, Field(ge=1)] = _SCHEDULER.max_num_queued_seqs
    max_queued_tokens: Annotated[int, Field(ge=1)] = _SCHEDULER.max_num_queued_tokens
    queue_timeout_s: float | None = _SCHEDULER.queue_timeout_s
    early_abort: bool = _SCHEDULER.early_abort
    max_running_per_adapter: int | None = None
    max_queued_per_adapter: int | None = None
    tokens_per_s_per_adapter: float | None = None
    resident_bytes_per_adapter: ByteSize | None = None
    max_running_per_key: int | None = None
    max_queued_per_key: int | None = None
    tokens_per_s_per_key: float | None = None
    resident_bytes_per_key: ByteSize | None = None
    watchdog_s: Annotated[float, Field(ge=0)] = DEFAULT_WATCHDOG_S
    drain_s: Annotated[float, Field(ge=0)] = DEFAULT_DRAIN_S
    inject_faults: str | None = None
    testing: bool = False
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = DEFAULT_ALLOWED_ORIGINS
    api_key: SecretStr | None = None
    insecure: bool = False
    max_connections: Annotated[int, Field(ge=1)] = _EDGE.max_connections
    header_timeout_s: _Seconds = _EDGE.header_timeout_s
    body_timeout_s: _Seconds = _EDGE.body_timeout_s
    write_timeout_s: _Seconds = _EDGE.write_timeout_s
    keep_alive_s: _Seconds = _EDGE.keep_alive_s
    watermark_gamma: float = _WATERMARK.gamma
    watermark_delta: float = _WATERMARK.delta
    watermark_key: Annotated[int, Field(repr=False)] = _WATERMARK.key
    log_format: Literal["auto", "json", "text"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_prompts: bool = False
    metrics_compat: Literal["vllm"] | None = None
    metrics_adapters: Annotated[int, Field(ge=0, le=1000)] = 50
    otlp_endpoint: Annotated[str, Field(pattern="^https?://")] | None = None
    record_trace: Path | None = None
    profile: Path | None = None

    @field_validator(*_SIZES, mode="before")
    @classmethod
    def _sizes_are_not_negative(cls, value: object) -> object:
        if str(value).strip().startswith("-"):
            raise ValueError(f"must not be negative, not {value}")
        return value

    @field_validator("target_itl_ms", mode="before")
    @classmethod
    def _off_is_no_target(cls, value: object) -> object:
        return None if value == "off" else value

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _parse_modules(cls, value: object) -> object:
        return parse_modules(value)

    @field_validator("lora_import_root")
    @classmethod
    def _is_a_folder(cls, value: Path | None) -> Path | None:
        root = value.expanduser().resolve() if value is not None else None
        if root is not None and not root.is_dir():
            raise ValueError(f"{value} is no folder")
        if root is not None and root == root.parent:
            raise ValueError(f"{value} is the whole machine; give a folder that holds adapters")
        return root

    @field_validator("allowed_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: object) -> object:
        """One string may hold several origins, separated by commas."""
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            return value
        return tuple(origin.strip().rstrip("/") for part in parts for origin in str(part).split(",") if origin.strip())

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not _SECRET.fullmatch(value.get_secret_value()):
            raise ValueError("takes 8 or more letters, digits and signs without spaces; lorasrv key create makes one")
        return value

    @property
    def secret_key(self) -> str | None:
        """The key of `--api-key`, to be shown to nobody."""
        return None if self.api_key is None else self.api_key.get_secret_value()

    @property
    def serves_without_keys(self) -> bool:
        """Whether everybody is served while there are no keys."""
        return self.insecure or is_loopback(self.host)

    @model_validator(mode="after")
    def _faults_are_meant(self) -> Self:
        if self.inject_faults and not self.testing:
            raise ValueError(
                "--inject-faults makes this server fail on purpose; add --testing if that is what you want"
            )
        return self

    def faults(self) -> tuple[Fault, ...]:
        """What shall go wrong. Raises: ConfigError: it is no fault; names it."""
        return parse_faults(self.inject_faults or "")

    @property
    def checks_host(self) -> bool:
        """Whether requests must name a loopback Host: only programs of this machine are served."""
        return is_loopback(self.host) and not self.insecure

    def engine_config(self) -> EngineConfig:
        """Raises: ConfigError: a value is out of range; names the flag."""
        return EngineConfig(
            model=ModelOptions(
                model=self.model,
                quantization=self.quantization,
                quantization_group=self.quantization_group,
                bf16_linears=self.bf16_linears,
                quantized_weights=self.quantized_weights,
                dtype=self.dtype,
                device=self.device,
                kernels=self.kernels,
                max_model_len=self.max_model_len,
                load_format=self.load_format,
            ),
            memory=MemoryOptions(
                pool_bytes=None if self.pool_bytes is None else int(self.pool_bytes),
                kv_dtype=self.kv_dtype,
                host_cache_bytes=int(self.host_cache_bytes),
                max_lora_rank=self.max_lora_rank,
                swap_bytes=int(self.swap_bytes),
                prefix_caching=self.enable_prefix_caching,
                adapter_pool_fraction=self.adapter_pool_fraction,
            ),
            scheduler=self._scheduler_options(),
            watermark=Watermark(self.watermark_gamma, self.watermark_delta, self.watermark_key),
        )

    def edge_bounds(self) -> ConnectionLimits:
        """Of every connection."""
        return ConnectionLimits(**{field.name: getattr(self, field.name) for field in fields(ConnectionLimits)})

    def store_quota(self) -> StoreQuota:
        """What may be stored in all; a key may have less (`keys/key.py`)."""
        return StoreQuota(self.max_adapters, None if self.store_bytes is None else int(self.store_bytes))

    def limits(self, of: Literal["adapter", "key"]) -> Limits:
        """Those of every adapter, or of every key.

        Raises: ConfigError: one is out of range; names the flag.
        """
        names = [field.name for field in fields(Limits) if field.name != "weight"]
        given: dict[str, Any] = {name: getattr(self, f"{name}_per_{of}") for name in names}
        try:
            return Limits(**given)
        except InvalidLimits as error:
            flag = f"--{error.param}-per-{of}".replace("_", "-")
            raise ConfigError(f"{flag} {str(error).removeprefix(f'{error.param} ')}") from None

    def _scheduler_options(self) -> SchedulerOptions:
        return SchedulerOptions(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_queued_seqs=self.max_queued,
            max_num_queued_tokens=self.max_queued_tokens,
            preemption=self.preemption,
            policy=self.policy,
            target_itl_ms=self.target_itl_ms,
            max_wait_steps=self.max_wait_steps,
            queue_timeout_s=self.queue_timeout_s,
            early_abort=self.early_abort,
            adapter_limits=self.limits("adapter"),
            key_limits=self.limits("key"),
        )
