"""Sums of adapters through the whole engine: logits are those of PEFT with several active adapters and `set_scale`."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft_adapters import peft_adapter
from served_logits import ServedLogits, last_logits

from adapter_store.composition import Composition
from adapter_store.errors import AdapterNotFound, NotComposable
from lorasrv.errors import InvalidRequest

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 16, "lora_alpha": 20, "target_modules": ALL},
    "rslora": {"r": 8, "lora_alpha": 6, "use_rslora": True, "target_modules": ALL},
    "odd": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "layers": {"r": 24, "lora_alpha": 12, "target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
    "patterns": {"r": 4, "target_modules": ALL, "rank_pattern": {"k_proj": 7}, "alpha_pattern": {"up_proj": 30}},
    "biased": {
        "r": 5,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "down_proj"],
        "lora_bias": True,
        "init_lora_weights": True,
    },
    "head": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "lm_head"], "save_embedding_layers": False},
    "ends": {"r": 17, "target_modules": ["embed_tokens", "lm_head"], "save_embedding_layers": False},
}
SUMS: list[list[tuple[str, float]]] = [
    [("plain", 1.0), ("rslora", 0.5)],
    [("rslora", 1.0), ("odd", -1.25)],
    [("plain", 0.3), ("layers", 2.0)],
    [("plain", 1.0), ("rslora", 1.0), ("odd", 1.0), ("patterns", 0.7)],
    [("biased", 0.5), ("patterns", 1.0)],
    [("layers", 1.0), ("odd", 1.0)],
    [("plain", -0.5)],
    [("head", 0.5), ("plain", 1.0), ("ends", -2.0)],
]
APART = 0.02


@pytest.fixture(scope="module")
def adapters(tiny_hf_checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and a folder with one adapter of PEFT for each name."""
    directory, folder = tiny_hf_checkpoints["llama"](), tmp_path_factory.mktemp("peft")
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        peft_adapter(directory, folder / name, seed=seed, **config)
    return directory, folder


@pytest.fixture
def served(
    adapters: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ServedLogits]:
    options = {"quantization": "none", **getattr(request, "param", {})}
    if options.pop("stored", False):
        monkeypatch.setattr("lorasrv.llm.Composition", SimpleNamespace(of=partial(Composition.of, is_stored=True)))
    with closing(ServedLogits(adapters[0], monkeypatch, **options)) as served:
        for name in ADAPTERS:
            served.llm.add_adapter(name, adapters[1] / name)
        yield served


@pytest.fixture(scope="module")
def peft_logits(adapters: tuple[Path, Path]) -> Callable[[list[tuple[str, float]], list[int]], torch.Tensor]:
    """PEFT's logits with several active adapters, each with its own scale."""
    from transformers import AutoModelForCausalLM

    directory, folder = adapters
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    first, *others = ADAPTERS
    model = PeftModel.from_pretrained(base, folder / first, adapter_name=first).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lora_bias=True")  # that it cannot be merged
        for name in others:
            model.load_adapter(folder / name, adapter_name=name)

    def logits(parts: list[tuple[str, float]], prompt: list[int]) -> torch.Tensor:
        model.base_model.set_adapter([name for name, _ in parts])
        for module in model.modules():
            if isinstance(module, LoraLayer):
                for name, weight in parts:
                    if name in module.scaling:
                        module.set_scale(name, weight)
        return last_logits(model, prompt)

    return logits


def written(parts: list[tuple[str, float]]) -> str:
    return "+".join(f"{weight!r}*{name}" for name, weight in parts)


@pytest.mark.parametrize(
    "served",
    [{}, {"stored": True}, {"kernels": "torch"}, pytest.param({"kernels": "triton"}, marks=pytest.mark.long)],
    ids=["numba", "stored", "torch", "triton"],
    indirect=True,
)
def test_sums_are_those_of_peft_in_one_batch(
    served: ServedLogits, peft_logits: Any, request: pytest.FixtureRequest
) -> None:
    """Beside each adapter alone and the base. Sums differ from each part alone, and from the base."""
    # Triton's interpreter takes minutes for all.
    sums, alone = (SUMS[2:4], ["odd"]) if request.node.callspec.id == "triton" else (SUMS, list(ADAPTERS))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 384, (9 + 4 * i,), generator=generator).tolist() for i in range(len(sums))]
    asked = [(prompt, written(parts), parts) for prompt, parts in zip(prompts, sums, strict=True)]
    asked += [(prompts[0], name, [(name, 1.0)]) for name in alone]
    got = served.first_logits(
        [*(prompt for prompt, _, _ in asked), prompts[0]], [*(name for _, name, _ in asked), None]
    )
    assert max(served.batches) > len(asked) // 2, "the batch was not mixed"
    for (prompt, name, parts), logits in zip(asked, got, strict=False):
        want = peft_logits(parts, prompt)
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    for prompt, parts, logits in zip(prompts, sums, got, strict=False):
        for name, _ in parts:
            if len(sums) == len(SUMS) or name in alone:
                [without] = served.first_logits([prompt], [name])
                assert (logits - without).abs().max() > APART, f"{written(parts)} is {name}"


@pytest.mark.parametrize("served", [{"quantization": "int8"}], indirect=True)
def test_equal_sums_are_equal_to_the_bit(served: ServedLogits) -> None:
    """In codes, as the bits of products of floats may depend on the number of rows: equal sums share cached pages."""
    prompt = list(range(20, 57))
    pairs = [
        ("plain+0.5*rslora", "0.5*rslora+plain"),
        ("0.5*plain+0.5*plain", "plain"),
        ("plain+0*rslora", "plain"),
        ("2*plain+odd+-2*plain", "odd"),
        ("plain@1+odd", "odd+plain"),
    ]
    for one, other in pairs:
        first, second = served.first_logits([prompt], [one]), served.first_logits([prompt], [other])
        assert torch.equal(*first, *second), f"{one} is not {other}"
    with_minus, base = served.first_logits([prompt] * 2, ["plain+-1*plain", None])
    assert torch.equal(with_minus, base)


def test_pages_of_a_sum_are_its_own(served: ServedLogits) -> None:
    """A prompt that one sum has computed is found by the same sum only."""
    prompt, cached = list(range(30, 95)), []
    for name in ("plain", "plain+odd", "plain+0.5*odd", "odd+plain", None):
        before = served.llm.engine.metrics.stats().cached_tokens_total
        served.first_logits([prompt], [name])
        cached.append(served.llm.engine.metrics.stats().cached_tokens_total - before)
    assert cached == [0, 0, 0, 64, 0]


def test_other_weights_load_nothing(served: ServedLogits) -> None:
    """The pool holds the adapters, and no sum of them."""
    prompt = list(range(50, 70))
    served.first_logits([prompt], ["plain+0.5*odd"])
    before = served.llm.engine.metrics.stats()
    assert before.adapters_resident == 2
    found = served.first_logits([prompt] * 8, [f"{i / 4}*plain+{1 - i / 8}*odd" for i in range(1, 9)])
    after = served.llm.engine.metrics.stats()
    assert (after.adapters_resident, after.pages_adapters) == (2, before.pages_adapters)
    assert after.adapter_loads_disk_total == before.adapter_loads_disk_total == 2
    assert after.adapter_loads_host_total == before.adapter_loads_host_total
    assert min(float((one - other).abs().max()) for one, other in pairwise(found)) > APART


def test_what_cannot_be_summed(served: ServedLogits, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    directory, folder = adapters
    peft_adapter(directory, tmp_path / "dora", use_dora=True)
    peft_adapter(directory, tmp_path / "norms", target_modules=["o_proj"], modules_to_save=["norm"])
    peft_adapter(directory, tmp_path / "wide", r=60, target_modules=["q_proj"])
    for name in ("dora", "norms", "wide"):
        served.llm.add_adapter(name, tmp_path / name)
    served.llm.add_adapter("coded", folder / "odd", stored="int8")
    refused = {
        "plain+dora": "DoRA",
        "0.5*dora": "DoRA",
        "norms+plain": "modules_to_save",
        "plain+coded": "different forms",
    }
    for text, why in refused.items():
        with pytest.raises(NotComposable, match=why):
            served.first_logits([[5, 6, 7]], [text])
    served.llm.store.max_lora_rank = 70
    with pytest.raises(NotComposable, match="add up to 76, and this server takes 70"):
        served.first_logits([[5, 6, 7]], ["wide+plain"])
    served.first_logits([[5, 6, 7]], ["wide+rslora"])
    with pytest.raises(AdapterNotFound, match="nobody"):
        served.first_logits([[5, 6, 7]], ["plain+nobody"])
    stored = served.llm.store.register_defaults("night", '{"adapters":[{"id":"plain@1","weight":1.0}]}').ref
    assert stored.key is None
    for name in ("night", "night+odd"):
        with pytest.raises(InvalidRequest, match="is a stored sum"):
            served.llm.generate([[5, 6, 7]], served.greedy, [name], ignore_defaults=True)
    [alone, half] = served.first_logits([[5, 6, 7]] * 2, ["coded", "0.5*coded"])
    assert (alone - half).abs().max() > APART / 4


def test_a_sum_outlives_the_deletion_of_a_part_while_it_is_asked(served: ServedLogits) -> None:
    """Its weights stay as long as a request holds them; a later request is refused."""
    llm, prompt = served.llm, list(range(40, 60))
    message = llm._message(prompt, served.greedy, llm._find("plain+odd"))
    llm.store.delete("odd")
    [before] = llm._run([message])
    assert before.finish_reason == "length"
    del message
    gc.collect()
    with pytest.raises(AdapterNotFound):
        llm.generate([prompt], served.greedy, ["plain+odd"])
