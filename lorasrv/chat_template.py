"""Messages to a prompt through the model's own Jinja template, in a sandbox, with the options of transformers.

What a message says can never become a special token (a forged end of turn, another role): `encode` marks special
tokens that are written in messages before the template sees them, and encodes them as plain text. See
`lorasrv.prompt_guard`. Ordinary content gives the ids of transformers' `apply_chat_template`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorasrv.errors import CorruptModel, InvalidRequest
from lorasrv.prompt_guard import MARKS, PromptGuard
from lorasrv.tokenizer import Tokenizer
from lorasrv.tokenizer_source import TokenizerSource

Message = Mapping[str, Any]

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_NOT_ASCII = re.compile(f"[^\\x00-\\x7f{MARKS}]")
_OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
    | {"raise_exception", "strftime_now", "chat_template", "tokenize", "tokenizer", "continue_final_message"}
)
_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class ChatTemplate:
    """A compiled template. `special` maps bos_token, eos_token... to their text.

    Raises:
        CorruptModel: not valid Jinja.
    """

    def __init__(self, template: str, special: Mapping[str, str] | None = None) -> None:
        self.source = template
        self._special = dict(special or {})
        self._guards: dict[int, tuple[Tokenizer, PromptGuard]] = {}
        environment = _environment()
        try:
            self._template = environment.from_string(template)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
        except jinja2.TemplateSyntaxError as e:
            raise CorruptModel(f"the chat template is not valid Jinja: {e.message} in line {e.lineno}") from None

    @classmethod
    def from_source(cls, source: TokenizerSource) -> "ChatTemplate | None":
        """The checkpoint's template, None if it has none."""
        return None if source.chat_template is None else cls(source.chat_template, source.special)

    def checked_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What a client may tell the template: variables that it reads, but for those that are the server's.

        Raises:
            InvalidRequest: param chat_template_kwargs; one is none of these, or no plain value.
        """
        readable = (self.variables | {"enable_thinking"}) - self._special.keys() - _OWN_VARIABLES
        for name, value in given.items():
            if name not in readable:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name[:64]!r} is not supported; this base's chat template takes "
                    f"{', '.join(sorted(readable))}",
                    param="chat_template_kwargs",
                )
            if not isinstance(value, bool | int | float | str):
                raise InvalidRequest(
                    f"chat_template_kwargs: {name} must be true, false, a number or a text",
                    param="chat_template_kwargs",
                )
        return dict(given)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt as text. `kwargs` are template variables (tools, documents, enable_thinking...).

        Raises:
            InvalidRequest: param messages; the template refuses them, or they are not what a template can read.
        """
        variables = {"tools": None, "documents": None, **self._special, **kwargs}
        plain = [_plain(message) for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **variables)
        except RecursionError:
            raise _refused("nested too deeply") from None
        except _TEMPLATE_FAULTS as e:
            raise _refused(str(e) or type(e).__name__) from None

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        check: Callable[[Sequence[str]], object] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt as token ids; special tokens come from the template only, never from what messages say.

        `check` is given the whole text, in pieces, before it is tokenized, which takes a hundred times as long as
        writing it.
        Raises:
            InvalidRequest: see `render`.
            Whatever `check` raises.
        """
        guard = self._guard(tokenizer)
        plain = [_plain(message) for message in messages]
        mark = guard.choose_mark((plain, kwargs))
        roles = [message.get("role") for message in plain]
        guarded = [
            guard.mark_tokens(message, mark) | {"role": role} for message, role in zip(plain, roles, strict=True)
        ]
        text = self.render(guarded, add_generation_prompt, **guard.mark_tokens(kwargs, mark))
        pieces = guard.pieces(text, mark)
        if check is not None:
            check(pieces)
        try:
            return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]
        except InvalidRequest as e:
            raise InvalidRequest(str(e).replace("prompt", "messages", 1), param="messages") from None

    def _guard(self, tokenizer: Tokenizer) -> PromptGuard:
        known = self._guards.get(id(tokenizer))
        if known is None:
            known = self._guards[id(tokenizer)] = (tokenizer, PromptGuard(tokenizer.added_tokens, self.source))
        return known[1]


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"messages: the chat template refuses them: {reason}", param="messages")


def _plain(message: Message) -> dict[str, Any]:
    """A message as a fresh dict; content given as a list of text parts becomes one string, parts on lines of their own.

    Joined before anything else looks at it: a special token cut in two by a border of parts is whole again here.
    """
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest("messages: role must be a word such as user, assistant or system", param="messages")
    plain = dict(message)
    if isinstance(plain.get("content"), list | tuple):
        plain["content"] = "\n".join(_part_text(part) for part in plain["content"])
    return plain


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest("messages: content parts must be of type text", param="messages")
    return text


# The template's world -------------------------------------------------------------------------------------------------


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for trainers; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter: no HTML escapes. A guard's mark stays itself even in ASCII, else it would guard nothing."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)
