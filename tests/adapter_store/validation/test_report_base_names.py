"""Which names of bases are the same model, and which the same quantization of it."""

import pytest

from adapter_store.validation.report import MAX_CHARS, BaseName, base_warnings

SAME, QUANTIZATION, NAME = "", "another quantization", "check that it is the same base"


@pytest.mark.parametrize(
    ("trained_on", "served", "says"),
    [
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B", SAME),
        ("meta-llama/Llama-3.2-1B", "llama_3.2_1b-F16", SAME),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b.Q4_K_M", SAME),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1", SAME),
        ("/data/SmolLM2-135M-Instruct/", "SmolLM2-135M-Instruct-UD-IQ2_XXS", SAME),
        ("C:\\models\\mia", "mia", SAME),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen2.5-7B-Instruct-GPTQ-Int8", SAME),
        ("", "Llama-3.2-1B", SAME),
        ("Llama-3.2-1B", "", SAME),
        ("unsloth/Llama-3.2-1B-unsloth-bnb-4bit", "Llama-3.2-1B", QUANTIZATION),
        ("unsloth/Llama-3.2-1B-bnb-4bit", "Llama-3.2-1B.Q4_0", QUANTIZATION),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen2.5-7B-Instruct", QUANTIZATION),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen2.5-7B-Instruct-GPTQ-Int8", QUANTIZATION),
        ("mlx-community/Llama-3.2-1B-4bit", "Llama-3.2-1B", QUANTIZATION),
        ("x/Llama-3.1-8B-quantized.w4a16", "Llama-3.1-8B-FP8-dynamic", QUANTIZATION),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B-Instruct", NAME),
        ("meta-llama/Llama-3.2-1B-Instruct", "Llama-3.2-1B", NAME),
        ("meta-llama/Llama-3.2-1B-Instruct-bnb-4bit", "Llama-3.2-1B-bnb-4bit", NAME),
        ("meta-llama/Llama-3.2-11B", "Llama-3.2-1B", NAME),
        ("Llama-3-70B", "tiny-llama", NAME),
    ],
)
def test_names(trained_on: str, served: str, says: str) -> None:
    warnings = base_warnings(trained_on, served)
    assert len(warnings) == bool(says)
    assert says in "".join(warnings)


@pytest.mark.parametrize("text", ["-4bit" * 200_000, "-" * 1_000_000, "q4_k" * 250_000, "-q4" + "_k" * 500_000])
def test_of_a_long_name_little_is_read(text: str) -> None:
    name = BaseName.of(text)
    assert len(name.model) + len("".join(name.quantization)) <= MAX_CHARS
    assert len("".join(base_warnings(text, "tiny-llama"))) < 400
