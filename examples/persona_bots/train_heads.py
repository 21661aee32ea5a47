"""Train Medusa heads that draft for a persona, or for the base, on a CPU, a few minutes each.

    python train_heads.py --persona wrench --out wrench-heads     # then: lorasrv upload wrench-heads --id wrench
    python train_heads.py --base --out base-heads                 # then: lorasrv serve --draft-heads base-heads

The heads learn from what the model itself answers to the questions in `data/`, and are tried on those of
`heldout.jsonl`. Needs what `train.py` needs.
"""

import argparse
import json
import shutil
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from base import load_base
from peft import PeftModel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, silu

from lorasrv.llm import LLM
from lorasrv.sampling_params import SamplingParams

HERE = Path(__file__).parent
HEADS_NAME = "medusa_lm_head.safetensors"
SEED = 7
LEARNING_RATE = 1e-3
POSITIONS = 256
ANSWERED_TOGETHER = 64

Text = tuple[list[int], int]  # token ids of prompt and answer, and the number of those of the prompt
Places = tuple[torch.Tensor, list[torch.Tensor]]  # states [N, H], and the token [N] that each head is to guess


class Heads(torch.nn.Module):
    """One block per head: h + silu(W h + b). At first they guess what the base says next."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(count)])
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, states: torch.Tensor, head: int) -> torch.Tensor:
        return states + silu(self.blocks[head](states))

    def save(self, path: Path) -> None:
        """Write the names that Medusa, TGI and LoRAX use; bf16."""
        tensors = {}
        for number, block in enumerate(self.blocks):
            for name, value in block.state_dict().items():
                tensors[f"{number}.0.linear.{name}"] = value.to(torch.bfloat16).contiguous()
        save_file(tensors, path)


def bar() -> Progress:
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns)


def questions(names: list[str]) -> list[str]:
    """The questions of data files, each once."""
    lines = [line for name in names for line in (HERE / "data" / f"{name}.jsonl").read_text("utf-8").splitlines()]
    return list(dict.fromkeys(json.loads(line)["messages"][0]["content"] for line in lines))


def answers(adapter: Path | None, prompts: list[str], max_tokens: int) -> list[Text]:
    """What the served model answers, greedy."""
    llm = LLM()
    if adapter is not None:
        llm.add_adapter("persona", adapter)
    assert llm.chat_template is not None
    rendered = [llm.chat_template.render([{"role": "user", "content": text}]) for text in prompts]
    encoded = [llm.tokenizer.encode(text, add_special_tokens=False) for text in rendered]
    texts, sampling = [], SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with llm, bar() as progress:
        task = progress.add_task("answers", total=len(prompts))
        for start in range(0, len(prompts), ANSWERED_TOGETHER):
            some = encoded[start : start + ANSWERED_TOGETHER]
            names = [None if adapter is None else "persona"] * len(some)
            for prompt, said in zip(some, llm.generate(some, sampling, names), strict=True):
                texts.append(([*prompt, *said.token_ids], len(prompt)))
            progress.update(task, advance=len(some))
    return texts


@torch.inference_mode()
def places(model: Any, texts: list[Text], count: int) -> Places:
    """The states from which answers were said, and what came behind."""
    states, targets = [], [[] for _ in range(count)]
    with bar() as progress:
        for ids, num_prompt in progress.track(texts, description="states"):
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            # The state at i says token i + 1; head 0 is to guess token i + 2.
            last = len(ids) - count - 1
            if last <= num_prompt - 1:
                continue
            states.append(hidden[num_prompt - 1 : last].clone())
            for head, found in enumerate(targets):
                found.append(torch.tensor(ids[num_prompt + 1 + head : last + 2 + head]))
    return torch.cat(states), [torch.cat(found) for found in targets]


def batches(number: int, order: torch.Generator) -> Iterator[torch.Tensor]:
    return iter(torch.randperm(number, generator=order).split(POSITIONS))


def fit(heads: Heads, output: torch.Tensor, found: Places, epochs: int) -> None:
    """Train the heads; `output` [V, H] is the base's output layer, which stays as it is."""
    states, targets = found
    order = torch.Generator().manual_seed(SEED)
    total = epochs * -(-len(states) // POSITIONS)
    adam = torch.optim.AdamW(heads.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, total)
    with bar() as progress:
        task = progress.add_task("heads", total=total)
        for _ in range(epochs):
            for at in batches(len(states), order):
                losses = [
                    cross_entropy(heads(states[at], head) @ output.T, target[at]) for head, target in enumerate(targets)
                ]
                sum(losses).backward()
                adam.step()
                adam.zero_grad()
                schedule.step()
                shown = " ".join(f"{loss.item():.2f}" for loss in losses)
                progress.update(task, advance=1, description=f"heads  loss {shown}")


@torch.inference_mode()
def shares(heads: Heads, output: torch.Tensor, found: Places) -> list[float]:
    """The share of places where a head is right and those before it are."""
    states, targets = found
    right, result = torch.ones(len(states), dtype=torch.bool), []
    for head, target in enumerate(targets):
        parts = states.split(POSITIONS)
        guessed = torch.cat([(heads(part, head) @ output.T).argmax(dim=1) for part in parts])
        right &= guessed == target
        result.append(right.float().mean().item())
    return result


def main() -> None:
    personas = {one["id"]: one for one in tomllib.loads((HERE / "personas.toml").read_text("utf-8"))["persona"]}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--persona", choices=list(personas))
    choice.add_argument("--base", action="store_true", help="for the base, without an adapter")
    parser.add_argument("--out", type=Path, required=True, help="folder to write: the heads, and the persona's adapter")
    parser.add_argument("--heads", type=int, default=3, help="tokens that are guessed at once (default: 3)")
    parser.add_argument("--epochs", type=int, default=4, help="(default: 4)")
    parser.add_argument("--questions", type=int, help="use only so many (default: all)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer (default: 96)")
    arguments = parser.parse_args()
    for name in ("heads", "epochs", "questions", "max_tokens"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.max_tokens <= arguments.heads:
        parser.error("--max-tokens must be more than --heads: shorter answers teach nothing")
    try:
        # Now, not after ten minutes of training.
        arguments.out.mkdir(parents=True, exist_ok=True)
        is_empty = not any(arguments.out.iterdir())
    except OSError as error:
        parser.error(f"--out {arguments.out} cannot be made: {error.strerror}")
    if not is_empty:
        parser.error(f"--out {arguments.out} is not empty; remove it or name another folder")
    torch.manual_seed(SEED)
    begun = time.monotonic()
    adapter = None if arguments.base else HERE / personas[arguments.persona]["adapter"]
    asked = questions([*personas])[: arguments.questions]
    texts = answers(adapter, [*asked, *questions(["heldout"])], arguments.max_tokens)
    base, _ = load_base()
    output = base.lm_head.weight.detach()
    model = base if adapter is None else PeftModel.from_pretrained(base, adapter).get_base_model()
    learned, tried = (places(model.model, some, arguments.heads) for some in (texts[: len(asked)], texts[len(asked) :]))
    learned, tried = ((states.clone(), targets) for states, targets in (learned, tried))
    heads = Heads(arguments.heads, output.shape[1])
    fit(heads, output, learned, arguments.epochs)
    right = shares(heads, output, tried)
    if adapter is not None:
        shutil.copytree(adapter, arguments.out, dirs_exist_ok=True)
    heads.save(arguments.out / HEADS_NAME)
    shown = ", ".join(f"{100 * share:.0f} % of {number + 1}" for number, share in enumerate(right))
    took = time.monotonic() - begun
    print(f"{len(learned[0])} places in {took:.0f} s -> {arguments.out}; on new questions right: {shown} tokens")


if __name__ == "__main__":
    main()
