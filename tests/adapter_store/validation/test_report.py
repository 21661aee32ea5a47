"""Reports of uploads: names, warnings, and what older reports lack."""

import io
from dataclasses import replace

import pytest
import torch
from store_kit import BASE, Q0, build, check, warnings

from adapter_store.validation.report import MAX_CHARS, BaseName, base_warnings
from adapter_store.validation.validate import check_adapter

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


def test_warnings() -> None:
    data = build.file()
    untrained = {n: t * ("lora_A" in n) for n, t in build.tensors().items()}
    assert "untrained" in warnings(check(build.config(), build.file(untrained)))
    assert "untrained" in warnings(check(build.config(lora_alpha=0), data))
    untrained[f"{Q0}.lora_B.weight"] = torch.ones(32, 4)
    assert "3 of 4 modules" in warnings(check(build.config(), build.file(untrained)))
    other = check(build.config(base_model_name_or_path="/home/someone/secret/Llama-3-70B/"), data)
    assert "trained on 'Llama-3-70B'" in warnings(other)
    assert "secret" not in warnings(other)
    assert warnings(check(build.config(base_model_name_or_path="acme/Tiny_Llama-hf"), data)) == ""
    assert "another quantization" in warnings(
        check(build.config(base_model_name_or_path="a/Tiny_Llama-bnb-4bit"), data)
    )


def test_the_base_is_known_by_its_file_not_by_what_clients_call_it() -> None:
    data = build.file()
    called_chat = replace(BASE, name="chat", checkpoint="Tiny-Llama.Q4_K_M")
    checked = check_adapter(build.config(), io.BytesIO(data), len(data), called_chat, 16)
    assert warnings(checked) == ""


def test_a_report_from_before_there_was_a_norm() -> None:
    report = check(build.config(), build.file()).report
    old = {name: value for name, value in report.to_dict().items() if name not in ("norm_b", "notices")}
    assert type(report).from_dict(old) == replace(report, norm_b=None)


def test_mixed_types_are_accepted_with_a_warning() -> None:
    tensors = build.tensors(dtype=torch.bfloat16)
    tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].half()
    checked = check(build.config(), build.file(tensors))
    assert checked.spec.dtype == "F32"
    assert "BF16 and F16" in warnings(checked)
