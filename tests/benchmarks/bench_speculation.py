"""Measure what drafts are worth to users: the same requests to a server with `--speculation auto` and one without.

    python tests/benchmarks/bench_speculation.py [--cases copy,json,personas] [--states cold,warm] [--rounds 3]
        [--auto "--draft-layers 15"] [--heads FOLDER]

Both servers run all the time and are asked by turns, over HTTP. Every answer must be the same from both; a speed-up is
the median of the rounds, by the time that all requests of a round take. Each round has a cache salt of its own, so that
nothing is remembered when it begins: its requests are *cold*. Then come its *warm* ones: the same kind under the same
salt. A persona is warm when it has answered the questions of `heldout.jsonl`; it is always asked those of
`fresh.jsonl`, each once. What drafts are worth, and what they cost, is learned in the first rounds: see their figures.
The last table compares the chances that the server expected of its drafts with what it found.
"""

import json
import shlex
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from harness import arguments, lorasrv_server, row, table
from prometheus_client.parser import text_string_to_metric_families
from served import ROOT

BOTS = ROOT / "examples" / "persona_bots"
PERSONAS = ("wrench", "blackbeard", "basho")
TEXTS = (
    "The lighthouse keeper walked down to the shore every morning, before the gulls had woken, to see what the tide "
    "had left. He found bottles and boots, a chair without legs, and once a clock that still ticked. He put everything "
    "in a row on the wall and waited for somebody to ask for it. Nobody came.",
    "In the winter the baker burned the old chairs, but he kept the clock, and at night he listened to it and thought "
    "of the ship that it had come from, and of the people on it who had known what time it was when the storm began. "
    "His daughter said that a clock without a ship was only a clock.",
    "The train to the north leaves at seven and carries mail, milk and three carriages of people who look out of the "
    "windows. Between the second and the third station there is a bridge, and under the bridge a boy waves a red flag "
    "every day. The driver answers with the whistle. They have never spoken to each other.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "family_name": {"type": "string", "maxLength": 12},
        "profession": {"type": "string", "enum": ["baker", "teacher", "engineer", "nurse"]},
        "age_in_years": {"type": "integer", "minimum": 1, "maximum": 99},
        "is_married": {"type": "boolean"},
    },
    "required": ["first_name", "family_name", "profession", "age_in_years", "is_married"],
    "additionalProperties": False,
}
STATES = ("cold", "warm")
WARMED = "warmed"
"""Salt under which personas have answered before."""
Request = dict[str, Any]


def chat(text: str, model: str, **options: Any) -> Request:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 120,
        "temperature": 0,
    } | options


def questions(name: str) -> list[str]:
    lines = (BOTS / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def copies(base: str, number: int) -> list[Request]:
    return [chat(f"Repeat this text word for word ({number}):\n{text}", base) for text in TEXTS]


def long_copy(base: str, number: int) -> list[Request]:
    text = "\n".join(TEXTS)
    return [chat(f"Repeat this text word for word ({number}):\n{text}", base, max_tokens=260)]


def predicted(base: str, number: int) -> list[Request]:
    changed = [text.replace("every", "each") for text in TEXTS]
    return [
        body | {"prediction": {"type": "content", "content": text}}
        for body, text in zip(copies(base, number), changed, strict=True)
    ]


def objects(base: str, number: int) -> list[Request]:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    texts = [f"Invent person number {number}{place} and describe them as JSON." for place in range(6)]
    return [chat(text, base, response_format=form) for text in texts]


def of_persona(persona: str, half: int) -> Callable[[str, int], list[Request]]:
    """Questions of one half; a question of another case would be known by its answer."""
    return lambda base, number: [chat(text, persona) for text in questions("fresh")[half::2][number // 2 :: 3]]


def mixed(streams: int) -> Callable[[str, int], list[Request]]:
    def requests(base: str, number: int) -> list[Request]:
        models = (*PERSONAS, base)
        texts = [f"{text} ({streams}.{number})" for text in questions("fresh")]
        return [chat(text, models[place % 4]) for place, text in enumerate(texts)]

    return requests


def plain(base: str, number: int) -> list[Request]:
    """Chat of which nothing is remembered, and for which nothing that was said before is used."""
    forget = {"speculation": {"remember": False, "drafters": ["lookup"]}}
    return [chat(f"{text} ({number})", base, **forget) for text in questions("fresh")[:8]]


Case = tuple[str, str, int, Callable[[str, int], list[Request]]]
CASES: list[Case] = [
    ("copy", "rewrites of a text of 210 tokens", 1, long_copy),
    ("copy", "rewrites of a text of some 75 tokens", 1, copies),
    ("copy", "the same with `prediction`, nearly right", 1, predicted),
    ("json", "JSON by a schema", 1, objects),
    *(("personas", f"{persona}, new questions", 1, of_persona(persona, 0)) for persona in PERSONAS),
    ("personas", "wrench, new questions", 4, of_persona("wrench", 1)),
    ("mixed", "three personas and the base", 4, mixed(4)),
    ("mixed", "three personas and the base", 16, mixed(16)),
    ("mixed", "three personas and the base", 32, mixed(32)),
    ("chat", "the base, nothing remembered", 1, plain),
]


def ask_all(client: httpx2.Client, requests: list[Request], streams: int) -> tuple[float, list[Any]]:
    """Return the seconds that the requests take, so many at a time, and the answers."""

    def ask(body: Request) -> Any:
        return client.post("/v1/chat/completions", json=body).raise_for_status().json()

    begun = time.perf_counter()
    with ThreadPoolExecutor(streams) as threads:
        answers = list(threads.map(ask, requests))
    return time.perf_counter() - begun, answers


def texts_of(answers: list[Any]) -> list[str]:
    return [answer["choices"][0]["message"]["content"] for answer in answers]


def under(salt: str, requests: list[Request]) -> list[Request]:
    """The requests under a salt, remembered unless they say something else."""
    return [{"speculation": {"remember": True}} | body | {"cache_salt": salt} for body in requests]


@dataclass
class Found:
    """What one state of a case has shown."""

    ratios: list[float] = field(default_factory=list)
    tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def take(self, seconds: dict[str, float], answers: list[Any]) -> None:
        self.ratios.append(seconds["off"] / seconds["auto"])
        for answer in answers:
            self.tokens += answer["usage"]["completion_tokens"]
            told = answer["usage"]["lorasrv"]["speculation"]
            self.counts.update({name: told[name] for name in ("steps", "drafted", "accepted")})

    def show(self, case: Case, state: str) -> None:
        shown = ", ".join(f"{ratio:.2f}" for ratio in self.ratios)
        share = self.counts["accepted"] / max(1, self.counts["drafted"])
        speed = statistics.median(self.ratios)
        row(case[1], case[2], state, speed, shown, self.tokens / self.counts["steps"], f"{share:.0%}")


def measure(case: Case, base: str, servers: dict[str, httpx2.Client], rounds: int, states: Sequence[str]) -> None:
    """Measure a case and print a row for each state."""
    kind, title, streams, requests = case
    found = {state: Found() for state in states}
    for number in range(rounds):
        for place, state in enumerate(STATES):
            salt = WARMED if (kind, state) == ("personas", "warm") else f"{title}, {streams}, {number}"
            bodies, seconds, said = under(salt, requests(base, 2 * number + place)), {}, {}
            for name in list(servers)[:: 1 if number % 2 else -1]:
                seconds[name], said[name] = ask_all(servers[name], bodies, streams)
            assert texts_of(said["auto"]) == texts_of(said["off"]), "an answer depends on drafts"
            if state in states:
                found[state].take(seconds, said["auto"])
    for state in states:
        found[state].show(case, state)


def calibration(page: str) -> None:
    """Print what a server expected of its drafts and what it found, by chance and by depth."""
    counts = {metric.name: metric for metric in text_string_to_metric_families(page) if "draft_tokens" in metric.name}

    def totals(name: str, label: str) -> Counter[str]:
        found = Counter[str]()
        for sample in counts[f"lorasrv_{name}"].samples:
            found[sample.labels[label]] += sample.value  # type: ignore[assignment]
        return found

    kinds = ("draft_tokens_by_chance", "expected_draft_tokens_by_chance", "accepted_draft_tokens_by_chance")
    drafted, expected, right = (totals(name, "chance") for name in kinds)
    table(("chance from", "draft tokens", "expected", "found"))
    for chance, count in sorted(drafted.items()):
        row(chance, int(count), expected[chance] / count, right[chance] / count)
    drafted, right = (totals(name, "depth") for name in ("draft_tokens", "accepted_draft_tokens"))
    table(
        ("depth", *sorted(drafted, key=int)),
        [("right", *(f"{right[d] / drafted[d]:.0%}" for d in sorted(drafted, key=int)))],
    )


def main() -> None:
    a = arguments(
        __doc__,
        cases=(("copy", "json", "personas", "mixed", "chat"), "kinds of requests"),
        states=(STATES, "what is known of the requests"),
        rounds=(3, "rounds of each case"),
        both=("", "options of both servers, as one text"),
        auto=("", "further options of the server with drafts"),
        heads=("", "folder of personas with Medusa heads, which the server with drafts has in place of those without"),
    )
    both = shlex.split(a.both)
    adapters = [BOTS / "adapters" / persona for persona in PERSONAS]
    with_heads = [Path(a.heads, one.name) if a.heads and Path(a.heads, one.name).is_dir() else one for one in adapters]
    with (
        tempfile.TemporaryDirectory() as folder,
        lorasrv_server(Path(folder, "off"), "--speculation", "off", *both, adapters=adapters) as off,
        lorasrv_server(Path(folder, "auto"), *both, *shlex.split(a.auto), adapters=with_heads) as auto,
        httpx2.Client(base_url=off.url, timeout=600, trust_env=False) as to_off,
        httpx2.Client(base_url=auto.url, timeout=600, trust_env=False) as to_auto,
    ):
        servers, base = {"off": to_off, "auto": to_auto}, off.base_name
        if "personas" in a.cases and "warm" in a.states:
            known = [chat(text, persona) for persona in PERSONAS for text in questions("heldout")]
            for client in servers.values():
                ask_all(client, under(WARMED, known), 4)
        table(("requests", "streams", "state", "speed-up", "of each round", "tokens a step", "drafts accepted"))
        for case in CASES:
            if case[0] in a.cases:
                measure(case, base, servers, a.rounds, a.states)
        calibration(to_auto.get("/metrics").raise_for_status().text)


if __name__ == "__main__":
    main()
