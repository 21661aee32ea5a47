"""What a quantized server does to the base, played in fp32: close enough to see whether a persona keeps its style.

int8: weights and the inputs of every linear rounded to 8 bits. int4: the weights stay as they are, since the built-in
file is 4-bit (Q4_1) already, and only the inputs are rounded. A server's scales and sums differ in detail.
"""

import torch
from transformers import PreTrainedModel

GROUP = 32
INT8_MAX = 127


def round_groups(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] rounded to symmetric int8, one scale for each 32 neighbours of the last axis; n a multiple of 32."""
    groups = x.unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / INT8_MAX
    return ((groups / scale).round() * scale).flatten(-2)


def _round_input(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (round_groups(inputs[0]),)


def quantize(model: PreTrainedModel, base: str) -> None:
    """Change `model` in place to act as `base` would; call it before PEFT wraps the model. LoRA inputs stay exact.

    The embedding shares its weight with the last linear, so it is rounded too.
    """
    if base == "fp32":
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            if base == "int8":
                module.weight.data.copy_(round_groups(module.weight.data))
            module.register_forward_pre_hook(_round_input)
