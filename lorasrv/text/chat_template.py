"""Messages to a prompt through the model's own Jinja template, in a sandbox, with the options of transformers.

What a message says can never become a special token (a forged end of turn, another role): `encode` marks special
tokens that are written in messages before the template sees them, and encodes them as plain text. See
`lorasrv.text.chat_template`. Ordinary content gives the ids of transformers' `apply_chat_template`.

Keeps special tokens written in messages from becoming special tokens of the prompt.

A mark, a Unicode noncharacter that the messages do not contain, goes in front of every control token in them, and in
front of every beginning of one at the end of a string, which the next string could complete. Templates may trim,
split or join strings; the mark stays with its text. After rendering the marks are taken out, and the text is cut behind
the first character of each control token that begins where a mark was: no piece holds that token any more, so that
encoding piece by piece cannot find it. Text without such tokens is one piece, encoded as if nobody had looked.

The idea of marking is transformers' (`sanitize_control_tokens`), which does not see a token split over two strings.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorasrv.errors import CorruptModel, InvalidRequest
from lorasrv.text.tokenizer import Tokenizer, TokenizerSource

MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""The noncharacters of the basic plane: never assigned, for internal use (Unicode corrigendum 9)."""


class PromptGuard:
    """For one tokenizer and template: control tokens are the special ones, and added ones that the template writes.

    `added_tokens` maps text to whether it is special.
    """

    def __init__(self, added_tokens: Mapping[str, bool], template: str) -> None:
        tokens = [
            token
            for token, special in added_tokens.items()
            # A token of one character cannot be cut; blank ones (Gemma's newlines) are ordinary text.
            if len(token) > 1 and not token.isspace() and (special or token in template)
        ]
        # Longest first, as the tokenizer prefers; (?!) never matches.
        self._tokens = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
        self._beginnings = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)

    def choose_mark(self, value: Any) -> str:
        """A noncharacter that no string within `value` contains.

        Raises:
            InvalidRequest: all 32 occur, which no text has a reason for.
        """
        used: set[str] = set()
        _collect_marks(value, used)
        free = next((mark for mark in MARKS if mark not in used), None)
        if free is None:
            raise InvalidRequest("messages contain Unicode noncharacters U+FDD0 to U+FDEF", param="messages")
        return free

    def mark_tokens(self, value: Any, mark: str) -> Any:
        """A copy of plain JSON data with marks set, in keys too.

        Raises:
            InvalidRequest: a value that is no JSON.
        """
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self.mark_tokens(k, mark): self.mark_tokens(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_tokens(item, mark) for item in value]
        raise InvalidRequest(f"messages hold a {type(value).__name__}, which is no JSON", param="messages")

    def pieces(self, text: str, mark: str) -> list[str]:
        """Rendered text without its marks, cut so that no marked control token is whole in any piece."""
        parts = text.split(mark)
        text, marked, at = "".join(parts), set(), 0
        for part in parts[:-1]:
            at += len(part)
            marked.add(at)
        pieces, start, position = [], 0, 0
        while marked and (match := self._tokens.search(text, position)):
            position = match.end()
            if match.start() in marked:
                position = match.start() + 1
                pieces.append(text[start:position])
                start = position
        return [*pieces, text[start:]]

    def _mark_text(self, text: str, mark: str) -> str:
        """Marks in front of control tokens, overlapping ones too, and of beginnings of one at the end."""
        places = {m.start() for m in self._overlapping(text)}
        end = len(text.rstrip())
        places |= {i for i in range(max(0, end - self._longest), end) if text[i:end] in self._beginnings}
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[a:b] for a, b in pairwise(cuts))

    def _overlapping(self, text: str) -> list[re.Match[str]]:
        found, at = [], 0
        while match := self._tokens.search(text, at):
            found.append(match)
            at = match.start() + 1
        return found


def _collect_marks(value: Any, used: set[str]) -> None:
    if isinstance(value, str):
        used |= set(MARKS) & set(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect_marks(key, used)
            _collect_marks(item, used)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_marks(item, used)


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
