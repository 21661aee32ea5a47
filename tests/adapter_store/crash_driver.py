"""Kill a store at its k-th call that touches the disk, SQLite's included, and look at what is left. Run as a program.

    python crash_driver.py FOLDER [EVERY]

For every scenario and every k (or each EVERY-th) a child is forked (no threads here, so forking is safe) that ends
without clean-up just before its k-th call. The parent then opens the store and checks it (`Outcome.check`). Prints the
number of kills.
"""

import os
import shutil
import sys
import traceback
from pathlib import Path

from disk_watch import DiskWatch, killing_at
from store_runs import fast_fsync, run
from store_scenarios import SCENARIOS, Hand, Outcome, prepare

KILLED = 99


def child(name: str, top: Path, k: int, acknowledged: int) -> None:
    """Go through the scenario; a byte goes to the file descriptor `acknowledged` after each step."""
    watch, hand = DiskWatch(top, killing_at(k, KILLED)), Hand(top)
    with watch.active():
        SCENARIOS[name].open(hand)
        for step in SCENARIOS[name].steps:
            step(hand)
            os.write(acknowledged, b".")
        hand.close()
    os._exit(0)


def kill(name: str, outcome: Outcome, template: Path, top: Path, k: int) -> tuple[int, bool]:
    """Kill one child before call k: (how many steps the store shows then, whether it got that far)."""
    shutil.copytree(template, top)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(name, top, k, write)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        done = len(pipe.read())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), f"{name}, call {k}: exit code {code}"
    with fast_fsync():
        shown = outcome.check(top, done)
    shutil.rmtree(top)
    return shown, code == KILLED


def main(folder: Path, every: int) -> None:
    kills = 0
    for n, name in enumerate(SCENARIOS):
        outcome = run(name, folder / f"{n}-run").outcome
        template = folder / f"{n}-template"
        prepare(SCENARIOS[name], template)
        shown = [0]
        for k in range(n % every, 10_000, every):
            steps, killed = kill(name, outcome, template, folder / f"{n}-{k}", k)
            assert steps >= shown[-1], f"{name}: a later kill showed an earlier state"
            shown.append(steps)
            if not killed:
                break
            kills += 1
        assert shown[-1] == len(SCENARIOS[name].steps)
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
