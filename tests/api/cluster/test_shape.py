"""What `serve run` passes: options by name, refused in one line; settings travel to replicas and look the same."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.cluster.replica import opened, own_settings, sealed
from api.cluster.shape import ClusterShape, parse
from api.config.sources import Sources
from lorasrv.errors import ConfigError

ROOT = Path(__file__).parents[3]
SECRET = {"cluster_secret": "one-secret-of-all"}


def test_options_and_shape() -> None:
    settings, shape = parse({"replicas": "3", "edges": "2", "cpus": "0.5", "model": "x", "cache": "/c", **SECRET})
    assert (settings.replicas, settings.model) == (3, "x")
    assert shape == ClusterShape(edges=2, cpus=0.5, cache=Path("/c"))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"edges": "two"}, "edges"),
        ({"replicas": "0"}, "replicas"),
        ({"replcas": "2"}, "replcas"),
        ({"placement": "holders"}, "placement"),
        ({"cluster_secret": None}, "cluster_secret_file"),
        ({"registry": "http://r:1", "registry_app": "registry"}, "registry_app"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(args: dict[str, Any], named: str) -> None:
    given = {name: value for name, value in {**SECRET, **args}.items() if value is not None}
    with pytest.raises(ConfigError, match=named.replace("_", "[-_]")) as refused:
        parse(given)
    assert "\n" not in str(refused.value)


def test_settings_that_travel_are_the_same_in_every_process() -> None:
    """What was given stays known as given, and two processes make equal bytes of it: else each deployment were new."""
    settings = Sources.of_flags({"replicas": 2, "pool_bytes": "64MiB", "api_key": "secret-of-8", **SECRET}).settings()
    again = opened(sealed(settings))
    assert again == settings
    assert again.model_fields_set == settings.model_fields_set
    code = (
        "import pickle, hashlib\nfrom api.cluster.replica import sealed\nfrom api.config.sources import Sources\n"
        "given = {name: 2 for name in ('replicas', 'max_replicas', 'max_num_seqs', 'drain_s', 'port')}\n"
        "print(hashlib.sha256(pickle.dumps(sealed(Sources.of_flags(given).settings()))).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_a_replica_has_files_of_its_own() -> None:
    given = {"record_trace": "/logs/trace.jsonl", "lora_modules": ["a=/a"], "replicas": 2, "host": "0.0.0.0"}
    own = own_settings(Sources.of_flags(given).settings(), "http://r:1", Path("/cache/0"), "x7")
    assert (own.store, own.registry) == (Path("/cache/0"), "http://r:1")
    assert own.record_trace == Path("/logs/trace-x7.jsonl")
    assert own.lora_modules == ()
    # Whether keys are needed depends on where clients are, not on where this process listens.
    assert not own.serves_without_keys


def test_the_example_for_kuberay_is_understood() -> None:
    parts = list(yaml.safe_load_all((ROOT / "docs/deploy/rayservice.yaml").read_text()))
    service = next(part for part in parts if part["kind"] == "RayService")["spec"]
    [application] = yaml.safe_load(service["serveConfigV2"])["applications"]
    module, _, builder = application["import_path"].partition(":")
    assert f"def {builder}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    args = {**application["args"], **SECRET}
    del args["cluster_secret_file"]
    settings, shape = parse({name: str(value) for name, value in args.items()})
    assert (settings.replicas, settings.max_replicas, shape.edges, shape.gpus) == (2, 4, 2, 1.0)
    for group in (service["rayClusterConfig"]["headGroupSpec"], *service["rayClusterConfig"]["workerGroupSpecs"]):
        pod = group["template"]
        assert pod["metadata"]["labels"] == {"app": "lorasrv-ray"}, "else the NetworkPolicy would not cover it"
        mounted = {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert {"/dev/shm", str(Path(application["args"]["cluster_secret_file"]).parent)} <= mounted
