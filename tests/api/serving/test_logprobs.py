"""Probabilities, echoed prompts and several prompts over HTTP: a tiny model in a real server beside transformers."""

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from answers import events
from server import server
from spelled_engine import tiny_tokenizer
from tiny_tokenizers import sentencepiece

from api.serving import logprobs as logprobs_module
from api.serving.logprobs import LogprobsFormatter, PlacedToken, PromptEcho, ShownTokens
from lorasrv.outputs import FinishReason, RequestId, RequestOutput, RequestTiming, TokenLogprobs

CLOSE = 2e-4
TEXT = "The blue 🦜 says Grüße."


@pytest.fixture(scope="module")
def served(model, adapter_dirs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server of the tiny llama in float32 with adapter `two`; `post(path, body)` returns what came of it."""
    folder, kind = tmp_path_factory.mktemp("served"), {"quantization": "none", "dtype": "float32", "kernels": "auto"}
    kind["speculation"] = "off"  # log-probabilities are compared to the bit
    with server(model, folder / "store", {"two": adapter_dirs["two"]}, **kind) as served:

        def post(path: str = "completions", **body: Any) -> Any:
            body["model"] = body.get("model") or served.engine.model_name
            body = {"temperature": 0, "ignore_eos": True, "max_tokens": 5} | body
            answer = served.http.post(f"/v1/{path}", json=body)
            if body.get("stream"):
                return events(answer)
            return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])

        served.post, served.tokenizer = post, served.engine.tokenizer
        yield served


@pytest.fixture(scope="module")
def oracle(model, adapter_dirs) -> Any:
    """oracle(ids, with adapter): log-softmax [T, V] in float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model).eval()
    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter_dirs["two"]).eval()

    def logprobs(ids: list[int], adapter: bool) -> torch.Tensor:
        with torch.inference_mode():
            return (tuned if adapter else base)(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


def _merged(chunks: list[dict[str, Any]], name: str, index: int = 0) -> list[Any]:
    """A list of `logprobs`, from all chunks of a choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [one for choice in choices for one in (choice["logprobs"] or {}).get(name, [])]


@pytest.mark.parametrize("adapter", [None, "two"])
def test_chat(served, oracle, adapter) -> None:
    messages = [{"role": "user", "content": TEXT}]
    body = {"model": adapter, "messages": messages, "logprobs": True, "top_logprobs": 4, "max_tokens": 12}
    [choice] = served.post("chat/completions", **body)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    spelled = bytes(byte for one in content for byte in one["bytes"])
    assert spelled.decode("utf-8", "replace") == choice["message"]["content"]
    ids = served.engine.chat_template.encode(messages, served.tokenizer)
    for one in content:
        row = oracle(ids, adapter is not None)[-1]
        best = row.argmax().item()
        assert abs(one["logprob"] - float(row[best])) < CLOSE
        assert [top["logprob"] for top in one["top_logprobs"]] == pytest.approx(row.topk(4).values.tolist(), abs=CLOSE)
        assert one["logprob"] == one["top_logprobs"][0]["logprob"], "the same float in both places"
        assert one["token"] == one["top_logprobs"][0]["token"]
        ids.append(best)
    chunks = served.post("chat/completions", **body, stream=True)
    # The prompt's pages are found this time: other shapes of products, other last bits.
    streamed = _merged(chunks, "content")
    assert [one["token"] for one in streamed] == [one["token"] for one in content]
    assert [one["logprob"] for one in streamed] == pytest.approx([one["logprob"] for one in content], abs=CLOSE)
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert not choice["logprobs"] or choice["delta"].get("content") or choice["finish_reason"]


@pytest.mark.parametrize("adapter", [None, "two"])
def test_lm_eval(served, oracle, adapter) -> None:
    """Its way to score answers: token ids of context and answer, one more token, and a greedy check on equal floats."""
    contexts = [[5, 9, 33, 40], [70, 71, 72, 73, 74, 75, 76]]
    ids, answers = [], []
    for context in contexts:
        greedy = list(context)
        for _ in range(6):
            greedy.append(int(oracle(greedy, adapter is not None)[-1].argmax()))
        ids += [greedy, [*context, 90, 91, 92, 93, 94, 95]]
        answers += [True, False]
    body = {"model": adapter, "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1234}
    answer = served.post(**body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, prompt, greedy in zip(answer["choices"], ids, answers, strict=True):
        told, length = choice["logprobs"], len(prompt) - 6
        assert len(told["token_logprobs"]) == len(prompt) + 1
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        rows = oracle(prompt, adapter is not None)
        want = [float(rows[i - 1, prompt[i]]) for i in range(length, len(prompt))]
        scores, tops = told["token_logprobs"][length:-1], told["top_logprobs"][length:-1]
        assert scores == pytest.approx(want, abs=CLOSE)
        is_greedy = all(score == max(top.values()) for score, top in zip(scores, tops, strict=True))
        assert is_greedy is greedy
        assert choice["text"].startswith(served.tokenizer.decode(prompt[:3], skip_special_tokens=False))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 4
    nothing = served.post(**{**body, "max_tokens": 0})
    assert nothing["usage"]["completion_tokens"] == 0
    for choice, more in zip(nothing["choices"], answer["choices"], strict=True):
        # Another request shares its steps with other rows: sums may differ in their last bits.
        again, first = choice["logprobs"]["token_logprobs"], more["logprobs"]["token_logprobs"][:-1]
        assert again[0] is first[0] is None
        assert again[1:] == pytest.approx(first[1:], abs=CLOSE)
        assert choice["text"] == more["text"][: len(choice["text"])]
        assert choice["finish_reason"] == "length"


def test_offsets_point_at_the_text(served) -> None:
    body = {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 6}
    [choice] = served.post(**body)["choices"]
    told, text = choice["logprobs"], choice["text"]
    assert text.startswith(TEXT)
    assert len(told["tokens"]) == len(told["text_offset"]) == len(served.tokenizer.encode(TEXT)) + 6
    for token, first, last in zip(told["tokens"], told["text_offset"], [*told["text_offset"][1:], None], strict=True):
        # Bytes that never become a character are known for such when the next token comes.
        assert token == text[first:last].lstrip("\ufffd") or token.startswith("bytes:"), "but for parts of characters"
    raw = [token.removeprefix("bytes:") for token in told["tokens"] if token.startswith("bytes:")]
    assert any(part.startswith("\\xf0") for part in raw), "the parrot takes several tokens"
    chunks = served.post(**body, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    for name in told:
        assert _merged(chunks, name) == told[name]


def test_offsets_of_an_echo_behind_letters_of_several_tokens() -> None:
    tokenizer = sentencepiece("a.", strips=False)
    ids = [tokenizer.token_id(token) for token in ("<0xC3>", "<0xA9>", "<0xC3>", "<0xA9>", "a", ".")]
    assert PromptEcho.of([token for token in ids if token is not None], tokenizer).offsets == [0, 0, 1, 1, 2, 3]


def test_an_answer_that_its_stop_string_removes(served) -> None:
    """What was asked for is there, though it is empty."""
    [plain] = served.post(prompt=TEXT)["choices"]
    [choice] = served.post(prompt=TEXT, logprobs=1, stop=[plain["text"][0]])["choices"]
    empty: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert (choice["text"], choice["logprobs"]) == ("", empty)


def test_echo_alone(served) -> None:
    [choice] = served.post(prompt=TEXT, echo=True)["choices"]
    [plain] = served.post(prompt=TEXT)["choices"]
    assert choice["text"] == TEXT + plain["text"]
    assert choice["logprobs"] is None
    [nothing] = served.post(prompt=TEXT, echo=True, max_tokens=0)["choices"]
    assert nothing["text"] == TEXT


def _generated(served: Any) -> dict[str, Any]:
    """Return every figure of generated tokens that operators see, the ledger's included."""
    lines = served.http.get("/metrics").text.splitlines()
    found = dict(
        line.rsplit(" ", 1) for line in lines if re.match(r"[a-z:_]*generat[a-z_]*(_total|_sum|_count)\b", line)
    )
    assert "lorasrv_generated_tokens_total" in found
    return found | {"ledger": served.http.get("/v1/adapters/two/stats").json()["generated_tokens"]}


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"best_of": 2}, {"logprobs": 1}, {"use_beam_search": True, "n": 2}])
def test_a_prompt_alone_generates_nothing(served, more: dict[str, Any]) -> None:
    served.post(prompt=TEXT, model="two")
    before = _generated(served)
    answer = served.post(prompt=TEXT, model="two", echo=True, max_tokens=0, **more)
    assert (answer["usage"]["completion_tokens"], {one["text"] for one in answer["choices"]}) == (0, {TEXT})
    assert {one["finish_reason"] for one in answer["choices"]} == {"length"}
    assert _generated(served) == before


def test_tokens_of_a_stop_string_are_not_shown(served) -> None:
    body: dict[str, Any] = {"prompt": "hello", "logprobs": 0, "max_tokens": 16}
    [plain] = served.post(**body)["choices"]
    # A stop string of three whole tokens that has not come before.
    pieces, offsets = plain["logprobs"]["tokens"], plain["logprobs"]["text_offset"]
    windows = ((i, "".join(pieces[i : i + 3])) for i in range(2, 14))
    stop = next(text for i, text in windows if "bytes:" not in text and plain["text"].find(text) == offsets[i])
    body["stop"] = stop
    [cut] = served.post(**body)["choices"]
    assert cut["finish_reason"] == "stop"
    shown = len(cut["logprobs"]["tokens"])
    assert cut["logprobs"] == {name: values[:shown] for name, values in plain["logprobs"].items()}
    assert cut["logprobs"]["text_offset"][-1] < len(cut["text"])
    assert plain["logprobs"]["text_offset"][shown] >= len(cut["text"])
    chunks = served.post(**body, stream=True)
    assert _merged(chunks, "tokens") == cut["logprobs"]["tokens"]


def test_several_prompts_and_choices(served) -> None:
    body = {"temperature": 1.2, "seed": 3, "n": 2, "logprobs": 1}
    prompts = [TEXT, "two", "three three"]
    together = served.post(prompt=prompts, **body)
    alone = [served.post(prompt=prompt, **body) for prompt in prompts]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3, 4, 5]
    singles = [choice for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in together["choices"]] == [choice["text"] for choice in singles]
    assert len({choice["text"] for choice in singles}) > 3
    assert together["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert together["usage"]["completion_tokens"] == 6 * 5
    chunks = served.post(prompt=prompts, **body, stream=True, stream_options={"include_usage": True})
    for index, choice in enumerate(together["choices"]):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in own) == choice["text"]
    assert chunks[-1]["usage"]["prompt_tokens"] == together["usage"]["prompt_tokens"]


def test_the_best_of_several_by_mean_logprob(served) -> None:
    body = {"prompt": [TEXT, "two"], "temperature": 1.5, "seed": 9}
    every = served.post(**body, n=5, logprobs=0)["choices"]
    best = served.post(**body, n=2, best_of=5)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    for prompt in range(2):
        tried = every[5 * prompt : 5 * prompt + 5]
        tried.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        got = best["choices"][2 * prompt : 2 * prompt + 2]
        assert [choice["text"] for choice in got] == [choice["text"] for choice in tried[:2]]
        assert all(choice["logprobs"] is None for choice in got)
    assert best["usage"]["completion_tokens"] == 2 * 5 * 5


def test_beam_search(served) -> None:
    body = {"prompt": [TEXT, "two"], "model": "two", "use_beam_search": True, "max_tokens": 8}
    wide = served.post(**body, n=4)["choices"]
    best = served.post(**body, n=2, best_of=4, length_penalty=1, early_stopping=False)["choices"]
    assert [choice["index"] for choice in wide] == list(range(8))
    assert [choice["text"] for choice in best] == [wide[i]["text"] for i in (0, 1, 4, 5)]
    assert len({choice["text"] for choice in wide}) > 6
    scored = served.post(prompt=TEXT, model="two", max_tokens=8, logprobs=0)["choices"][0]
    assert scored["text"] in {choice["text"] for choice in wide} or wide[0]["text"] != scored["text"]
    messages = [{"role": "user", "content": "hi"}]
    chat = served.post("chat/completions", messages=messages, use_beam_search=True, n=3)
    assert len(chat["choices"]) == 3


def test_the_command_asks_whole_for_what_is_not_streamed(cli, served) -> None:
    command = ("generate", "hi", "--adapter", "two", "--server", served.url, "--max-tokens", 8, "--field")
    messages, beam = [{"role": "user", "content": "hi"}], {"use_beam_search": True, "n": 2}
    wanted = served.post("chat/completions", model="two", messages=messages, max_tokens=8, **beam)["choices"]
    told = cli(*command, "use_beam_search=true", "--n", 2, "--json")
    assert told.code == 0, told.err
    assert [one["text"] for one in json.loads(told.out)["choices"]] == [one["message"]["content"] for one in wanted]
    assert json.loads(told.out)["usage"]["completion_tokens"] > 0
    best = cli(*command, "best_of=3", "--temperature", 1, "--seed", 1)
    assert (best.code, len(best.out) > 1) == (0, True), best.err


def test_the_command_asks_a_base_without_chat_template(cli, served, monkeypatch) -> None:
    monkeypatch.setattr(served.engine, "chat_template", None)
    command = ("generate", TEXT, "--adapter", "two", "--server", served.url, "--max-tokens", 4, "--temperature", 0)
    refused = cli(*command)
    assert (refused.code, "generate --raw" in refused.err) == (1, True)
    [wanted] = served.post(prompt=TEXT, model="two", max_tokens=4, temperature=0, logprobs=2)["choices"]
    assert cli(*command, "--raw").out == wanted["text"] + "\n"
    told = json.loads(cli(*command, "--raw", "--logprobs", 2, "--json").out)
    [entries] = [one["logprobs"] for one in told["choices"]]
    assert [one["token"] for one in entries] == wanted["logprobs"]["tokens"]
    close = partial(pytest.approx, abs=CLOSE)  # the prompt may be cached by now: no bits are promised without codes
    assert [one["logprob"] for one in entries] == close(wanted["logprobs"]["token_logprobs"])
    best = {one["token"]: one["logprob"] for one in entries[0]["top_logprobs"]}
    assert best == close(wanted["logprobs"]["top_logprobs"][0])
    assert cli(*command, "--raw", "--system", "Be kind").code == 2


def test_prompt_logprobs_by_token_id(served, oracle) -> None:
    ids = [5, 9, 33, 40, 41]
    [choice] = served.post(prompt=ids, prompt_logprobs=2)["choices"]
    told, rows = choice["prompt_logprobs"], oracle(ids, False)
    assert told[0] is None
    assert choice["logprobs"] is None
    for i, one in enumerate(told[1:]):
        assert abs(one[str(ids[i + 1])]["logprob"] - float(rows[i, ids[i + 1]])) < CLOSE
        ranked = sorted((entry["rank"], token) for token, entry in one.items() if entry["rank"])
        assert [int(token) for _, token in ranked] == rows[i].topk(2).indices.tolist()


def test_a_chats_prompt_logprobs_are_beside_its_choices(served) -> None:
    """As vLLM's: a chat has one prompt, a completion one for each of its choices."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "prompt_logprobs": 0, "return_token_ids": True}
    chat = served.post("chat/completions", **asked)
    ids = chat["prompt_token_ids"]
    assert [next(iter(one)) for one in chat["prompt_logprobs"][1:]] == [str(token) for token in ids[1:]]
    assert not any("prompt" in name for choice in chat["choices"] for name in choice)
    plain = served.post(prompt=ids, n=2, prompt_logprobs=0)
    assert [choice["prompt_logprobs"] for choice in plain["choices"]] == [chat["prompt_logprobs"]] * 2


def test_openai_python_reads_both_shapes(served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", timeout=30) as client:
        messages = [{"role": "user", "content": "hi"}]
        more = {"max_tokens": 3, "extra_body": {"ignore_eos": True}}
        chat = client.chat.completions.create(model="two", messages=messages, logprobs=True, top_logprobs=20, **more)
        assert [len(one.top_logprobs) for one in chat.choices[0].logprobs.content] == [20] * 3
        plain = client.completions.create(model="two", prompt="hi", logprobs=5, max_tokens=3, echo=True)
        assert plain.choices[0].logprobs.text_offset[0] == 0
        chunks = client.completions.create(model="two", prompt=["a", "b"], logprobs=1, max_tokens=3, stream=True)
        assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


def test_one_refused_prompt_refuses_all(server, engine) -> None:
    response = server.complete(["fine", "x" * 600, "never asked"])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert [bytes(added.prompt) for added in engine.added] == [b"fine"]
    assert engine.aborted == [f"{engine.added[0].id}#0"]


class TestShownTokens:
    def test_a_token_waits_for_text_behind_its_beginning(self) -> None:
        shown = ShownTokens(shift=10)
        assert self._take(shown, "", 1, 0) == []
        assert self._take(shown, "", 2, 0) == []
        assert self._take(shown, "🦜", 3, 0) == [(1, 10), (2, 10), (3, 10)]
        assert self._take(shown, "", 4, 1) == []
        assert self._take(shown, "", 5, 3, finish_reason=FinishReason.LENGTH) == [(4, 11), (5, 13)]

    def test_what_was_cut_off_never_comes(self) -> None:
        shown = ShownTokens()
        assert self._take(shown, "ab", 1, 0) == [(1, 0)]
        assert self._take(shown, "", 2, 2) == []
        assert self._take(shown, "c", 3, 4, finish_reason=FinishReason.STOP, stop_reason="d") == [(2, 2)]

    @staticmethod
    def _take(shown: ShownTokens, text: str, token: int, offset: int, **end: Any) -> list[tuple[int, int]]:
        told = {"logprobs": (TokenLogprobs(token, -1.0),), "text_offsets": (offset,), **end}
        output = RequestOutput(RequestId("r"), text, (token,), 1, 1, RequestTiming(), **told)
        return [(placed.token_id, placed.offset) for placed in shown.take(output)]


def test_parts_of_characters_are_spelled_as_bytes(served) -> None:
    ids = served.tokenizer.encode("🦜", add_special_tokens=False)
    assert len(ids) > 1
    known = [TokenLogprobs(token, -1.0, ((token, -1.0),)) for token in ids]
    tokens = [PlacedToken(*each, 0) for each in zip(ids, known, strict=True)]
    content = LogprobsFormatter(served.tokenizer).chat(tokens)["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "🦜"
    assert all(one["token"].startswith("\\x") for one in content)
    legacy = LogprobsFormatter(served.tokenizer).completion(tokens, 1)
    assert all(token.startswith("bytes:\\x") for token in legacy["tokens"])
    by_id = LogprobsFormatter(served.tokenizer, as_ids=True).completion(tokens, 1)
    assert by_id["tokens"] == [f"token_id:{token}" for token in ids]


def test_tokens_are_spelled_beside_the_event_loop(served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long answer take seconds, in which no stream would continue."""
    threads = set()
    spell = logprobs_module.token_id_bytes

    def token_id_bytes(*arguments: Any) -> bytes:
        threads.add(threading.get_ident())
        return spell(*arguments)

    monkeypatch.setattr(logprobs_module, "token_id_bytes", token_id_bytes)
    served.post(prompt="The", logprobs=2)
    served.post("chat/completions", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2)
    assert threads
    assert served.thread.ident not in threads


@pytest.mark.parametrize("prompt", ["x" * 1_000_000, ["a", "x" * 1_000_000], [1] * 1000])
def test_a_prompt_that_cannot_fit_is_not_spelled(server, engine, monkeypatch, prompt: object) -> None:
    engine.tokenizer = tiny_tokenizer()
    monkeypatch.setattr("api.serving.generation.PromptEcho.of", lambda *_, **__: pytest.fail("it was"))
    body = {"model": "tiny-base", "prompt": prompt, "echo": True}
    refused = server.http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert engine.added == []
