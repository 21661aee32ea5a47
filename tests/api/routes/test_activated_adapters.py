"""aLoRA over HTTP: a persona whose chats activate it, and what is refused."""

from pathlib import Path
from typing import Any

from peft_adapters import peft_adapter
from server import server

from adapter_store.formats.adapter_dir import open_adapter_dir
from api.client import Client

OPTIONS = {"quantization": "none", "dtype": "float32", "kernels": "auto"}
SYSTEM = "You keep a lighthouse on a cold coast where no ship passes by, and answer in one word."


def test_a_persona_of_an_alora(tiny_hf_checkpoints: Any, tmp_path: Path) -> None:
    """The chat template activates it; no other prompt finds its pages, though the base computes them."""
    model, folder = tiny_hf_checkpoints["llama"](), tmp_path / "alora"
    turn = {"role": "user", "content": "Who?"}
    asked = {"messages": [turn], "temperature": 0, "max_tokens": 4}
    with server(model, tmp_path / "store", **OPTIONS) as served, Client(served.url) as client:
        bare, whole = (
            served.post("/tokenize", messages=[turn], add_generation_prompt=ends).json()["tokens"]
            for ends in (False, True)
        )
        peft_adapter(model, folder, strength=0.5, target_modules=["q_proj"], alora_invocation_tokens=whole[len(bare) :])
        with open_adapter_dir(folder) as peft:
            client.upload(peft, "keeper", defaults={"system": SYSTEM})

        def ask(model: str, **fields: Any) -> tuple[str, int]:
            done = served.post("/v1/chat/completions", **asked | {"model": model} | fields).json()
            return done["choices"][0]["message"]["content"], done["usage"]["prompt_tokens_details"]["cached_tokens"]

        first, again = ask("keeper"), ask("keeper")
        assert first == (again[0], 0)
        assert again[1] >= 64
        base = ask(served.engine.model_name, messages=[{"role": "system", "content": SYSTEM}, turn])
        assert base[0] != first[0]
        assert base[1] == 0
        refused = served.post("/v1/chat/completions", model="keeper", **asked, add_generation_prompt=False)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        assert "<|im_start|>assistant" in refused.json()["error"]["message"]
        kept = served.post("/v1/adapters/keeper:snapshot")
        assert kept.status_code == 400
        assert "is an aLoRA" in kept.json()["error"]["message"]
