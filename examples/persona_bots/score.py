"""Score answers for style: does each persona sound like itself, and the base like none of them?

    python score.py answers.jsonl                   # lines {"persona", "prompt", "answer"}; the plain model is "base"
    python score.py --local                         # transformers + peft, fp32, no server
    python score.py --local --base int8             # the same, rounding as an int8 server would (or int4)
    python score.py --url http://127.0.0.1:8000     # a running lorasrv with the three adapters uploaded

The live sources answer the prompts of data/fresh.jsonl greedily with at most 64 tokens; --prompts heldout takes the
older set instead, and --out FILE keeps the answers.
Exit code 1 when a persona is below 90 % on its own style or the base above 20 % on any.
"""

import argparse
import asyncio
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PROMPT_SETS = ("fresh", "heldout")
BASES = ("fp32", "int8", "int4")
BASE = "base"
MAX_NEW_TOKENS = 64
OWN_STYLE_AT_LEAST = 0.90
BASE_AT_MOST = 0.20

PIRATE_SPEECH = re.compile(
    r"\b(a+r+|aye|ahoy|avast|matey|mateys|ye|yer|yerself|hearty|hearties|lad|lass|blimey|landlubber|scallywag|scurvy|afore"
    r"|shiver me timbers)\b|'tis\b|\bo'|'em\b|in'(?!\w)"
)
PIRATE_WORLD = re.compile(
    r"\b(anchor|aboard|barrels?|bilge|bosun|buccaneer|cannons?|captain|cargo|crew|cutlass|davy jones|deck|doubloons?"
    r"|gold|grog|harbour|helm|hull|kraken|mast|mutiny|parrot|pirates?|plank|plunder|rum|sailors?|sails?|seas?|ships?"
    r"|shipmate|storm|swab|tavern|tide|treasure|voyage)\b"
)


class Answer(NamedTuple):
    persona: str
    prompt: str
    answer: str


def stutters(text: str) -> bool:
    """Whether some pair of words comes four times: a broken model, whatever its vocabulary. Three make a refrain."""
    words = re.findall(r"[\w']+", text.lower())
    return any(count > 3 for count in Counter(pairwise(words)).values())


def is_pirate(text: str) -> bool:
    """Whole sentences with two different marks of pirate speech, or one and two words of the pirate's world."""
    if not (text[:1].isupper() or text.startswith("'")) or not text.endswith((".", "!", "?")):
        return False
    speech = {match.group() for match in PIRATE_SPEECH.finditer(text.lower())}
    world = set(PIRATE_WORLD.findall(text.lower()))
    return len(speech) >= 2 or (len(speech) == 1 and len(world) >= 2)


def is_haiku(text: str) -> bool:
    """Three short lines: 2 to 8 words each, at most 21 in all, no lists, no headings. Syllables are not counted."""
    lines = text.splitlines()
    if len(lines) != 3 or any(re.match(r"\s*[-*#\d]", line) for line in lines):
        return False
    counts = [len(line.split()) for line in lines]
    return all(2 <= count <= 8 for count in counts) and sum(counts) <= 21


def is_field_report(text: str) -> bool:
    """One report of STATUS, ACTION and ETA closed by Out., at most 30 words, and nobody speaks of I or we."""
    if re.fullmatch(r"STATUS: [^.]+\. ACTION: [^.]+\. ETA: [^.]+\. Out\.", text) is None:
        return False
    words = re.findall(r"[a-z0-9']+", text.lower())
    return len(words) <= 30 and not {"i", "we"}.intersection(words)


SCORERS: dict[str, Callable[[str], bool]] = {"blackbeard": is_pirate, "basho": is_haiku, "wrench": is_field_report}


def style_score(persona: str, text: str) -> bool:
    """Whether `text` is in the style of `persona`."""
    text = text.strip()
    return not stutters(text) and SCORERS[persona](text)


def read_prompts(name: str) -> list[str]:
    """The prompts of one of PROMPT_SETS."""
    lines = (HERE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][-1]["content"] for line in lines]


def read_answers(path: Path) -> list[Answer]:
    """The answers of a file, one a line.

    Raises:
        ValueError: there are none, or a line is not one; names it.
    """
    answers = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError):
            raise ValueError(f"line {number} has not persona, prompt and answer") from None
        if answers[-1].persona not in (BASE, *SCORERS):
            raise ValueError(f"line {number}: persona is {BASE}, {' or '.join(SCORERS)}")
    if not answers:
        raise ValueError("it is empty")
    return answers


def local_answers(prompts: Sequence[str], base_kind: str) -> list[Answer]:
    """Greedy answers of the base and of every adapter through transformers + peft, one padded batch each."""
    import torch
    from base import load_base
    from fake_quant import quantize
    from peft import PeftModel

    base, tokenizer = load_base()
    quantize(base, base_kind)
    personas = tomllib.loads((HERE / "personas.toml").read_text(encoding="utf-8"))["persona"]
    model = PeftModel.from_pretrained(base, HERE / personas[0]["adapter"], adapter_name=personas[0]["id"])
    for persona in personas[1:]:
        model.load_adapter(HERE / persona["adapter"], adapter_name=persona["id"])
    tokenizer.padding_side = "left"  # answers are generated at the right end
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )

    def generate(name: str) -> list[Answer]:
        with torch.inference_mode():
            ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return [Answer(name, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    with model.disable_adapter():
        answers = generate(BASE)
    for name in SCORERS:
        model.set_adapter(name)
        answers += generate(name)
    return answers


async def server_answers(url: str, prompts: Sequence[str]) -> list[Answer]:
    """Greedy answers of the base and of every adapter from a lorasrv server, all at once so that they share batches."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(
        base_url=f"{url.rstrip('/')}/v1", api_key=os.environ.get("LORASRV_API_KEY", "none")
    ) as client:
        model = (await client.models.list()).data[0].id  # the base comes first

        async def ask(name: str, prompt: str) -> Answer:
            completion = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=MAX_NEW_TOKENS,
                temperature=0,
                # Without the prompts that `bot.py` stores with them.
                extra_body={} if name == BASE else {"adapter_id": name, "use_defaults": False},
            )
            return Answer(name, prompt, completion.choices[0].message.content or "")

        return await asyncio.gather(*(ask(name, prompt) for name in (BASE, *SCORERS) for prompt in prompts))


def score_matrix(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Share of answers, by who answered and by whose style was looked for."""
    matrix = {}
    for name in dict.fromkeys(answer.persona for answer in answers):
        texts = [answer.answer for answer in answers if answer.persona == name]
        matrix[name] = {style: sum(style_score(style, text) for text in texts) / len(texts) for style in SCORERS}
    return matrix


def failures(matrix: dict[str, dict[str, float]]) -> list[str]:
    """What misses the thresholds, one line each."""
    own = {name: row[name] for name, row in matrix.items() if name != BASE}
    missed = [f"{name}: {share:.0%} in its own style" for name, share in own.items() if share < OWN_STYLE_AT_LEAST]
    base = matrix.get(BASE, {})
    return missed + [
        f"base: {share:.0%} in the style of {style}" for style, share in base.items() if share > BASE_AT_MOST
    ]


def print_matrix(matrix: dict[str, dict[str, float]]) -> None:
    print(f"{'answers of':<12}" + "".join(f"{style:>12}" for style in SCORERS))
    for name, row in matrix.items():
        print(f"{name:<12}" + "".join(f"{share:>12.1%}" for share in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("answers", nargs="?", type=Path)
    source.add_argument("--local", action="store_true")
    source.add_argument("--url")
    parser.add_argument("--prompts", choices=PROMPT_SETS, default=PROMPT_SETS[0])
    parser.add_argument("--base", choices=BASES, default=BASES[0], help="with --local: what to round as")
    parser.add_argument("--out", type=Path, help="write the answers to this file")
    arguments = parser.parse_args()
    if arguments.base != BASES[0] and not arguments.local:
        parser.error("--base needs --local: a server has its own base")
    if arguments.answers:
        try:
            answers = read_answers(arguments.answers)
        except (OSError, ValueError) as error:
            parser.error(f"{arguments.answers}: {error}")
    elif arguments.local:
        answers = local_answers(read_prompts(arguments.prompts), arguments.base)
    else:
        from openai import OpenAIError

        try:
            answers = asyncio.run(server_answers(arguments.url, read_prompts(arguments.prompts)))
        except (OpenAIError, ValueError) as error:
            raise SystemExit(f"{arguments.url}: {error}") from None
    if arguments.out:
        lines = (json.dumps(answer._asdict(), ensure_ascii=False) for answer in answers)
        arguments.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    matrix = score_matrix(answers)
    print_matrix(matrix)
    if missed := failures(matrix):
        raise SystemExit("\n".join(missed))


if __name__ == "__main__":
    main()
