"""Fields that change how tokens are chosen, from a body to the engine."""

from typing import Any

import pytest
from tool_templates import WRITES_CALLS

from lorasrv.sampling_params import SamplingParams
from lorasrv.text.chat_template import ChatTemplate

FIELDS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1.25,
    "repetition_penalty": 1.5,
    "typical_p": 0.25,
    "min_tokens": 3,
    "watermark": True,
    "fsd_alpha": 0.5,
    "fsd_ngram": 2,
}


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_every_field_reaches_the_engine(server, engine, route: str) -> None:
    bans = {"allowed_token_ids": [3, 5], "bad_words": ["no"], "no_repeat_ngram_size": 3}
    response = getattr(server, route)(**FIELDS, **bans, temperature=0, logit_bias={"7": -100, "42": 3.5}, max_tokens=9)
    assert response.status_code == 200
    sampling = engine.added[0].sampling
    assert {name: getattr(sampling, name) for name in FIELDS} == FIELDS
    assert sampling.logit_bias == ((7, -100.0), (42, 3.5))
    assert (sampling.allowed_token_ids, sampling.bad_words, sampling.no_repeat_ngram_size) == ((3, 5), ("no",), 3)


def test_text_that_goes_on_with_the_prompt_keeps_its_blank(server, engine) -> None:
    turns = [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": "Once"}]
    assert server.complete().status_code == server.chat().status_code == 200
    assert server.chat(messages=turns, continue_final_message=True).status_code == 200
    assert [added.text.strip_start for added in engine.added] == [False, True, False]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"add_generation_prompt": True}, "excludes add_generation_prompt"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "text alone"),
    ],
)
def test_a_message_that_cannot_go_on_is_refused(server, engine, fields: dict[str, Any], why: str) -> None:
    engine.chat_template = ChatTemplate(WRITES_CALLS + "{{ messages | tojson }}{{ tools }}{{ add_generation_prompt }}")
    answer = server.chat(continue_final_message=True, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
    assert why in answer.json()["error"]["message"]


def test_null_and_nothing_are_the_defaults(server, engine) -> None:
    nothing = dict.fromkeys((*FIELDS, "logit_bias"))
    assert server.chat(**nothing).status_code == server.chat().status_code == 200
    assert engine.added[0].sampling == engine.added[1].sampling == SamplingParams()
    assert server.chat(logit_bias={}).status_code == 200
    assert not engine.added[2].sampling.changes_logits


def test_fsd_is_greedy_unless_told_otherwise(server, engine) -> None:
    assert server.chat(fsd_alpha=0.4).status_code == server.chat(fsd_alpha=0).status_code == 200
    assert [added.sampling.is_greedy for added in engine.added] == [True, False]
