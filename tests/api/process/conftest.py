"""Real `lorasrv serve` processes: what the tests of one have in common."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import Served

NOT_REFUSED = "it is not refused"


@pytest.fixture(scope="session")
def flags(model: Path) -> tuple[object, ...]:
    """Return the flags for the tiny llama, which is called `tiny`."""
    return ("--model", model, "--served-model-name", "tiny", "--pool-bytes", "16MiB", "--kernels", "torch")


@pytest.fixture
def refused(cli: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command that would serve, but is refused, in this process: another one takes seconds to import all."""

    def serves(*_: object) -> None:
        raise AssertionError(NOT_REFUSED)

    monkeypatch.setattr("api.app.create_app", serves)

    def run(*arguments: object) -> SimpleNamespace:
        done = cli(*arguments)
        done.errors = [line for line in done.err.splitlines() if line.startswith("lorasrv: ")]
        assert (done.code > 0, done.out, len(done.errors)) == (True, "", 1), done
        assert NOT_REFUSED not in done.err
        return done

    return run


@pytest.fixture
def served(process: Served) -> Iterator[Served]:
    """Yield the module's process; after the test it lives, answers, and holds nothing for requests that are over."""

    def answers() -> None:
        model = process.http.get("/v1/models").json()["data"][-1]["id"]
        assert process.post("/v1/completions", model=model, prompt="a", max_tokens=1).status_code == 200
        process.calm_down()

    answers()
    files = process.open_files
    yield process
    process.calm_down()
    assert process.lives
    answers()
    assert "Traceback" not in process.log, process.log
    # The client's own connection may have been made anew; the process that compiles grammars stays for half a minute.
    process.until(lambda: process.open_files <= files + 3)
