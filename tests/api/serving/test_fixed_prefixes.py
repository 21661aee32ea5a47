"""Which prompts use the pages of a persona's fixed prefix."""

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_checkpoints import CHATML, tiny_tokenizer_json

from adapter_store.spec import AdapterId, AdapterRef
from api.schemas.openai import ChatBody
from api.schemas.personas import Defaults
from api.serving.chat import plan_chat
from api.serving.fixed_prefixes import FixedPrefixes
from api.serving.personas import StoredPersona, apply_to_body
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource

SYSTEM = "You are Mia, and you keep the light of the island. You answer in rhymes, and never leave it."
PERSONA = StoredPersona(AdapterRef(AdapterId("mia"), 1, None, "0" * 64), "{}", Defaults(system=SYSTEM), "")


class Served(SimpleNamespace):
    """An engine without adapters, and the defaults of one persona."""

    async def own_tokenizer(self, adapter: object) -> None:
        return None

    async def find(self, ref: AdapterRef) -> StoredPersona:
        return PERSONA


@pytest.mark.parametrize(
    ("turn", "messages", "is_shared"),
    [
        ("Hello", [], True),
        ("\n\nHello", [], True),
        ("Hello", [{"role": "system", "content": "Be brief."}], False),
    ],
)
async def test_a_prompt_that_begins_with_all_its_pages_uses_them(
    turn: str, messages: list[Any], is_shared: bool
) -> None:
    """In the second prompt, one token spans the prefix's last line break and those of the turn."""
    tokenizer = Tokenizer.from_source(TokenizerSource(TokenizerJson(tiny_tokenizer_json())))
    spec, template = SimpleNamespace(vocab_size=tokenizer.vocab_size), ChatTemplate(CHATML)
    served = Served(spec=spec, max_model_len=2048, tokenizer=tokenizer, chat_template=template, page_size_tokens=16)
    prefixes = FixedPrefixes(served, served)  # type: ignore[arg-type]
    known = await prefixes.of_version(PERSONA.ref)
    assert known is not None
    asked = ChatBody.model_validate({"messages": [*messages, {"role": "user", "content": turn}]})
    body, applied = apply_to_body(asked, PERSONA, may_read=True)
    prompt = plan_chat(body, served, applied).prompt
    assert (tuple(prompt[: len(known.token_ids)]) == known.token_ids) == (turn == "Hello" and is_shared)
    assert await prefixes.of_prompt(applied, prompt) == (known.prefix if is_shared else None)
    assert await prefixes.of_prompt(applied, [*prompt[:15], prompt[15] + 1, *prompt[16:]]) is None
