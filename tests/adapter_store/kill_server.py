"""Kill a real `lorasrv serve` at random moments while clients upload, replace and delete.

    python kill_server.py --count 100 [--folder FOLDER] [--record docs/reliability.md]

The store and the ledger of what was acknowledged stay in FOLDER for the next run. After each kill a copy of the store
is opened offline, every version is loaded and verified, and compared with the ledger; then the server is started again
and must list the same. What was in progress at the kill is done or not done, never half. `--record` adds the kills to
a page.
"""

import argparse
import datetime
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from adapter_store.errors import AdapterError
from adapter_store.store import AdapterStore
from lorasrv.models.loader.hf import read_spec
from lorasrv.models.lora_sites import base_shapes

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_llama
from served import serve

NUM_CLIENTS = 4
NAMES_PER_CLIENT = 3
RANKS = (2, 16, 256)  # the largest is 1 MB: some kills come in the middle of a body
MAX_VERSIONS = 6
FLAGS = ("--load-format", "dummy", "--kernels", "torch", "--pool-bytes", "16MiB")
NEXT_ROW = "<!-- the next row of kills -->"

State = dict[str, Any]
"""One id: {"current": version, "versions": {version: number of its weights}}; empty if there is none."""


def adapter(number: int) -> tuple[dict[str, object], bytes]:
    """Return config and file of an adapter for the q projections; another number means other weights."""
    rank = RANKS[number % len(RANKS)]
    values = np.random.default_rng(number).standard_normal(rank * tiny_llama.HIDDEN)
    return tiny_llama.adapter(rank, values.astype("<f4").tobytes())


class Ledger:
    """Record what was acknowledged, by id, and what is in progress. Every id has one client, so nothing races."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        told = json.loads(file.read_text()) if file.is_file() else {"loading": True}
        # Without a ledger, or after a run that did not end, the store cannot be compared with anything.
        self.is_lost = bool(told["loading"])
        if self.is_lost:
            told = {"states": {}, "last": {}, "numbers": 0}
        self.states: dict[str, State] = {name: _with_int_keys(state) for name, state in told["states"].items()}
        self.last: dict[str, int] = told["last"]
        self.numbers: int = told["numbers"]
        self.pending: dict[str, State] = {}

    def new_number(self) -> int:
        with self._lock:
            self.numbers += 1
            return self.numbers

    def save(self, *, loading: bool) -> None:
        """Write the ledger; `loading` marks it lost if this program ends while clients are running."""
        told = {"states": self.states, "last": self.last, "numbers": self.numbers, "loading": loading}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(told))
        new.replace(self._file)

    def settle(self, name: str, shown: State) -> None:
        """After a kill, check that `shown` is what was acknowledged, with or without the change in progress."""
        old, new = self.states.get(name, {}), self.pending.pop(name, None)
        assert shown in (old, new), f"{name}: acknowledged {old}, in progress {new}, shown {shown}"
        self.acknowledge(name, shown)

    def acknowledge(self, name: str, state: State) -> None:
        self.pending.pop(name, None)
        self.states[name] = state
        self.last[name] = max([self.last.get(name, 0), *state.get("versions", {})])


class Client:
    """Upload, replace and delete a client's own ids until the server is gone."""

    def __init__(self, url: str, ledger: Ledger, number: int, seed: str) -> None:
        self.errors: list[BaseException] = []
        self.requests = 0
        self.uploaded: str | None = None  # weights acknowledged and not deleted since
        self._http = httpx2.Client(base_url=url, trust_env=False, timeout=60)
        self._ledger, self._random = ledger, random.Random(seed)
        self._names = [f"c{number}-{n}" for n in range(NAMES_PER_CLIENT)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, once the server is gone."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with self._http:
            try:
                while not self._over.is_set():
                    self._work(self._random.choice(self._names))
                    self.requests += 1
            except (httpx2.TransportError, httpx2.StreamError):
                pass  # killed: the change in progress stays pending
            except BaseException as error:
                self.errors.append(error)

    def _work(self, name: str) -> None:
        state, chance = self._ledger.states.get(name, {}), self._random.random
        versions = state.get("versions", {})
        version = self._random.choice(list(versions)) if versions else 0
        if not versions or (len(versions) < MAX_VERSIONS and chance() >= 0.3):
            self._upload(name, state, version if versions and chance() < 0.2 else None)
        elif chance() < 0.3:
            self._delete(name, name, {})
        else:
            kept = {v: digest for v, digest in versions.items() if v != version}
            current = max(kept, default=0) if state["current"] == version else state["current"]
            self._delete(name, f"{name}@{version}", {"current": current, "versions": kept} if kept else {})

    def _upload(self, name: str, state: State, version: int | None) -> None:
        """Upload new weights, or those of an old version once more."""
        if version is None:
            number, version = self._ledger.new_number(), self._ledger.last.get(name, 0) + 1
            versions = {**state.get("versions", {}), version: number}
        else:
            number, versions = state["versions"][version], state["versions"]
        config, data = adapter(number)
        digest = hashlib.sha256(data).hexdigest()
        put = self._http.put(f"/v1/blobs/sha256:{digest}", content=data)
        assert put.status_code in (200, 201), put.text
        self.uploaded = digest
        after = {"current": version, "versions": versions}
        self._ledger.pending[name] = after
        done = self._http.post("/v1/adapters", json={"id": name, "config": config, "weights": f"sha256:{digest}"})
        assert done.status_code in (200, 201), done.text
        assert done.json()["version"] == version, f"{name}: expected version {version}: {done.text}"
        self._ledger.acknowledge(name, after)

    def _delete(self, name: str, reference: str, after: State) -> None:
        self.uploaded = None
        self._ledger.pending[name] = after
        done = self._http.delete(f"/v1/adapters/{reference}")
        assert done.status_code == 202, done.text
        self._ledger.acknowledge(name, after)


class Campaign:
    """Kill servers on one store, one after the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._model, self._store, self._copy = folder / "tiny", folder / "store", folder / "copy"
        tiny_llama.write_config(self._model)
        self._shapes = base_shapes(read_spec(self._model))
        self._ledger = Ledger(folder / "ledger.json")
        if self._ledger.is_lost:
            shutil.rmtree(self._store, ignore_errors=True)
        self._random = random.Random(seed)
        self._digests: dict[int, str] = {}
        self.kills = self.requests = self.pending = 0
        self._kept = self._look()

    def kill_one(self) -> None:
        """Start, check, load, kill, check; raise AssertionError if something was lost or is half done."""
        with serve("--model", self._model, *FLAGS, store=self._store, ends=-signal.SIGKILL) as served:
            self._compare(served.http.get("/v1/adapters").json()["data"])
            self._ledger.save(loading=True)
            clients = [Client(served.url, self._ledger, n, f"{self._random.random()}") for n in range(NUM_CLIENTS)]
            time.sleep(self._random.uniform(0.02, 1.0))
            served.signal(signal.SIGKILL)
            for client in clients:
                client.join()
        for client in clients:
            assert not client.errors, client.errors
            self.requests += client.requests
            assert client.uploaded is None or (self._store / "blobs" / "sha256" / client.uploaded).is_file()
        self.pending += len(self._ledger.pending)
        self.kills += 1
        self._kept = self._look()
        self._ledger.save(loading=False)

    def _look(self) -> dict[str, dict[int, str]]:
        """Load all of a copy of the store and compare it with the ledger; return every version's key, by id."""
        shutil.rmtree(self._copy, ignore_errors=True)
        if not self._store.is_dir():
            return {}
        shutil.copytree(self._store, self._copy)
        with AdapterStore(self._copy, self._shapes) as store:
            records = {str(record.adapter_id): record for record in store.list_adapters()}
            for name in {*records, *self._ledger.states, *self._ledger.pending}:
                self._ledger.settle(name, self._shown(store, name) if name in records else {})
            assert not list((self._copy / "tmp").iterdir())
            named = {store.spec(v.key).weights_digest for record in records.values() for v in record.versions}
            stored = {path.name for path in (self._copy / "blobs" / "sha256").iterdir()}
            assert named <= stored
        return {name: {v.version: v.key for v in record.versions} for name, record in records.items()}

    def _shown(self, store: AdapterStore, name: str) -> State:
        """Return one id in the ledger's form: weights by the number they were made of."""
        record = store.get(name)
        loaded = {v.version: store.load(v.key).spec.weights_digest for v in record.versions}
        numbers = {}
        for state in (self._ledger.states.get(name, {}), self._ledger.pending.get(name, {})):
            numbers |= {self._digest(number): number for number in state.get("versions", {}).values()}
        versions = {version: numbers.get(digest, -1) for version, digest in loaded.items()}
        return {"current": record.current_version, "versions": versions}

    def _digest(self, number: int) -> str:
        if number not in self._digests:
            self._digests[number] = hashlib.sha256(adapter(number)[1]).hexdigest()
        return self._digests[number]

    def _compare(self, listed: list[dict[str, Any]]) -> None:
        shown = {a["id"]: {v["version"]: v["digest"].removeprefix("sha256:") for v in a["versions"]} for a in listed}
        assert shown == self._kept, "the server shows something else than its files"


def record_kills(page: Path, kills: int, requests: int, command: str) -> None:
    """Add a row to the table in the page, and the kills to its total."""
    text = page.read_text("utf-8")
    total = re.search(r"\*\*([\d,]+) kills\*\*", text)
    assert total is not None
    assert NEXT_ROW in text
    old = int(total[1].replace(",", ""))
    row = f"| {datetime.date.today()} | {kills:,} | {requests:,} | `{command}` |\n"
    text = text.replace(total[0], f"**{old + kills:,} kills**", 1).replace(NEXT_ROW, row + NEXT_ROW)
    page.write_text(text, "utf-8")


def _with_int_keys(state: State) -> State:
    return {**state, "versions": {int(v): n for v, n in state["versions"].items()}} if state else {}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a real server at random moments.")
    parser.add_argument("--count", type=int, default=100, help="how many kills")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/crash"), help="store and ledger, kept for later runs"
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--record", type=Path, default=None, help="the page whose count grows")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    campaign = Campaign(options.folder, options.seed if options.seed is not None else random.randrange(1 << 30))
    # On a signal, finish the current kill and record the result.
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    started = time.monotonic()
    try:
        while campaign.kills < options.count and not stop.is_set():
            campaign.kill_one()
            print(f"\r{campaign.kills} kills, {campaign.requests} requests, {campaign.pending} in progress", end="")
    except (AssertionError, AdapterError) as error:
        sys.exit(f"\nafter {campaign.kills} kills: {type(error).__name__}: {error}\nthe store is in {options.folder}")
    finally:
        print(f"\n{campaign.kills} kills in {time.monotonic() - started:.0f} s", flush=True)
        if options.record is not None and campaign.kills:
            record_kills(options.record, campaign.kills, campaign.requests, f"make test-crash COUNT={options.count}")


if __name__ == "__main__":
    main()
