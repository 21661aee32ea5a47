"""What `serve --replicas` does before and beside Ray: refusals, folders of killed starts, shares of memory, logs."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import ROOT

from adapter_store.errors import StoreFull, StoreLocked
from api import early_stop
from api.cli.doctor import cluster as doctor_cluster
from api.cluster import local, shape
from api.cluster.log_pipe import log_pipe
from api.config.sources import Sources
from lorasrv.errors import ConfigError, ModelNotFound


def settings(**given: Any) -> Any:
    return Sources.of_flags({"replicas": 2, **given}).settings()


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--replicas needs Ray, .* pip install -e '\.\[cluster\]' in"):
        local.check_options(settings())


MOMENTS = (
    *("the handlers are there", "Ray is imported", "Ray's processes start", "a destructor runs"),
    *("Ray has handlers of its own", "replicas start", "the edge starts", "the edge waits"),
)


@pytest.mark.parametrize(
    ("moment", "how"),
    [*((moment, signal.SIGINT) for moment in MOMENTS), (MOMENTS[0], signal.SIGTERM), (MOMENTS[4], signal.SIGTERM)],
)
def test_a_signal_before_it_is_ready(tmp_path: Path, moment: str, how: signal.Signals) -> None:
    """Ctrl-C is no start. Whatever becomes of the exception in the main thread, the command ends, and cleans up."""
    options = ("serve", "--replicas", "2", "--port", "0", "--store", str(tmp_path / "store"), "--log-level", "warning")
    command = [sys.executable, str(ROOT / "tests/support/interrupted_start.py"), moment, *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:
        while "held" not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(how)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    progress = re.compile(r"starting (Ray|replicas)( \.\.\.|: \d+ %| done)?")
    told = [line for line in err.splitlines() if not progress.fullmatch(line)]
    assert (process.returncode, out, told) == (early_stop.EXIT_CODES[how], "", [])
    assert list((tmp_path / "store").glob("*")) == []


def test_a_profile_is_of_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: object())
    local.check_options(settings())
    with pytest.raises(ConfigError, match="--profile is of one server"):
        local.check_options(settings(profile="/p.json"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"placement": "least"}, "--placement is of several replicas; give --replicas"),
        ({"max_replicas": 3}, "--max-replicas is of several replicas"),
        ({"target_backlog_s": 1.5}, "--target-backlog-s is of several replicas"),
        ({"registry_key": "of-a-follower"}, "--registry-key is for the server that --registry names"),
        ({"role": "decode"}, "--role decode needs --cluster-secret-file"),
    ],
)
def test_what_would_do_nothing_in_one_server_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Sources.of_flags(given).settings().check_alone()


def test_one_server_takes_what_it_uses() -> None:
    of_one = {"registry": "http://127.0.0.1:1", "registry_key": "of-a-follower", "role": "decode"}
    Sources.of_flags({**of_one, "cluster_secret": "of-one-cluster"}).settings().check_alone()


def test_replicas_behind_an_edge_have_no_roles_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="--role prefill is of one server; --prefill-replicas N"):
        local.check_options(settings(role="prefill"))
    with pytest.raises(ConfigError, match="--role prefill"):
        shape.parse({"role": "prefill", "cluster_secret": "of-one-cluster"})


def test_what_can_be_known_before_ray_starts_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="--max-replicas 1 is less than --replicas 2"):
        local.check_options(settings(max_replicas=1))
    with pytest.raises(ModelNotFound):
        local.check_options(settings(model="/nowhere"))
    local.check_options(settings(model="llama-3-8b", load_format="dummy"))


def test_a_model_of_the_hub_is_downloaded_before_ray_starts(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: object())
    has_downloaded = []

    def download(repo: str, *, local_files_only: bool, **_: object) -> str:
        has_downloaded.append(not local_files_only)
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    local.check_options(settings(model="hf:org/before-ray"))
    assert has_downloaded == [True]


def test_memory_is_divided_unless_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "free_bytes", lambda: 8 << 30)
    monkeypatch.setattr(local, "has_gpu", lambda settings: False)
    divided = local.replica_settings(settings(max_replicas=3, prefill_replicas=1))
    assert (divided.pool_bytes, divided.host_cache_bytes) == ((2 << 30) // 4, (1 << 30) // 4)
    given = local.replica_settings(settings(pool_bytes="64MiB", host_cache_bytes="32MiB"))
    assert (given.pool_bytes, given.host_cache_bytes) == (64 << 20, 32 << 20)
    monkeypatch.setattr(local, "has_gpu", lambda settings: True)
    shared, whole = local.replica_settings(settings(max_replicas=2)), settings(max_replicas=2).for_gpu(8 << 30)
    assert (shared.host_cache_bytes, shared.swap_bytes) == (whole.host_cache_bytes // 2, whole.swap_bytes // 2)
    assert shared.for_gpu(8 << 30).host_cache_bytes == shared.host_cache_bytes, "a replica does not take the whole"


@pytest.mark.parametrize("is_long", [False, True])
def test_what_a_killed_start_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: Any, is_long: bool) -> None:
    monkeypatch.setattr(local, "MAX_HOME_CHARS", 1 if is_long else 1000)
    store = tmp_path / "store"
    home = store / "replicas"
    with local._home(store) as first:
        (first / "token").write_text("left")
        with pytest.raises(StoreLocked), local._home(store):
            pass
        assert (first / "token").exists(), "the one who is refused removes nothing"
    assert not home.exists()
    assert not first.exists()
    # As a kill leaves it: the folder, or the link to it, without the process.
    home.mkdir()
    (home / "token").write_text("left")
    with local._home(store) as again:
        assert list(again.iterdir()) == []
        assert again.stat().st_mode & 0o077 == 0
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("is_of_store", [True, False])
def test_a_full_disk_is_told_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_of_store: bool
) -> None:
    monkeypatch.setattr(local, "MAX_HOME_CHARS", 0)  # Ray's files are elsewhere
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=(16 << 20) - ((path == tmp_path) is is_of_store))
    )
    with (
        pytest.raises(StoreFull, match=r"are free on the disk of .*, and replicas need 16\.0 MiB"),
        local._home(tmp_path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_last_line_of_what_serve_says_is_the_reason() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\nray::ServeReplica() (pid=1)\nTraceback (most recent "
        'call last):\n  File "x.py", line 1, in y\nlorasrv.errors.NotEnoughMemory: 1 GiB of memory are free\n'
    )
    assert local.reason_of(message) == "1 GiB of memory are free"
    assert local.reason_of("no traceback") == "no traceback"


def test_lines_of_replicas_appear_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with log_pipe(tmp_path / "log"):
        for number in range(100):
            with (tmp_path / "log").open("a") as replica:
                replica.write(f"line {number}\n")
    assert capfd.readouterr().err.splitlines() == [f"line {number}" for number in range(100)]
    assert os.listdir(tmp_path) == []


class TestDoctor:
    def test_versions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found: dict[str, str | None] = {"ray": "2.60.3", "cryptography": "50"}
        monkeypatch.setattr(doctor_cluster, "_version", found.get)
        assert doctor_cluster.versions().status == "ok"
        found["ray"] = "2.59.0"
        assert (doctor_cluster.versions().status, "2.60" in doctor_cluster.versions().text) == ("fail", True)
        found["ray"] = None
        assert doctor_cluster.versions().fix == "pip install -e '.[cluster]' in lorasrv's checkout"

    def test_little_shared_memory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(doctor_cluster, "SHARED_MEMORY", tmp_path / "shm")
        assert doctor_cluster.shared_memory().status == "fail"
        (tmp_path / "shm").mkdir()
        monkeypatch.setattr(doctor_cluster, "SHARED_BYTES", 1 << 60)
        assert (doctor_cluster.shared_memory().status, "--shm-size" in doctor_cluster.shared_memory().fix) == (
            "warn",
            True,
        )
