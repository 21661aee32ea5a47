"""lorasrv plan --machines: tables, JSON, laws, failures, roles, and every refusal by the option's name."""

import json
from pathlib import Path

import pytest
from answers import failed

from lorasrv.placement.kinds import PLACEMENTS

COSTS = Path(__file__).parents[2] / "data" / "costs.json"
LAW = ("--law", "poisson", "--rate", "4", "--seconds", "4", "--adapters", "6", "--output-tokens", "6")


@pytest.fixture
def plan(cli):
    """Runs the command with costs of a file and a pool for some adapters."""
    return lambda *options: cli("plan", "--costs", COSTS, "--pool-bytes", "64MiB", "--rank", 4, *options)


def test_a_law_on_machines_as_json(plan) -> None:
    options = ("--machines", 3, "--routers", 2, "--report-s", "0.5", "--storage-bytes-per-s", "50MB", "--seed", 3)
    run = (*LAW, *options, "--fail", "m0@1.5", "--join", "m3@2", "--slo", "ttft=1000,tpot=100", "--json")
    done = json.loads(plan(*run).out)
    law = {"law": "poisson", "rate": 4.0, "seconds": 4.0, "adapters": 6, "output_tokens": 6.0, "seed": 3}
    assert done["traffic"] == {**law, "requests": done["placements"][0]["requests"]}
    changes = [{"at_s": 1.5, "kind": "fail", "machine": "m0"}, {"at_s": 2.0, "kind": "join", "machine": "m3"}]
    assert done["cluster"]["changes"] == changes
    named = ("machines", "placement", "routers", "report_s", "storage_bytes_per_s", "seed")
    assert [done["cluster"][name] for name in named] == [3, "bounded", 2, 0.5, 5e7, 3]
    assert done["slo_ms"] == {"ttft": 1000.0, "tpot": 100.0}
    (figures,) = done["placements"]
    assert figures["within"] <= 1.0 < figures["loads_from_disk"]
    again = json.loads(plan(*run).out)
    assert again["placements"] == done["placements"], "the same seed, the same figures"


def test_all_placements_are_compared(plan) -> None:
    done = plan(*LAW, "--machines", 2, "--compare")
    lines = done.out.splitlines()
    assert lines[0].split(" requests on ")[1] == "2 machines; costs from costs.json"
    assert lines[1].split("\t")[:4] == ["placement", "TTFT p50", "p95", "p99"]
    assert [line.split("\t")[0] for line in lines[2 : 2 + len(PLACEMENTS)]] == list(PLACEMENTS)
    assert "replaying, placement holders done" in done.err


def test_roles(plan) -> None:
    options = (*LAW, "--machines", 2, "--role", "--slo", "ttft=1000,tpot=100", "--transfer-gbps", "1")
    done = plan(*options)
    assert "Apart does not pay: with 1 prefill + 1 decode, the best split, " in done.out
    told = json.loads(plan(*options, "--json").out)
    assert (told["roles"]["pays"], told["roles"]["best_prefill"], told["cluster"]["transfer_bytes_per_s"]) == (
        False,
        1,
        1.25e8,
    )
    assert [trial["target_itl_ms"] for trial in told["roles"]["both"]] == [None, 100.0, 70.0]
    assert told["roles"]["apart"][0]["handed_over_bytes"] > 0


def test_a_law_on_one_server(plan) -> None:
    done = json.loads(plan(*LAW, "--predict-only", "--json").out)
    assert done["predicted"]["requests"] > 4


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "give either --trace, a recorded file, or --law"),
        ((*LAW, "--trace", __file__), "give either --trace, a recorded file, or --law"),
        (("--trace", __file__, "--rate", "3"), "--rate and --trace exclude each other"),
        (("--law", "chaos"), "law 'chaos' is unknown; there are poisson, diurnal, flash, mmpp"),
        (
            ("--law", "poisson", "--seconds", "1e12"),
            "rate times seconds are 10000000000000 requests, more than 10000000",
        ),
        ((*LAW, "--zipf", "-1"), "zipf must be from 0 to 10"),
        (("--law", "poisson", "--rate", "0.001"), "no request in so few --seconds"),
        ((*LAW, "--machines", "0"), "machines must be positive, not 0"),
        ((*LAW, "--machines", "2", "--placement", "best"), "placement 'best' is unknown; there are bounded, least"),
        ((*LAW, "--placement", "least"), "--placement needs --machines"),
        ((*LAW, "--role"), "--role needs --machines"),
        ((*LAW, "--machines", "2", "--role"), "--role needs --slo with ttft and tpot"),
        ((*LAW, "--machines", "1", "--role", "--slo", "ttft=1,tpot=1"), "--role needs two --machines"),
        ((*LAW, "--machines", "2", "--transfer-gbps", "1"), "--transfer-gbps needs --role"),
        ((*LAW, "--machines", "2", "--compare", "--placement", "least"), "--compare and --placement exclude"),
        ((*LAW, "--machines", "2", "--fail", "m1"), "--fail 'm1': write a machine and seconds, as m0@12.5"),
        ((*LAW, "--machines", "2", "--fail", "m2@1"), "fail m2@1: m2 is not there; there are m0, m1"),
        ((*LAW, "--machines", "2", "--join", "m1@1"), "join m1@1: m1 is there already; there are m0, m1"),
        ((*LAW, "--machines", "2", "--storage-bytes-per-s", "fast"), "--storage-bytes-per-s 'fast' is not a positive"),
        ((*LAW, "--machines", "2", "--report-s", "0"), "report_s must be positive, not 0"),
        ((*LAW, "--machines", "2", "--slo", "ttft"), "--slo 'ttft': write each of ttft, tpot, e2e"),
        ((*LAW, "--machines", "2", "--predict-only"), "--predict-only and --machines exclude each other"),
        ((*LAW, "--machines", "2", "--p99-ttft-ms", "5"), "--p99-ttft-ms and --machines exclude each other"),
    ],
)
def test_wrong_options(plan, options: tuple[str, ...], complaint: str) -> None:
    refused = plan(*options)
    failed(refused, 2, complaint)
    assert refused.err.count("\n") == 1
