"""Families through the whole engine: greedy answers of transformers and PEFT, and what is refused before it starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.engine.factory import build
from lorasrv.errors import ConfigError, UnsupportedModel
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint
from lorasrv.sampling_params import SamplingParams

Tiny = dict[str, Callable[..., Path]]
LONGROPE = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}


def _config(**model: object) -> EngineConfig:
    options = {"quantization": "none", "dtype": "float32", "kernels": "torch"} | model
    return EngineConfig(model=ModelOptions(**options), memory=MemoryOptions(pool_bytes=8 << 20))


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen3", "gemma2", "phi3"))]
)
def test_greedy_answers_are_those_of_transformers(tiny_hf_checkpoints: Tiny, tmp_path: Path, family: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directory = tiny_hf_checkpoints[family]()
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = torch.randint(3, 384, (1, 30), generator=torch.Generator().manual_seed(3))

    def answer(model: torch.nn.Module) -> list[int]:
        """Without a cache, so that nothing but the forward pass is relied on."""
        ids = prompt
        with torch.no_grad():
            for _ in range(10):
                ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
        return ids[0, 30:].tolist()

    plain = answer(base)
    torch.manual_seed(1)
    lora = LoraConfig(r=6, lora_alpha=9, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(base, lora).eval()
    adapted.save_pretrained(tmp_path / "mia")
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    with LLM(str(directory), _config()) as llm:
        llm.add_adapter("mia", tmp_path / "mia")
        mine = llm.generate([prompt[0].tolist()] * 2, greedy, [None, "mia"])
        llm.engine.check_integrity()
    assert [a.token_ids for a in mine] == [plain, answer(adapted)]
    assert mine[0].token_ids != mine[1].token_ids


def test_longrope_past_the_original_context_is_refused_by_name(tiny_hf_checkpoints: Tiny) -> None:
    directory = tiny_hf_checkpoints["phi3"](rope_parameters=LONGROPE, original_max_position_embeddings=64)
    checkpoint = open_checkpoint(str(directory))
    with pytest.raises(ConfigError, match=r"65 is more than the 64 .*longrope is served within the original context"):
        build(checkpoint, _config(max_model_len=65), None)
    assert build(checkpoint, _config(), None).parts.max_model_len == 64
    checkpoint.close()


def test_a_tokenizer_is_refused_before_weights_are_loaded(
    tiny_hf_checkpoints: Tiny, write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tiny_hf_checkpoints["gemma3"](), tmp_path / "m.gguf", "F32")
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"spm!"))
    monkeypatch.delattr("lorasrv.engine.factory.load_weights")
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(UnsupportedModel, match=r"tokenizer model 'spm!' is not supported; known: gpt2 .*Hugging Face"):
        build(checkpoint, _config(), None)
    checkpoint.close()
