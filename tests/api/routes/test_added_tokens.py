"""An adapter with tokens of its own over HTTP: every route writes and reads texts with them, no other model does."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from answers import events
from peft_adapters import peft_adapter
from server import server
from whole_archives import rebuilt

from adapter_store.formats.adapter_dir import open_adapter_dir
from api.client import Client, Refused

TEXT = "a <mood>of zyxxy, <|sad|>"
OPTIONS = {"quantization": "none", "dtype": "float32", "kernels": "auto"}
LIKELY = {"temperature": 0, "ignore_eos": True, "max_tokens": 3, "logit_bias": {"385": 100}}


@pytest.fixture(scope="module")
def folder(tiny_hf_checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moods")
    peft_adapter(
        tiny_hf_checkpoints["llama"](),
        folder,
        target_modules=["q_proj"],
        added=["<mood>", "zyxxy"],
        special=["<|sad|>"],
    )
    return folder


@pytest.fixture(scope="module")
def served(tiny_hf_checkpoints: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Adapter `moods`, and `plain`, which is the same without its tokenizer."""
    model, store = tiny_hf_checkpoints["llama"](), tmp_path_factory.mktemp("served") / "store"
    with server(model, store, **OPTIONS) as served, Client(served.url) as client:
        plain = tmp_path_factory.mktemp("plain")
        peft_adapter(model, plain, target_modules=["q_proj"])
        for name, path in (("moods", folder), ("plain", plain)):
            with open_adapter_dir(path) as peft:
                served.reports = client.upload(client.with_tokenizer(peft), name)
        served.client, served.base, served.model = client, served.engine.model_name, model
        yield served


def ids(served: Any, model: str, text: str = TEXT) -> list[int]:
    return served.post("/tokenize", model=model, prompt=text).json()["tokens"]


def test_texts_become_its_tokens_and_come_back(served: SimpleNamespace, folder: Path) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert ids(served, "moods") == own
    assert {384, 385, 386} <= {*own}
    assert served.post("/detokenize", model="moods", tokens=own).json()["prompt"] == TEXT
    for other in ("plain", served.base):
        assert max(ids(served, other)) < 384
        refused = served.post("/detokenize", model=other, tokens=own)
        assert (refused.status_code, "[0, 384)" in refused.json()["error"]["message"]) == (400, True)
    told = served.post("/tokenize", model="moods", messages=[{"role": "user", "content": "<mood>"}]).json()["tokens"]
    assert 384 in told


def test_answers_are_written_with_them(served: SimpleNamespace) -> None:
    asked = {"model": "moods", "prompt": TEXT, **LIKELY, "logprobs": 2, "echo": True}
    answer = served.post("/v1/completions", **asked).json()
    [choice] = answer["choices"]
    assert choice["text"] == TEXT + "zyxxy" * 3
    assert choice["logprobs"]["tokens"][-3:] == ["zyxxy"] * 3
    assert answer["usage"]["prompt_tokens"] == len(ids(served, "moods"))
    chat = {"model": "moods", "messages": [{"role": "user", "content": "<mood>"}], **LIKELY}
    assert served.post("/v1/chat/completions", **chat).json()["choices"][0]["message"]["content"] == "zyxxy" * 3
    streamed = events(served.post("/v1/completions", **asked | {"stream": True, "echo": False, "logprobs": None}))
    assert "".join(event["choices"][0]["text"] for event in streamed if event["choices"]) == "zyxxy" * 3
    stopped = served.post("/v1/completions", **asked | {"stop": ["yxx"], "echo": False}).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("z", "stop", "yxx")
    ended = served.post("/v1/completions", **asked | {"stop_token_ids": [385], "echo": False}).json()["choices"][0]
    assert (ended["text"], ended["finish_reason"]) == ("", "stop")
    tgi = {"inputs": TEXT, "model": "moods", "parameters": {"max_new_tokens": 2, "decoder_input_details": True}}
    shown = served.post("/generate", **tgi).json()["details"]["prefill"]
    assert [(token["id"], token["text"]) for token in shown if token["id"] >= 384] == [
        (384, "<mood>"),
        (385, "zyxxy"),
        (386, "<|sad|>"),
    ]


def test_grammars_allow_them_as_text(served: SimpleNamespace) -> None:
    asked = {"prompt": TEXT, "temperature": 0, "max_tokens": 8, "structured_outputs": {"regex": "(zyxxy){2}"}}
    own = served.post("/v1/completions", model="moods", **asked, logit_bias={"385": 100}).json()
    assert (own["choices"][0]["text"], own["usage"]["completion_tokens"] <= 3) == ("zyxxyzyxxy", True)
    base = served.post("/v1/completions", model="plain", **asked).json()["usage"]["completion_tokens"]
    assert base > own["usage"]["completion_tokens"]


@pytest.mark.parametrize("model", ["plain", None])
def test_no_other_model_takes_or_says_them(served: SimpleNamespace, model: str | None) -> None:
    asked = {"model": model or served.base, "max_tokens": 2}
    for fields in (
        {"prompt": [5, 384]},
        {"prompt": "a", "logit_bias": {"384": 1}},
        {"prompt": "a", "stop_token_ids": [384]},
    ):
        refused = served.post("/v1/completions", **asked, **fields)
        assert (refused.status_code, "384" in refused.json()["error"]["message"]) == (400, True), fields
    assert served.post("/v1/completions", model="moods", prompt=[5, 386], max_tokens=2).status_code == 200
    assert served.post("/v1/completions", model="moods", prompt=[5, 387], max_tokens=2).status_code == 400


def test_what_is_not_possible_is_refused_by_name(served: SimpleNamespace) -> None:
    for path, fields, said in (
        (
            "/v1/completions",
            {"model": "moods", "prompt": "a", "on_cold": "fallback_base"},
            "other tokens than the base",
        ),
        ("/v1/completions", {"model": "moods+plain", "prompt": "a"}, "tokens of its own"),
        ("/v1/adapters/moods:verify", {}, "387 tokens"),
    ):
        refused = served.post(path, **fields)
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text


def test_uploads(served: SimpleNamespace, folder: Path) -> None:
    """Without its tokenizer an adapter is refused, and so is one that does not extend the base's."""
    client = served.client
    with open_adapter_dir(folder) as peft, pytest.raises(Refused) as refused:
        client.upload(peft, "zoe")
    assert "upload it with its tokenizer.json" in refused.value.problems[0]
    with open_adapter_dir(folder) as peft:
        own = client.with_tokenizer(peft)
        again = client.upload(own, "moods", defaults={"logit_bias": {"386": -5}, "system": "Be <mood>."})
        assert (again["version"], again["persona"]["prompt_tokens"] > 0) == (2, True)
        with pytest.raises(Refused, match=r"<\|sad\|>. is a special token"):
            client.upload(own, "moods", defaults={"system": "Be <|sad|>."})
        assert own.tokenizer is not None
        described = json.loads(own.tokenizer)
        described["model"]["merges"].pop()
        with pytest.raises(Refused) as refused:
            client.upload(replace(own, tokenizer=json.dumps(described).encode()), "zoe")
        assert "other merges" in refused.value.problems[0]
    assert not served.store.pending_uploads.has_uploaded("anonymous", hashlib.sha256(own.tokenizer).hexdigest())
    told = served.post(
        "/v1/adapters",
        id="x",
        config=config_of(folder) | {"added_tokens": [{"id": 384, "content": "x"}]},
        weights="0" * 64,
    )
    assert (told.status_code, told.json()["error"]["param"]) == (400, "config.added_tokens")
    told = served.post("/v1/adapters", id="x", defaults={"temperature": 0.5}, tokenizer="sha256:" + "0" * 64)
    assert (told.status_code, told.json()["error"]["param"]) == (400, "tokenizer")
    told = served.post(
        "/v1/adapters", id="x", config=config_of(folder), weights="0" * 64, tokenizer="sha256:" + "0" * 64
    )
    assert told.status_code == 404


def test_defaults_name_tokens_that_the_weights_have(
    tiny_hf_checkpoints: Any, cli: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    """Weights without the base's spare rows lack tokens that every request would otherwise be refused for."""
    model, wrong = tiny_hf_checkpoints["qwen2"](vocab_size=397), {"logit_bias": {"390": 5}, "stop_token_ids": [396]}
    peft_adapter(model, tmp_path / "short", target_modules=["q_proj"], spare=0)
    peft_adapter(model, tmp_path / "whole", target_modules=["q_proj"])
    with server(model, tmp_path / "store", **OPTIONS) as served, Client(served.url) as client:
        for name in ("short", "whole"):
            with open_adapter_dir(tmp_path / name) as peft:
                client.upload(peft, name)
                if name == "short":
                    with pytest.raises(Refused) as refused:
                        client.upload(peft, name, defaults=wrong)
        put = {name: served.http.put(f"/v1/adapters/{name}/defaults", json=wrong) for name in ("short", "whole")}
        assert (put["short"].status_code, put["whole"].status_code) == (422, 201)
        for told in (refused.value.problems, [str(each) for each in put["short"].json()["error"]["details"]]):
            assert all(field in one and "[0, 384)" in one for field, one in zip(wrong, told, strict=True))
        for name in ("short", "whole"):
            assert served.post("/v1/completions", model=name, prompt="a", max_tokens=1).status_code == 200
    tar, new = tmp_path / "a.tar", ("--store", tmp_path / "new")
    assert cli("store", "export", tar, "--store", tmp_path / "store").code == 0

    def altered(manifest: dict[str, Any]) -> None:
        manifest["adapters"]["short"]["versions"]["1"]["defaults"] = wrong

    tar.write_bytes(rebuilt(tar.read_bytes(), altered))
    done = cli("store", "import", tar, *new, "--model", model)
    assert (done.code, "short@1: adapter refused, 2 problems" in done.err) == (1, True), done.err
    assert all(f"{field} must" in done.err for field in wrong), done.err
    assert "whole@" not in done.err


def test_the_command_takes_the_tokenizer_or_leaves_it_out(
    served: SimpleNamespace, folder: Path, cli: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    """Rows without names are refused, and so are names without rows; an adapter with neither is served."""
    to = ("--server", served.url)
    done = cli("upload", folder, "--id", "typed", *to)
    assert (done.code, "tokenizer.json" in done.err) == (0, False), done.err
    assert ids(served, "typed") == ids(served, "moods")
    refused = cli("upload", folder, "--id", "bare", "--no-tokenizer", *to)
    assert (refused.code, "upload it with its tokenizer.json" in refused.err) == (1, True), refused.err
    peft_adapter(served.model, tmp_path, target_modules=["q_proj"])
    shutil.copy(folder / "tokenizer.json", tmp_path)
    refused = cli("upload", tmp_path, "--id", "bare", *to)
    assert (refused.code, "names token 384, but there are rows of 384 tokens" in refused.err) == (1, True), refused.err
    done = cli("upload", tmp_path, "--id", "bare", "--no-tokenizer", *to)
    assert (done.code, "not used: " in done.err) == (0, True)
    assert max(ids(served, "bare")) < 384
    here = ("check", tmp_path, "--model", served.model)
    assert "names token 384" in cli(*here).err
    assert cli(*here, "--no-tokenizer").code == 0

    tree = tmp_path / "tree"
    (tree / "some").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        shutil.copy(tmp_path / name, tree / "some")
    for where in (to, ("--dry-run", "--model", served.model)):
        refused = cli("upload", tree, "--all", *where)
        assert (refused.code, "names token 384" in refused.out + refused.err) == (1, True), refused.err
        done = cli("upload", tree, "--all", "--no-tokenizer", *where)
        assert done.code == 0, done.err
    assert max(ids(served, "some")) < 384


def test_pages_are_shared_by_content(served: SimpleNamespace, folder: Path) -> None:
    """A prompt with added tokens is computed once; the same ids of the same rows with other names are other pages."""
    prompt = [384, 5, 386, *range(20, 60), 385]

    def ask(model: str) -> tuple[str, int]:
        answer = served.post("/v1/completions", model=model, prompt=prompt, **LIKELY | {"logit_bias": {}}).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, again = ask("moods"), ask("moods")
    assert first == (again[0], 0)
    assert again[1] == 32
    with open_adapter_dir(folder) as peft:
        own = served.client.with_tokenizer(peft)
        renamed = replace(own, tokenizer=own.tokenizer.replace(b"zyxxy", b"other"))
        served.client.upload(renamed, "renamed")
    assert ask("renamed")[1] == 0
    assert max(ids(served, "renamed", "a zyxxy")) < 384
    assert 385 in ids(served, "renamed", "an other")


def test_tokens_that_do_not_fit_are_refused_when_they_are_asked_for(served: SimpleNamespace, folder: Path) -> None:
    """A store may be imported with tokens of a base with another tokenizer; the server goes on."""
    wrong = config_of(folder) | {"added_tokens": [{"id": 386, "content": "a gap before it"}]}
    served.store.register("wrong", wrong, served.store.add_blob(folder / "adapter_model.safetensors"))
    for path, asked in (("/v1/completions", {"max_tokens": 1}), ("/tokenize", {})):
        refused = served.post(path, model="wrong", prompt="a", **asked)
        assert refused.status_code == 422, refused.text
        assert "cannot be token 386" in refused.json()["error"]["message"]
    assert served.post("/v1/completions", model="moods", prompt="a", max_tokens=1).status_code == 200


def test_a_snapshot_of_a_prompt_with_them_outlives_the_server(
    tiny_hf_checkpoints: Any, folder: Path, tmp_path: Path
) -> None:
    """Answers are the same, whether it is restored or computing is faster."""
    system = "You are <mood>, and keep a lighthouse of zyxxy on a cold coast where no ship passes by."
    said = []
    for _ in range(2):
        with server(tiny_hf_checkpoints["llama"](), tmp_path, **OPTIONS) as served, Client(served.url) as client:
            if not said:
                with open_adapter_dir(folder) as peft:
                    client.upload(client.with_tokenizer(peft), "moods", defaults={"system": system, **LIKELY})
                told = served.post("/v1/adapters/moods:snapshot").json()
                assert 384 in ids(served, "moods", system)[: told["tokens"]]
            shown = served.http.get("/v1/adapters/moods").json()["persona"]
            assert shown["snapshot"] == {"tokens": told["tokens"], "bytes": told["bytes"]}
            asked = {"model": "moods", "messages": [{"role": "user", "content": "Who?"}]}
            said.append(served.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"])
    assert said == ["zyxxy" * 3] * 2


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())
