"""Faults on purpose: how they are spelled, and when they happen."""

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapter_store.storage import blobs
from lorasrv.engine.fault_injection import Fault, FaultInjector, InjectedFault, parse_faults
from lorasrv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", ()),
        ("slow-disk:200ms", (Fault("slow-disk", 0.2),)),
        (" step-raises@50 , step-raises:7", (Fault("step-raises", None, 50, 1), Fault("step-raises", 7.0))),
        ("step-oom:8@50x10", (Fault("step-oom", 8.0, 50, 10),)),
        ("step-hangs:5s@100", (Fault("step-hangs", 5.0, 100, 1),)),
        ("failing-reads:0.5x4", (Fault("failing-reads", 0.5, 1, 4),)),
        ("no-space@2x3,io-error", (Fault("no-space", None, 2, 3), Fault("io-error"))),
    ],
)
def test_spelling(text: str, want: tuple[Fault, ...]) -> None:
    assert parse_faults(text) == want


@pytest.mark.parametrize(
    "text",
    ["slow", "step-raises@", "slow-disk:200", "step-oom:5s", "no-space:3", "failing-reads:2", "slow-disk:1.2.3s", "x3"],
)
def test_misspelled(text: str) -> None:
    with pytest.raises(ConfigError, match="--inject-faults"):
        parse_faults(text)


def _part(*token_ids: int) -> Any:
    return SimpleNamespace(requests=[SimpleNamespace(token_ids=token_ids)], num_tokens=len(token_ids))


def test_steps() -> None:
    faults = FaultInjector(parse_faults("step-raises@2,step-oom:3@3x2,step-raises:7"))
    happened: list[str] = []
    for step in range(1, 6):
        faults.on_step()
        for part in (_part(1, 2, 3, 4), _part(1, 2, 3), _part(7)):
            try:
                faults.on_part(part)
            except (InjectedFault, torch.OutOfMemoryError) as error:
                happened.append(f"{step}:{part.num_tokens}:{type(error).__name__[0]}")
    assert happened == ["1:1:I", "2:4:I", "2:3:I", "2:1:I", "3:4:O", "3:1:I", "4:4:O", "4:1:I", "5:1:I"]


def test_reads_fail_by_their_share() -> None:
    store = SimpleNamespace(load=lambda key: key)
    FaultInjector(parse_faults("failing-reads:0.5@3x4")).arm_store(store)  # type: ignore[arg-type]
    found, numbers = [], []
    for number in range(1, 9):
        try:
            found.append(store.load(number))
        except OSError as error:
            numbers.append(error.errno)
    assert numbers == [errno.EIO] * 2
    assert len(found) == 6
    assert found[:2] == [1, 2]
    assert found[-2:] == [7, 8]


def test_one_fault_may_happen_at_several_times() -> None:
    store = SimpleNamespace(load=lambda number: number)
    FaultInjector(parse_faults("failing-reads@2x1,failing-reads@4x1")).arm_store(store)  # type: ignore[arg-type]
    failed = []
    for number in range(1, 6):
        try:
            store.load(number)
        except OSError:
            failed.append(number)
    assert failed == [2, 4]


def test_without_faults_nothing_is_touched() -> None:
    real, store = blobs.os, SimpleNamespace(load=len)
    FaultInjector(()).arm_store(store)  # type: ignore[arg-type]
    assert blobs.os is real
    assert store.load is len
