"""The decoder's logits against transformers, and with adapters against PEFT, on tiny random models of every family."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_decoder import HandDecoder, register
from peft_adapters import peft_adapter

from adapter_store.errors import AdapterInvalid
from adapter_store.store import AdapterStore
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes

KERNELS = ("torch", "numba")
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
ROPE_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ROPE_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
ROPE_LONG |= {"short_factor": [1.0 + 0.25 * i for i in range(6)], "long_factor": [2.0] * 6}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
CASES = {
    "llama": {},
    "llama-mqa-bias-tied": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
    "llama-llama3-rope": {"rope_parameters": ROPE_LLAMA3},
    "llama-linear-rope": {"rope_parameters": ROPE_LINEAR},
    "llama-yarn-rope": {"rope_parameters": ROPE_YARN},
    "mistral": {},
    "qwen2": {},
    "qwen2-null-heads": {"num_key_value_heads": None},
    "qwen3-bias": {"attention_bias": True},
    "qwen3-null-heads": {"num_key_value_heads": None},
    "qwen3-window-tied": {**WINDOW, "tie_word_embeddings": True},
    "gemma": {},
    "gemma-mha-bias": {"num_key_value_heads": 4, "attention_bias": True},
    "gemma2": {},
    "gemma2-uncapped-bias": {**UNCAPPED, "attention_bias": True},
    "gemma3": {},
    "gemma3-ropes": {"rope_parameters": GEMMA3_ROPE, "final_logit_softcapping": 10.0, "attn_logit_softcapping": 5.0},
    "ministral3": {},
    "ministral3-window": {"sliding_window": 8, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
    "mpt": {},
    "mpt-six-heads": {"n_heads": 6, "d_model": 96},
    "phi3": {},
    "phi3-window-partial": {"sliding_window": 8, "num_key_value_heads": 4, "rope_parameters": PARTIAL},
    "phi3-longrope": {"rope_parameters": ROPE_LONG, "original_max_position_embeddings": 64},
    "phi3-partial": {"rope_parameters": PARTIAL},
    "smollm3": {},
    "granite": {},
    "granite-tied-bias": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "olmo2": {},
    "olmo2-mha-bias-tied": {"num_key_value_heads": None, "attention_bias": True, "tie_word_embeddings": True},
    "smollm3-listed-bias": {"no_rope_layers": [0, 0, 1], "attention_bias": True, "mlp_bias": True},
}
"""By name, which begins with the family: changes of its tiny configuration."""
EVERYDAY = {"llama", "llama-llama3-rope", "mistral", "qwen2", "qwen3-window-tied", "gemma2", "gemma3-ropes"}
EVERYDAY |= {"gemma", "gemma-mha-bias", "mpt", "mpt-six-heads"}
EVERYDAY |= {"phi3-window-partial", "smollm3", "ministral3", "granite", "olmo2"}
"""One of each family and of each kind of attention; the others are for test-long."""
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "qv": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "all": {
        "r": 20,
        "lora_alpha": 10,
        "target_modules": [*ATTENTION, *MLP],
        "rank_pattern": {"k_proj": 3, "layers.1.mlp.down_proj": 7},
    },
    "rs": {"r": 5, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "up_proj"]},
}
FUSED = {
    "phi3": dict.fromkeys(ATTENTION[:3], "qkv_proj") | dict.fromkeys(MLP[:2], "gate_up_proj"),
    "mpt": dict.fromkeys(ATTENTION[:3], "Wqkv")
    | {"o_proj": "out_proj", "gate_proj": "up_proj", "layers.1.mlp.down_proj": "blocks.1.ffn.down_proj"},
}
"""What a family's own modules are called."""


def _fused(config: dict[str, Any], family: str) -> dict[str, Any]:
    own = FUSED[family]
    modules = list(dict.fromkeys(own.get(name, name) for name in config["target_modules"]))
    ranks = {own.get(name, name): rank for name, rank in config.get("rank_pattern", {}).items()}
    return config | {"target_modules": modules, "rank_pattern": ranks}


ALL = [name for name in CASES if name != "phi3-partial"]


def cases(kernels: str, *names: str, mark: pytest.MarkDecorator | None = None, everyday: bool = False) -> list[Any]:
    """Parameters of (name, kernels); all but those of every day have the mark."""
    marks = {name: mark if mark and not (everyday and name in EVERYDAY) else () for name in names}
    return [pytest.param(name, kernels, id=f"{name}-{kernels}", marks=marks[name]) for name in names]


def _save_adapters(directory: Path, out: Path) -> dict[str, Path]:
    from transformers import AutoConfig

    family = AutoConfig.from_pretrained(directory).model_type
    for i, (name, config) in enumerate(CONFIGS.items()):
        own = _fused(config, family) if family in FUSED else config
        peft_adapter(directory, out / name, seed=100 + i, **own)
    return {name: out / name for name in CONFIGS}


@lru_cache(maxsize=8)
def _oracle_model(directory: Path, adapter: Path | None) -> torch.nn.Module:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()


def _oracle(directory: Path, adapter: Path | None, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return _oracle_model(directory, adapter)(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *cases("numba", *ALL, mark=pytest.mark.long, everyday=True),
        *cases("torch", *(name for name in ALL if name.startswith("llama"))),
        *cases("torch", *(name for name in ALL if not name.startswith("llama")), mark=pytest.mark.exhaustive),
        *cases("triton", "llama", mark=pytest.mark.long),
        *cases("triton", "mistral", "gemma2", "gemma3", "mpt", "phi3-partial", "smollm3", mark=pytest.mark.exhaustive),
        *cases("triton", "granite", "olmo2", mark=pytest.mark.exhaustive),
    ],
)
def test_mixed_batch_of_chunks_equals_transformers_and_peft(
    tiny_hf_checkpoints, tmp_path: Path, name: str, kernels: str
) -> None:
    """Base and three adapters of mixed ranks, prompts in two chunks of different lengths and a token after them, all in
    the same three steps.
    """
    directory = tiny_hf_checkpoints[name.partition("-")[0]](**CASES[name])
    adapters = _save_adapters(directory, tmp_path)
    served = HandDecoder(directory, adapters, tmp_path / "store", kernels)
    work = []
    for i, name in enumerate([None, "qv", "all", "rs", None, "all"]):
        ids = torch.randint(3, 384, (9 + 4 * i,), generator=torch.Generator().manual_seed(7 + i)).tolist()
        work.append((name, ids, tuple(range(i * 10, i * 10 + 10))))
    first = served.logits([(name, ids[: 3 + i], 0, table) for i, (name, ids, table) in enumerate(work)])
    second = served.logits([(name, ids[3 + i : -1], 3 + i, table) for i, (name, ids, table) in enumerate(work)])
    third = served.logits([(name, ids[-1:], len(ids) - 1, table) for name, ids, table in work])
    for i, (name, ids, _) in enumerate(work):
        want = _oracle(directory, adapters[name] if name else None, ids)
        got = torch.stack([step[i] for step in (first, second, third)])
        torch.testing.assert_close(got, want[[2 + i, -2, -1]], rtol=1e-3, atol=1e-4)
        if name is not None:
            assert (_oracle(directory, None, ids)[-1] - want[-1]).abs().max() > 0.1, "the adapter changes nothing"


@pytest.mark.parametrize(
    ("family", "quantization"),
    [(family, "int4") for family in sorted({name.partition("-")[0] for name in CASES})] + [("llama", "int8")],
)
def test_a_recorded_pass_is_the_pass(tiny_hf_checkpoints, tmp_path: Path, family: str, quantization: str) -> None:
    """Bit for bit, logits, keys and values: prompts, single tokens, with adapters (also in int8) and without, in teams
    of any size."""
    directory = tiny_hf_checkpoints[family]()
    adapters = _save_adapters(directory, tmp_path)
    adapters["coded"] = adapters["rs"]
    recorded, called = (
        HandDecoder(directory, adapters, tmp_path / name, "numba", weights=quantization, coded=["coded"])
        for name in ("r", "c")
    )
    assert recorded.decoder._program is not None
    called.decoder._program = None
    tables = [tuple(range(i * 10, i * 10 + 10)) for i in range(4)]
    names = [None, "qv", "all", "rs"]
    steps = [
        [(name, list(range(20 + i, 30 + 2 * i)), 0, tables[i]) for i, name in enumerate(names)],
        [(name, [40 + i], 10 + i, tables[i]) for i, name in enumerate(names)],
        [(None, [50], 11, tables[0])],
        [("all", list(range(60, 84)), 13, tables[2]), (None, [51], 12, tables[0])],
        [("coded", [60], 14, tables[3]), ("all", [61], 37, tables[2])],
    ]
    threads = torch.get_num_threads()
    try:
        for count, shares in zip((threads, threads, 1, threads, threads), steps, strict=True):
            torch.set_num_threads(count)
            got, want = recorded.logits(shares), called.logits(shares)
            assert all(torch.equal(got[i], want[i]) for i in range(len(shares)))
            best = recorded.decoder.likeliest
            assert best is not None
            assert sorted(best.tolist()) == sorted(got[i].argmax().item() for i in range(len(shares)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(recorded.memory.slab(1), called.memory.slab(1))
    kinds = {"linear", "pointwise", "attention", "sgmv", "likeliest"}
    is_embedded = recorded.decoder.kernel_seconds().keys() == kinds | {"weight_rows"}
    assert is_embedded or family.startswith(("gemma", "granite")), "tokens are embedded by a launch of their own"


def test_states_of_a_model_that_divides_its_logits_are_those_of_transformers(
    tiny_hf_checkpoints, tmp_path: Path
) -> None:
    """Draft heads read them, and the head is asked for what they make of them."""
    directory, ids = tiny_hf_checkpoints["granite"](), list(range(10, 30))
    served = HandDecoder(directory, {}, tmp_path / "store", "numba")
    got = served.logits([(None, ids, 0, tuple(range(10)))])[0]
    with torch.no_grad():
        want = _oracle_model(directory, None)(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
    states = served.decoder.states[:1]
    torch.testing.assert_close(states[0], want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(served.decoder.logits(states)[0], got, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_bf16_panels_stay_within_tolerance(tiny_hf_checkpoints, tmp_path: Path, kernels: str) -> None:
    directory = tiny_hf_checkpoints["llama"]()
    adapters = _save_adapters(directory, tmp_path)
    served = HandDecoder(directory, adapters, tmp_path / "store", kernels, torch.bfloat16)
    ids = list(range(10, 30))
    for i, name in enumerate(adapters):
        got = served.logits([(name, ids, 0, tuple(range(i * 10, i * 10 + 10)))])[0]
        want = _oracle(directory, adapters[name], ids)[-1]
        assert (got - want).norm() / want.norm() < 2e-2


def test_fused_modules_take_no_adapter_of_their_parts(tiny_hf_checkpoints, tmp_path: Path) -> None:
    """And the other way round: each is told what it does not fit."""
    llama, phi3 = (tiny_hf_checkpoints[family](num_key_value_heads=2) for family in ("llama", "phi3"))
    for directory, other in ((llama, phi3), (phi3, llama)):
        adapters = _save_adapters(directory, tmp_path / directory.name)
        checkpoint = open_checkpoint(str(other))
        checkpoint.close()
        with (
            AdapterStore(tmp_path / f"of-{directory.name}", base_shapes(checkpoint.spec)) as store,
            pytest.raises(AdapterInvalid, match="qkv_proj" if directory is phi3 else "q_proj"),
        ):
            register(store, "mia", adapters["qv"])
