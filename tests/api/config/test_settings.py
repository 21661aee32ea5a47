"""Options of `serve`: flags and environment, sizes, and which addresses are refused."""

from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from api.config.settings import ServerSettings
from api.config.sources import Sources
from lorasrv.config import EngineConfig, Limits, SchedulerOptions
from lorasrv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"), [("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5KiB", 1536), ("4096", 4096), (7, 7)]
)
def test_sizes(text: object, value: int) -> None:
    assert ServerSettings(pool_bytes=text).engine_config().memory.pool_bytes == value


def test_every_option_reaches_the_engine() -> None:
    settings = ServerSettings(
        model="m.gguf",
        quantization="none",
        dtype="float32",
        device="cpu",
        max_model_len=100,
        kv_cache_dtype="float32",
        pool_bytes=1000,
        host_cache_bytes="1MiB",
        max_lora_rank=8,
        max_num_seqs=3,
        max_num_batched_tokens=5,
        swap_bytes="2KiB",
        enable_prefix_caching=False,
        adapter_pool_fraction=0.25,
        preemption_mode="swap",
        scheduling_policy="sjf",
        target_itl_ms=99.5,
        max_wait_steps=7,
        max_num_queued_seqs=11,
        max_num_queued_tokens=12,
        queue_timeout_s=2.5,
        early_abort=True,
        max_running_per_adapter=2,
        max_queued_per_adapter=4,
        tokens_per_s_per_adapter=1.5,
        resident_bytes_per_adapter="1KiB",
        max_running_per_key=1,
        max_queued_per_key=5,
        tokens_per_s_per_key=6.5,
        resident_bytes_per_key="2MiB",
    )
    config = settings.engine_config()
    assert (config.model.model, config.model.quantization, config.model.dtype) == ("m.gguf", "none", "float32")
    assert (config.model.device, config.model.max_model_len) == ("cpu", 100)
    assert (config.memory.kv_cache_dtype, config.memory.pool_bytes, config.memory.host_cache_bytes) == (
        "float32",
        1000,
        1 << 20,
    )
    assert config.memory.max_lora_rank == 8
    assert (config.memory.swap_bytes, config.memory.enable_prefix_caching) == (2048, False)
    assert config.memory.adapter_pool_fraction == 0.25
    assert config.scheduler == SchedulerOptions(
        max_num_seqs=3,
        max_num_batched_tokens=5,
        max_num_queued_seqs=11,
        max_num_queued_tokens=12,
        preemption_mode="swap",
        scheduling_policy="sjf",
        target_itl_ms=99.5,
        max_wait_steps=7,
        queue_timeout_s=2.5,
        early_abort=True,
        adapter_limits=Limits(max_running=2, max_queued=4, tokens_per_s=1.5, resident_bytes=1024),
        key_limits=Limits(max_running=1, max_queued=5, tokens_per_s=6.5, resident_bytes=2 << 20),
    )
    default = SchedulerOptions()
    assert [f.name for f in fields(default) if getattr(default, f.name) == getattr(config.scheduler, f.name)] == []


def test_defaults_are_the_engines() -> None:
    assert ServerSettings().engine_config() == EngineConfig()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASRV_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("LORASRV_ALLOWED_ORIGINS", "https://a.example,https://b.example/")
    monkeypatch.setenv("LORASRV_STORE", "")
    monkeypatch.setenv("LORASRV_ENABLE_PREFIX_CACHING", "false")
    monkeypatch.setenv("LORASRV_SWAP_BYTES", "0")
    monkeypatch.setenv("LORASRV_ADAPTER_POOL_FRACTION", "0.5")
    monkeypatch.setenv("LORASRV_PREEMPTION", "recompute")
    monkeypatch.setenv("LORASRV_POLICY", "mlfq")
    monkeypatch.setenv("LORASRV_TARGET_ITL_MS", "off")
    monkeypatch.setenv("LORASRV_EARLY_ABORT", "1")
    monkeypatch.setenv("LORASRV_RESIDENT_BYTES_PER_ADAPTER", "3KiB")
    settings = Sources.gather().settings()
    scheduler = settings.engine_config().scheduler
    assert (scheduler.scheduling_policy, scheduler.target_itl_ms, scheduler.early_abort) == ("mlfq", None, True)
    assert scheduler.adapter_limits == Limits(resident_bytes=3072)
    memory = settings.engine_config().memory
    assert (memory.enable_prefix_caching, memory.swap_bytes, memory.adapter_pool_fraction) == (False, 0, 0.5)
    assert settings.preemption_mode == "recompute"
    assert settings.max_num_seqs == 9
    assert settings.allowed_origins == ("https://a.example", "https://b.example")
    assert settings.store != Path()
    assert Sources.gather({"max_num_seqs": 4}).settings().max_num_seqs == 4


@pytest.mark.parametrize(
    "options",
    [{"pool_byte": 1}, {"port": 70000}, {"pool_bytes": "many"}, {"pool_bytes": -1}, {"served_model_name": ""}],
)
def test_wrong_options_are_errors(options: dict[str, object]) -> None:
    with pytest.raises((ValidationError, ConfigError)):
        ServerSettings(**options).engine_config()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "models.example", ""])
def test_other_addresses_need_keys_or_insecure(host: str) -> None:
    assert not ServerSettings(host=host).serves_without_keys
    assert not ServerSettings(host=host, api_key="s3cret-key").serves_without_keys
    insecure = ServerSettings(host=host, insecure=True)
    assert insecure.serves_without_keys
    assert not insecure.checks_host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_does_not(host: str) -> None:
    assert ServerSettings(host=host).checks_host
    assert ServerSettings(host=host).serves_without_keys


def test_the_key_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(api_key="s3cret-key")
    assert settings.secret_key == "s3cret-key"
    assert "s3cret" not in repr(settings) + str(settings) + settings.model_dump_json()
    for wrong in ("s3cret", "s3cret key", "s3cret-k\n", "s3cret-\xe9", "s3cret" * 100):
        with pytest.raises(ValidationError, match="must be 8 to 512 printable ASCII characters") as caught:
            ServerSettings(api_key=wrong)
        assert "s3cret" not in str(caught.value)
    monkeypatch.setenv("LORASRV_API_KEY", "")
    assert Sources.gather().settings().api_key is None


@pytest.mark.parametrize("name", ["pool_bytes", "host_cache_bytes", "swap_bytes", "resident_bytes_per_key"])
def test_negative_sizes_are_named(name: str) -> None:
    with pytest.raises(ValidationError, match="must not be negative, not -1"):
        ServerSettings(**{name: "-1"})
