"""What clients too heavy for tests send, as they send it, and what they read of the answers: data/clients/*.json.

Each file says whose bodies these are, of which version, and where in its source they are made. `$BASE` and `$ADAPTER`
stand for names that the server has. A request's `read_as` names the function below that reads as its client does.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from answers import events
from fake_engine import say
from server import server

FOLDER = Path(__file__).parents[1] / "data" / "clients"
RECORDED = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))}
REQUESTS = {f"{name}: {one['what']}": one for name, recorded in RECORDED.items() for one in recorded["requests"]}
NAMES = {"$BASE": "tiny", "$ADAPTER": "mia"}


@pytest.fixture(scope="module")
def served(model, adapter_dirs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("recorded") / "store"
    with server(model, folder, {"mia": adapter_dirs["two"]}, served_model_name="tiny") as served:
        yield served


def ask(served: SimpleNamespace, request: dict[str, Any]) -> httpx2.Response:
    body = request.get("body")
    if body is not None and body.get("model") in NAMES:
        body = {**body, "model": NAMES[body["model"]]}
    sent = {} if body is None else {"json": body}
    return served.http.request(request["method"], request["path"], headers=request.get("headers", {}), **sent)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_answered_as_its_client_reads(served, name: str) -> None:
    assert all(RECORDED[name.partition(":")[0]][field] for field in ("client", "version", "source"))
    request = REQUESTS[name]
    READERS[request["read_as"]](ask(served, request), request.get("body"))


def test_the_adapter_answers(served) -> None:
    """Greedy bodies differ between base and adapter; no recorded request is answered by the base."""
    compared = 0
    for name, request in REQUESTS.items():
        body = request.get("body") or {}
        greedy = body.get("temperature") == 0 and body.get("model") == "$ADAPTER"
        if (
            greedy
            and not body.get("stream")
            and not body.get("echo")
            and request["read_as"] not in ("refused", "structured")
        ):
            answers = [ask(served, {**request, "body": {**body, "model": model}}).json() for model in NAMES]
            texts = [[c["text"] if "text" in c else c["message"]["content"] for c in a["choices"]] for a in answers]
            assert texts[0] != texts[1], name
            compared += 1
    assert compared >= 4


def test_the_load_script_reads_texts_with_unicode_s_ends_of_lines(server, engine) -> None:
    [body] = [r["body"] for r in RECORDED["load-script"]["requests"] if r["body"]["model"] == "$BASE"]
    engine.script = say("a\u2028b\u2029c\u0085d")
    load_script(server.http.post("/v1/completions", json={**body, "model": "tiny-base"}), body)


def _ok(answer: httpx2.Response) -> Any:
    assert answer.status_code == 200, answer.text[:500]
    return answer.json()


def status(answer: httpx2.Response, _: Any) -> None:
    assert answer.status_code == 200


def first_model(answer: httpx2.Response, _: Any) -> None:
    assert _ok(answer)["data"][0]["id"] == "tiny"


def listed(answer: httpx2.Response, _: Any) -> None:
    assert [card["id"] for card in _ok(answer)["data"]] == ["tiny", "mia"]


def guidellm(answer: httpx2.Response, body: dict[str, Any]) -> None:
    """Text of the first choice, usage in any chunk, the id; counts what it asked for."""
    told = events(answer)
    assert all(event["id"] == told[0]["id"] for event in told)
    text = "".join((c.get("text") or c.get("delta", {}).get("content") or "") for e in told for c in e["choices"][:1])
    usages = [event["usage"] for event in told if event.get("usage")]
    assert text
    assert len(usages) == len(told)
    assert usages[-1]["completion_tokens"] == body.get("max_tokens", body.get("max_completion_tokens"))
    assert usages[-1]["prompt_tokens"] > 0


def vllm_bench(answer: httpx2.Response, body: dict[str, Any]) -> None:
    """Usage only of a chunk without choices; a first chunk with one; `delta` in every chunk of a chat."""
    wanted = body.get("max_tokens", body.get("max_completion_tokens"))
    seen, tokens = 0, None
    for event in events(answer):
        if choices := event.get("choices"):
            seen += 1
            if "messages" in body:
                choices[0]["delta"].get("content")
            else:
                assert "text" in choices[0]
        elif usage := event.get("usage"):
            tokens = usage["completion_tokens"]
            assert usage["prompt_tokens"] > 0
    assert seen
    assert tokens == wanted if body.get("ignore_eos") else tokens


def load_script(answer: httpx2.Response, body: dict[str, Any]) -> None:
    """httpx's lines, whatever ends them, each of them JSON; text in a choice, usage in any chunk."""
    assert answer.status_code == 200, answer.text[:500]
    tokens, chunks = 0, 0
    for line in answer.iter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        event = json.loads(line[5:])
        assert not event.get("error")
        if event.get("usage"):
            tokens = event["usage"].get("completion_tokens", 0)
        chunks += bool(event.get("choices") and event["choices"][0].get("text"))
    assert tokens == body["max_tokens"]
    assert chunks


def inference_perf(answer: httpx2.Response, body: dict[str, Any]) -> None:
    """As for vLLM; its parser takes the last usage and survives a chunk without choices."""
    usage = [event["usage"] for event in events(answer) if event.get("usage")][-1]
    assert usage["completion_tokens"] == body["max_tokens"]


def text(answer: httpx2.Response, body: dict[str, Any]) -> None:
    choices = _ok(answer)["choices"]
    assert len(choices) == body.get("n", 1)
    assert all(isinstance(choice["text"], str) for choice in choices)
    if body.get("logprobs"):
        told = choices[0]["logprobs"]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) > 0


def text_stream(answer: httpx2.Response, _: Any) -> None:
    assert all(isinstance(choice["text"], str) for event in events(answer) for choice in event["choices"])


def chat(answer: httpx2.Response, _: Any) -> None:
    told = _ok(answer)
    assert isinstance(told["choices"][0]["message"]["content"], str)
    assert told["usage"]["completion_tokens"] > 0


def chat_stream(answer: httpx2.Response, body: dict[str, Any]) -> None:
    told = events(answer)
    assert told[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(len(event["choices"]) <= 1 for event in told)
    assert ("usage" in told[-1] and told[-1]["choices"] == []) == bool(body.get("stream_options"))


def structured(answer: httpx2.Response, _: Any) -> None:
    assert set(json.loads(_ok(answer)["choices"][0]["message"]["content"])) == {"at"}


def lm_eval_loglikelihood(answer: httpx2.Response, body: dict[str, Any]) -> None:
    """Sums from the context's end to the last but one, and compares with the best: the same float in both places."""
    choices = sorted(_ok(answer)["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(body["prompt"])
    for choice, prompt in zip(choices, body["prompt"], strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(prompt) + 1
        assert told["token_logprobs"][0] is None
        for own, best in zip(told["token_logprobs"][1:-1], told["top_logprobs"][1:-1], strict=True):
            assert own <= 0
            assert own in best.values() or own < max(best.values())
        # The token that it generated is greedy.
        assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())


def lm_eval_generate(answer: httpx2.Response, body: dict[str, Any]) -> None:
    choices = _ok(answer)["choices"]
    assert sorted(choice["index"] for choice in choices) == list(range(len(body["prompt"])))
    assert not any(stop in choice["text"] for choice in choices for stop in body["stop"])


def tokenizer_info(answer: httpx2.Response, _: Any) -> None:
    told = _ok(answer)
    assert told["eos_token"] == "<|im_end|>"
    assert {"bos_token", "pad_token", "chat_template"} <= told.keys()


def tokens(answer: httpx2.Response, _: Any) -> None:
    assert _ok(answer)["tokens"]


def detokenized(answer: httpx2.Response, _: Any) -> None:
    assert isinstance(_ok(answer)["prompt"], str)


def refused(answer: httpx2.Response, _: Any) -> None:
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


READERS = {
    reader.__name__: reader
    for reader in (
        *(status, first_model, listed, guidellm, vllm_bench, load_script, inference_perf, text, text_stream, chat),
        *(
            chat_stream,
            structured,
            lm_eval_loglikelihood,
            lm_eval_generate,
            tokenizer_info,
            tokens,
            detokenized,
            refused,
        ),
    )
}
