"""Options of `serve`: sizes, which addresses need keys, and the secrecy of the key."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from adapter_store.quota import StoreQuota
from api.config.device_defaults import fitted
from api.config.settings import ServerSettings
from api.config.sources import Sources
from lorasrv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"), [("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5KiB", 1536), ("4096", 4096), (7, 7)]
)
def test_sizes(text: object, value: int) -> None:
    assert ServerSettings(pool_bytes=text).engine_config().memory.pool_bytes == value


def test_an_empty_variable_counts_as_unset_and_origins_lose_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORASRV_STORE", "")
    monkeypatch.setenv("LORASRV_ALLOWED_ORIGINS", "https://a.example,https://b.example/")
    settings = Sources.gather().settings()
    assert settings.store == ServerSettings().store
    assert settings.allowed_origins == ("https://a.example", "https://b.example")


@pytest.mark.parametrize(
    "options",
    [{"pool_byte": 1}, {"port": 70000}, {"pool_bytes": "many"}, {"pool_bytes": -1}, {"served_model_name": ""}],
)
def test_wrong_options_are_errors(options: dict[str, object]) -> None:
    with pytest.raises((ValidationError, ConfigError)):
        ServerSettings(**options).engine_config()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, False) for host in ("0.0.0.0", "::", "192.168.1.4", "models.example", "")),
        *((host, True) for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3")),
    ],
)
def test_other_addresses_than_loopback_need_keys_or_insecure(host: str, loopback: bool) -> None:
    settings, insecure = ServerSettings(host=host), ServerSettings(host=host, insecure=True)
    assert settings.serves_without_keys is settings.checks_host is loopback
    assert ServerSettings(host=host, api_key="s3cret-key").serves_without_keys is loopback
    assert insecure.serves_without_keys
    assert not insecure.checks_host


FREE = 128 << 30
GPU = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "host_cache_bytes": FREE // 8,
    "swap_bytes": int(0.03 * FREE),
}


@pytest.mark.parametrize(
    ("given", "differing"),
    [
        ({}, {}),
        ({"max_num_seqs": 64, "swap_bytes": "256MiB"}, {"max_num_seqs": 64, "swap_bytes": 256 << 20}),
        ({"max_num_batched_tokens": 100}, {"max_num_batched_tokens": 100, "max_num_seqs": 100}),
    ],
)
def test_a_gpu_has_defaults_of_its_own(
    given: dict[str, object], differing: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given stays, even if it is the CPU's default; what was not stays possible."""
    monkeypatch.setattr("lorasrv.worker.host_memory.free_bytes", lambda: FREE)
    settings = ServerSettings(port=7, **given)
    assert fitted(settings) is settings
    monkeypatch.setattr("lorasrv.worker.device.resolve_device", lambda name: torch.device("cuda"))
    config = fitted(settings).engine_config()
    found = {name: getattr(config.scheduler, name, getattr(config.memory, name, None)) for name in GPU}
    assert found == GPU | differing
    assert fitted(settings).port == 7


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


def test_quota_of_the_store() -> None:
    assert ServerSettings(max_adapters=5, store_bytes="2GiB").store_quota() == StoreQuota(5, 2 << 30)
    assert ServerSettings().store_quota() == StoreQuota()
    for wrong in ({"max_adapters": -1}, {"store_bytes": "-1"}, {"store_bytes": "much"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerSettings(**wrong)  # type: ignore[arg-type]


def test_the_secret_of_the_cluster_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("of-one-cluster\nand a note\n")
    assert ServerSettings().read_cluster_secret() is None
    assert ServerSettings(cluster_secret_file=file).read_cluster_secret() == "of-one-cluster"
    monkeypatch.setenv("LORASRV_CLUSTER_SECRET", "of-the-environment")
    settings = Sources.gather().settings()
    assert settings.read_cluster_secret() == "of-the-environment"
    assert "of-the-environment" not in repr(settings)
    for wrong, why in (
        ({"cluster_secret": "of-one-cluster", "cluster_secret_file": file}, "two secrets"),
        ({"cluster_secret_file": tmp_path / "missing"}, "missing cannot be read: No such file"),
        ({"cluster_secret_file": tmp_path}, "cannot be read: Is a directory"),
        ({"cluster_secret": "short"}, "8 to 512 printable"),
    ):
        with pytest.raises(ConfigError, match=why):
            ServerSettings(**wrong).read_cluster_secret()
