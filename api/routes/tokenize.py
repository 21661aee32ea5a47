"""Serve POST /tokenize and /detokenize, GET /tokenizer_info, as in vLLM; lm-eval's remote tokenizer uses all three."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from api.asgi.json_body import JsonRoute
from api.schemas.tokenize import DetokenizeBody, TokenizeBody
from api.serving.chat import check_tools_supported
from api.serving.model_resolver import resolve_target
from api.serving.services import Services, ServicesDep, ViewDep
from api.serving.store_view import ScopedStore
from lorasrv.errors import ContextLengthExceeded, InvalidRequest
from lorasrv.text.tokenizer import Tokenizer, check_could_fit

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, services: ServicesDep, view: ViewDep) -> dict[str, Any]:
    """Return the token ids of a prompt or of a conversation, exactly as a request would use them.

    There may be more ids than the context holds. Texts so long that they cannot fit are refused without tokenizing.
    """
    tokenizer = await _tokenizer_of(body.model, services, view)
    work = partial(_tokenize, body, services, tokenizer)
    return await services.in_thread([body.prompt, body.messages], work, view.caller)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, services: ServicesDep, view: ViewDep) -> dict[str, str]:
    """Return the text of token ids, including special tokens. Refuses more ids than the context holds."""
    tokenizer = await _tokenizer_of(body.model, services, view)
    return await run_in_threadpool(_detokenize, body, services, tokenizer)


@router.get("/tokenizer_info")
async def tokenizer_info(services: ServicesDep) -> dict[str, Any]:
    """Return the special tokens of the base's tokenizer by name, and the chat template.

    Adapters may add tokens: /tokenize and /detokenize know them if `model` names the adapter.
    """
    tokenizer, template = services.engine.tokenizer, services.engine.chat_template
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": services.engine.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": None,
        "eos_token": None,
        "pad_token": None,
        "unk_token": None,
        **tokenizer.named_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "chat_template": template.source if template is not None else None,
    }


def _tokenize(body: TokenizeBody, services: Services, tokenizer: Tokenizer) -> dict[str, Any]:
    ids = _ids(body, services, tokenizer)
    return {
        "count": len(ids),
        "max_model_len": services.engine.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token(i) for i in ids] if body.return_token_strs else None,
    }


def _ids(body: TokenizeBody, services: Services, tokenizer: Tokenizer) -> list[int]:
    engine = services.engine
    template = engine.chat_template
    check = partial(check_could_fit, tokenizer=tokenizer, max_model_len=engine.max_model_len)
    if body.prompt is not None:
        check([body.prompt])
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    if template is None:
        raise InvalidRequest("this base has no chat template; send prompt", param="messages")
    messages = body.messages or []
    check_tools_supported(messages, template)
    plain = [message.plain() for message in messages]
    try:
        return template.encode(plain, tokenizer, check=check, **body.prompt_end(messages[-1]))
    except ContextLengthExceeded as error:
        raise error.renamed({"prompt": "messages"}) from None


def _detokenize(body: DetokenizeBody, services: Services, tokenizer: Tokenizer) -> dict[str, str]:
    most = services.engine.max_model_len
    if len(body.tokens) > most:
        # Bounds the size of the response: a token id of three digits may stand for eighty characters.
        raise InvalidRequest(
            f"the context holds {most} tokens, but these are {len(body.tokens)}; send them in parts", param="tokens"
        )
    if any(not 0 <= token < tokenizer.vocab_size for token in body.tokens):
        raise InvalidRequest(f"tokens must lie in [0, {tokenizer.vocab_size})", param="tokens")
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


async def _tokenizer_of(model: str | None, services: Services, view: ScopedStore) -> Tokenizer:
    names = model or services.base_name, None, None
    target = await services.looking_up(partial(resolve_target, *names, services.base_name, view))
    own = await services.engine.own_tokenizer(target.ref.key if target.ref is not None else None)
    return own or services.engine.tokenizer
