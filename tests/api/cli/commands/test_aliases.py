"""Commands alias, rollback and limit."""

import json

import pytest
from answers import failed

from lorasrv.config import Limits

NO_LIMITS = "mia: no limits of its own\n"


@pytest.fixture(autouse=True)
def mia(server, make_adapter) -> None:
    """Three versions."""
    for seed in (1, 2, 3):
        server.upload(make_adapter(str(seed), seed=seed), "mia").raise_for_status()


def show(server):
    return server.http.get("/v1/adapters/mia").json()


def test_alias(run, server) -> None:
    assert run("alias", "mia").out == "mia: no aliases; add one with: lorasrv alias mia:NAME VERSION\n"
    assert run("alias", "mia:prod", 3).out == "mia:prod -> mia@3\n"
    done = run("alias", "mia:beta", "1=0.9", "2=0.1")
    assert (done.code, done.out, done.err) == (0, "mia:beta -> mia@1 90 %, mia@2 10 %\n", "")
    assert run("alias", "mia").out == "alias\tversion\nmia:beta\tmia@1 90 %, mia@2 10 %\nmia:prod\tmia@3\n"
    assert run("alias", "mia:prod").out == "alias\tversion\nmia:prod\tmia@3\n"
    aliases = {"beta": {"1": 0.9, "2": 0.1}, "prod": 3}
    assert json.loads(run("alias", "mia", "--json").out) == {"id": "mia", "aliases": aliases}
    assert json.loads(run("alias", "mia:prod", 2, "--json").out) == {"id": "mia", "alias": "prod", "target": 2}
    assert "  mia:prod -> mia@2\n" in run("show", "mia").out
    assert run("alias", "mia:prod", "--remove").out == "removed mia:prod\n"
    assert show(server)["aliases"] == {"beta": {"1": 0.9, "2": 0.1}}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("mia:prod", "three"), 2, "'three' is not a version"),
        (("mia:prod", "1=0.5"), 2, "add up to 1"),
        (("mia:prod", "1=0.5", "1=0.5"), 2, "twice"),
        (("mia:prod", "1=x", "2=y"), 2, "not a version"),
        (("mia:prod", "1", "2"), 2, "not a version"),
        (("mia:prod", "1", "--remove"), 2, "not both"),
        (("mia", "1"), 2, "name the alias: mia:NAME"),
        (("mia", "--remove"), 2, "name the alias"),
        (("mia:prod", "--remove"), 1, "there is no alias mia:prod"),
        (("mia:prod",), 1, "there is no alias mia:prod"),
        (("mia:Prod", "1"), 1, "alias 'Prod' is not allowed"),
        (("mia:prod", "9"), 1, "has no version 9; it has 1, 2, 3"),
        (("zoe:prod", "1"), 1, "'zoe' does not exist"),
    ],
)
def test_alias_refused(run, server, arguments: tuple[str, ...], code: int, says: str) -> None:
    failed(run("alias", *arguments), code, says)
    assert show(server)["aliases"] == {}


def test_rollback(run, server) -> None:
    assert run("rollback", "mia").out == "mia is mia@2 now (was mia@3)\n"
    assert run("rollback", "mia", "--to", 3).out == "mia is mia@3 now (was mia@2)\n"
    told = json.loads(run("rollback", "mia", "--to", 1, "--json").out)
    assert told == {"id": "mia", "version": 1, "version_before": 3}
    failed(run("rollback", "mia"), 1, "mia@1 is the oldest version there is")
    failed(run("rollback", "mia", "--to", 7), 1, "has no version 7")
    assert run("rollback", "mia", "--to", 0).code == 2
    assert show(server)["version"] == 1


def test_limit_is_set_shown_and_removed(run, engine) -> None:
    assert (run("limit", "mia").out, engine.limits) == (NO_LIMITS, {}), "showing changes nothing"
    two = run("limit", "mia", "--max-running", 4, "--resident-bytes", "64MiB")
    assert two.out == "mia: max_running 4, resident_bytes 64.0 MiB\n"
    more = ("--weight", "2", "--tokens-per-s", "1234567.5", "--max-queued", 3, "--max-running", 5)
    done = run("limit", "mia", *more)
    everything = "max_running 5, max_queued 3, tokens_per_s 1234567.5, resident_bytes 64.0 MiB, weight 2"
    assert (done.code, done.out, done.err) == (0, f"mia: {everything}\n", "")
    assert engine.limits["mia"] == Limits(5, 3, 1234567.5, 64 << 20, 2.0)
    assert f"  {everything}\n" in run("show", "mia").out
    assert run("limit", "mia", "--none", "--weight", 4).out == "mia: weight 4\n"
    assert run("limit", "mia", "--none").out == NO_LIMITS
    assert engine.limits == {"mia": None}
    assert "  no limits of its own\n" in run("show", "mia").out


def test_limit_as_json(run) -> None:
    for options in (("--max-queued", 3), ()):
        told = json.loads(run("limit", "mia", "--json", *options).out)
        assert told == {"id": "mia", "limits": {"max_queued": 3}}
    assert json.loads(run("show", "mia", "--json").out)["limits"] == {"max_queued": 3}


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--max-running", "0", " must be above 0, not 0; --none removes limits\n"),
        ("--max-running", "-1", " must be above 0"),
        ("--max-queued", "many", ""),
        ("--tokens-per-s", "nan", "': nan is not a finite number"),
        ("--tokens-per-s", "inf", "': inf is not a finite number"),
        ("--resident-bytes", "much", " 'much' is not a size"),
        ("--resident-bytes", "0", " must be above 0"),
        ("--weight", "0", " must be above 0"),
    ],
)
def test_limit_refused(run, engine, option: str, value: str, says: str) -> None:
    failed(run("limit", "mia", option, value), 2, option + says)
    assert engine.limits == {}


def test_limit_of_an_unknown_adapter(run) -> None:
    for options in ((), ("--none",), ("--weight", 2)):
        failed(run("limit", "nobody", *options), 1, "lorasrv: adapter 'nobody' does not exist\n")
