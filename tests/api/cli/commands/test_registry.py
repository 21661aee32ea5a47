"""Command registry: what it refuses before it reads anything."""

import pytest
from answers import failed


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--registry", "http://127.0.0.1:1"),
        ("--replicas", 2),
        ("--max-replicas", 2),
        ("--prefill-replicas", 1),
        ("--placement", "bounded"),
        ("--target-backlog-s", 3),
    ],
)
def test_options_that_a_registry_has_not(cli, tmp_path, option: str, value: object) -> None:
    # No model of this name: what is not refused by the option would be by the name.
    done = cli("registry", "--model", tmp_path / "none", "--store", tmp_path / "store", option, value)
    failed(done, 2, f"lorasrv: {option}", "a registry", "leave it out")
    assert done.err.count("\n") == 1
