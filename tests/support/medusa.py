"""Medusa heads for the tiny llama, trained on its answers, and their predictions according to transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, linear, silu

Heads = list[tuple[torch.Tensor, torch.Tensor]]
BATCH = 256


def states(hf: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return the normed last hidden states [T, H]."""
    with torch.no_grad():
        found: torch.Tensor = hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    return found


def guesses(hf: Any, heads: Heads, state: torch.Tensor) -> list[int]:
    """Return the likeliest token of each head."""
    output = hf.get_output_embeddings().weight
    with torch.no_grad():
        return [int((output @ (state + silu(linear(state, w, b)))).argmax()) for w, b in heads]


def trained(hf: Any, texts: Sequence[Sequence[int]], count: int, steps: int = 250) -> Heads:
    """Train heads on texts."""
    output = hf.get_output_embeddings().weight.detach()
    torch.manual_seed(0)
    found = [(states(hf, text), torch.tensor(text)) for text in texts]
    heads = []
    for depth in range(count):
        ahead = depth + 2
        x = torch.cat([state[:-ahead] for state, _ in found])
        y = torch.cat([text[ahead:] for _, text in found])
        weight = (0.01 * torch.randn(x.shape[1], x.shape[1])).requires_grad_()
        bias = torch.zeros(x.shape[1], requires_grad=True)
        adam = torch.optim.Adam([weight, bias], lr=0.02)
        for _ in range(steps):
            at = torch.randperm(len(x))[:BATCH]
            loss = cross_entropy((x[at] + silu(linear(x[at], weight, bias))) @ output.T, y[at])
            adam.zero_grad()
            torch.autograd.backward(loss)
            adam.step()
        heads.append((weight.detach(), bias.detach()))
    return heads


def save_heads(heads: Heads, path: Path, prefix: str = "") -> None:
    """Write heads as Medusa names them."""
    tensors = {}
    for number, (weight, bias) in enumerate(heads):
        tensors[f"{prefix}{number}.0.linear.weight"] = weight.contiguous()
        tensors[f"{prefix}{number}.0.linear.bias"] = bias.contiguous()
    save_file(tensors, path)
