"""The language part of multimodal checkpoints: served as transformers and PEFT compute it for a text without images."""

import json
from pathlib import Path

import pytest
import torch
from hand_decoder import HandDecoder
from multimodal import LANGUAGE, WHOLE, multimodal_adapter, write_multimodal
from safetensors.torch import load_file, save_file

from adapter_store.errors import AdapterInvalid
from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.loader import open_checkpoint


@pytest.fixture(scope="module", params=WHOLE)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_multimodal(tmp_path_factory.mktemp(request.param), request.param)


def test_text_equals_transformers_and_peft(directory: Path, tmp_path: Path) -> None:
    oracle = multimodal_adapter(directory, tmp_path / "mia", LANGUAGE)
    served = HandDecoder(directory, {"mia": tmp_path / "mia"}, tmp_path / "store", "torch")
    ids = torch.randint(3, 384, (21,), generator=torch.Generator().manual_seed(7)).tolist()
    tables = tuple(range(6)), tuple(range(6, 12))
    served.logits([(name, ids[:-1], 0, table) for name, table in zip((None, "mia"), tables, strict=True)])
    got = served.logits([(name, ids[-1:], 20, table) for name, table in zip((None, "mia"), tables, strict=True)])
    with torch.inference_mode():
        adapted = oracle(torch.tensor([ids])).logits[0, -1]
        with oracle.disable_adapter():
            plain = oracle(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(got[0], plain, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got[1], adapted, rtol=1e-3, atol=1e-3)
    assert (adapted - plain).abs().max() > 0.1


def test_an_adapter_of_the_vision_tower_is_refused(directory: Path, tmp_path: Path) -> None:
    multimodal_adapter(directory, tmp_path / "sees", ["q_proj", "v_proj"])
    with pytest.raises(AdapterInvalid) as refused:
        HandDecoder(directory, {"sees": tmp_path / "sees"}, tmp_path / "store", "torch")
    assert {problem.code for problem in refused.value.problems} == {"unsupported_vision"}


def test_a_quantized_one_is_refused(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantized checkpoints of multimodal models"):
        open_checkpoint(str(tmp_path))


def test_tensors_with_names_of_a_model_without_vision_are_missing(directory: Path, tmp_path: Path) -> None:
    for file in directory.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    tensors = load_file(directory / "model.safetensors")
    own = {name.removeprefix("language_model."): t for name, t in tensors.items() if name.startswith("language_model.")}
    save_file(own, tmp_path / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"missing: language_model\.model\.embed_tokens\.weight, "):
        open_checkpoint(str(tmp_path))
