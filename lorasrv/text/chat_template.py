"""Render messages to a prompt with the model's own Jinja template, sandboxed, with the options of transformers.

Message content can never become a special token (a forged end of turn, another role); ordinary content gives the ids
of transformers' `apply_chat_template`. `encode` sets a mark, a rare character that the messages do not contain, before
each control token in a message, and before each partial control token at the end of a string, which the next string
could complete. Templates may trim, split or join strings; the mark stays with its text. After rendering, the marks are
removed and the text is cut after the first character of each marked control token. No piece contains the whole token
then, so encoding piece by piece cannot find it. Text without such tokens is one piece, encoded unchanged.

Characters that a tokenizer normalizes to those of a special token are refused.

A mark can keep a template from trimming the text before it. So if renderings with and without marks differ only in
white space, the one without marks is used.

The idea of marking is transformers' (`sanitize_control_tokens`), which misses a token split over two strings.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import accumulate, chain, groupby, pairwise
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorasrv.errors import CorruptModel, InvalidRequest, naming_file
from lorasrv.text.reasoning import REASONING_EXAMPLE, in_parts, reads_parts
from lorasrv.text.tokenizer import Tokenizer, TokenizerSource
from lorasrv.text.tool_parsers.formats import (
    EXAMPLE_TOOL,
    ToolFormat,
    find_calls_taken,
    marked_format,
    with_text_arguments,
)

MARKS = "".join(map(chr, range(0x101D0, 0x101FD)))
"""The signs of the Phaistos Disc. No language uses them, and they are printable, so Python's `repr` leaves them
unchanged in a dict that a template writes."""

_AT_ONCE = 1 << 14


class PromptGuard:
    """Mark control tokens for one tokenizer and template: the special tokens, and added tokens that the template
    writes.

    Args:
        added_tokens: text -> whether the token is special.
        template: source of the template.
    """

    def __init__(self, added_tokens: Mapping[str, bool], template: str) -> None:
        tokens = [
            token
            for token, special in added_tokens.items()
            # A token of one character cannot be cut; blank tokens (Gemma's newlines) are ordinary text.
            if len(token) > 1 and not token.isspace() and (special or token in template)
        ]
        # (?!) never matches.
        self._tokens = re.compile(_longest_of(tokens) if tokens else "(?!)")
        self._sorted = sorted(tokens)
        self._longest = max(map(len, tokens), default=0)

    def choose_mark(self, value: Any) -> str:
        """Return a mark that no string within `value` contains.

        Raises:
            InvalidRequest: all marks occur.
        """
        used: set[str] = set()
        _collect_marks(value, used)
        free = next((mark for mark in MARKS if mark not in used), None)
        if free is None:
            why = f"{{param}} contain all of {MARKS[0]} to {MARKS[-1]} (U+101D0 to U+101FC); leave one of them out"
            raise InvalidRequest(why, param="messages")
        return free

    def mark_tokens(self, value: Any, mark: str) -> Any:
        """Return a copy of plain JSON data with marks set, in keys too.

        Raises:
            InvalidRequest: a value is not JSON.
        """
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self.mark_tokens(k, mark): self.mark_tokens(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_tokens(item, mark) for item in value]
        raise InvalidRequest(f"messages hold a {type(value).__name__}, which is not JSON", param="messages")

    def pieces(self, marked: str, mark: str, plain: str) -> list[str]:
        """Cut a rendered text so that no piece holds a whole marked control token.

        Args:
            marked: the text with marks.
            plain: the text without marks; it is cut instead if it differs only in white space.
        """
        parts = marked.split(mark)
        places = set(accumulate(map(len, parts[:-1])))
        text = "".join(parts)
        found = self._control_tokens_in(text, lambda number, at: at in places)
        if plain != text and "".join(plain.split()) == "".join(text.split()):
            # The same tokens in the same order: each is content in both texts or in neither.
            are_content = [content for _, _, content in found]
            same = self._control_tokens_in(plain, lambda number, at: number < len(found) and are_content[number])
            if [token[1:] for token in same] == [token[1:] for token in found]:
                text, found = plain, same
        cuts = [0, *(at + 1 for at, _, is_content in found if is_content), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    def _control_tokens_in(self, text: str, is_content: Callable[[int, int], bool]) -> list[tuple[int, str, bool]]:
        """Return (place, control token, whether it is content) of all that a tokenizer would find if those in content
        were ordinary text.

        Args:
            is_content: called with a token's number and place.
        """
        found: list[tuple[int, str, bool]] = []
        position = 0
        while match := self._next(text, position):
            content = is_content(len(found), match.start())
            found.append((match.start(), match[0], content))
            position = match.start() + 1 if content else match.end()
        return found

    def _mark_text(self, text: str, mark: str) -> str:
        """Set marks before control tokens, also overlapping ones, and before a partial one at the end of the text."""
        places = {m.start() for m in self._overlapping(text)}
        end = len(text.rstrip())
        places |= {i for i in range(max(0, end - self._longest), end) if self._may_begin(text[i:end])}
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[a:b] for a, b in pairwise(cuts))

    def _may_begin(self, text: str) -> bool:
        """Return whether the text is the incomplete beginning of a control token."""
        following = bisect_right(self._sorted, text)
        return following < len(self._sorted) and self._sorted[following].startswith(text)

    def control_tokens(self, text: str) -> list[str]:
        """Return the control tokens that a text contains, each once."""
        return list(dict.fromkeys(match[0] for match in self._overlapping(text)))

    def _next(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first control token from `start` on. `re` holds the GIL, so long texts are searched in parts."""
        for at in range(start, len(text), _AT_ONCE):
            match = self._tokens.search(text, at, at + _AT_ONCE + self._longest)
            if match is not None and match.start() < at + _AT_ONCE:
                return match
        return None

    def _overlapping(self, text: str) -> list[re.Match[str]]:
        found, at = [], 0
        while match := self._next(text, at):
            found.append(match)
            at = match.start() + 1
        return found


def _longest_of(tokens: Sequence[str]) -> str:
    """Return a regular expression for the longest of these texts at a place. Common beginnings are compared only
    once."""
    same = commonprefix(tokens)  # noqa: RUF071 - of any texts, no paths
    rest = sorted({token[len(same) :] for token in tokens})
    branches = [_longest_of(list(group)) for _, group in groupby(filter(None, rest), key=itemgetter(0))]
    if not branches:
        return re.escape(same)
    return f"{re.escape(same)}(?:{'|'.join(branches)}){'' if rest[0] else '?'}"


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
    | {"raise_exception", "strftime_now", "chat_template", "tokenize", "tokenizer", "continue_final_message", "check"}
)
_TEMPLATE_FAULTS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    # A global of Jinja that is called wrongly; a text that is made too long.
    *(RuntimeError, MemoryError),
)


class ChatTemplate:
    """Compile a chat template.

    Args:
        special: bos_token, eos_token... -> their text.
        tool_template: the template of conversations with tools, if it differs.
        files: the beginnings of error messages about the two templates.

    Raises:
        CorruptModel: a template is not valid Jinja.
    """

    def __init__(
        self,
        template: str,
        special: Mapping[str, str] | None = None,
        tool_template: str | None = None,
        files: tuple[str, str] = ("", ""),
    ) -> None:
        self.source, self.tool_source = template, template if tool_template is None else tool_template
        self._special = dict(special or {})
        # Weak, because adapters' own tokenizers come and go.
        self._guards = WeakKeyDictionary[Tokenizer, PromptGuard]()
        form = marked_format(self.tool_source)
        self._template = self._tool_template = _Template(template, self._special, form, files[0])
        if tool_template is not None:
            self._tool_template = _Template(tool_template, self._special, form, files[1])
        self.variables = self._template.variables | self._tool_template.variables
        # None: the template does not support tools, or writes calls in an unknown format.
        self.tool_format: ToolFormat | None = None
        if form is not None and self._tool_template.calls_taken is not None:
            taken = self._template.calls_taken, self._tool_template.calls_taken
            self.tool_format = replace(form, takes_several=all(each is None or each.several for each in taken))

    @classmethod
    def from_source(cls, source: TokenizerSource) -> "ChatTemplate | None":
        """Compile the checkpoint's template; return None if it has none."""
        if source.chat_template is None:
            return None
        files = source.file or source.template_file, source.file or source.tool_template_file
        return cls(source.chat_template, source.special, source.tool_template, files)

    def checked_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check a client's template variables: the template must read them, and the server must not own them.

        Raises:
            InvalidRequest: param chat_template_kwargs; a variable is not accepted, or not a plain value.
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
                    f"chat_template_kwargs: {name} must be true, false, a number or a string",
                    param="chat_template_kwargs",
                )
        return dict(given)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Render the prompt as text. `kwargs` are template variables (tools, documents, enable_thinking...).

        Raises:
            InvalidRequest: param messages; the template refuses them or cannot read them.
        """
        template = self._template if kwargs.get("tools") is None else self._tool_template
        plain: Sequence[Message] = [_plain(message) for message in messages]
        if self.tool_format is not None and template.calls_taken is not None:
            if template.calls_taken.left_out:
                plain = [self.tool_format.in_content(message) for message in plain]
            elif template.calls_taken.as_text:
                plain = [with_text_arguments(message) for message in plain]
        if template.reads_parts:
            plain = [in_parts(message) for message in plain]
        return template.render(plain, add_generation_prompt=add_generation_prompt, **kwargs)

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        check: Callable[[Sequence[str]], object] | None = None,
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Render the prompt as token ids; special tokens come from the template only, never from message content.

        Args:
            check: called with the whole text, in pieces, before it is tokenized, which takes a hundred times as long as
                rendering. Its exceptions propagate.
            continue_final_message: end with the last message's text, which the answer then continues. As in
                transformers, white space at its end stays only where the template keeps it.

        Raises:
            InvalidRequest: see `render`; the template does not write the last message's text; or the tokenizer
                normalizes characters of a message to a control token.
        """
        guard = self._guard(tokenizer)
        plain = [_plain(message) for message in messages]
        mark = guard.choose_mark((plain, kwargs))
        roles = [message.get("role") for message in plain]
        end = guard.choose_mark((plain, kwargs, mark)) if continue_final_message else ""
        if end:
            # The space shows whether the template keeps white space at the end of a message.
            plain[-1]["content"] += end + " "
        guarded = [
            guard.mark_tokens(message, mark) | {"role": role} for message, role in zip(plain, roles, strict=True)
        ]

        def rendered(conversation: Sequence[Message], variables: Mapping[str, Any]) -> str:
            text = self.render(conversation, add_generation_prompt, **variables)
            return _before(end, text) if end else text

        marked = rendered(guarded, guard.mark_tokens(kwargs, mark))
        pieces = guard.pieces(marked, mark, rendered(plain, kwargs)) if mark in marked else [marked]
        if check is not None:
            check(pieces)
        try:
            first = tokenizer.encode(pieces[0], add_special_tokens=False)
            parts = [first, *map(tokenizer.encode_behind, pieces[1:])]
        except InvalidRequest as e:
            raise InvalidRequest(str(e).replace("prompt", "messages", 1), param="messages") from None
        if any(map(tokenizer.has_forged, parts, pieces)):
            why = (
                "{param} have characters that this base's tokenizer turns into those of a control token; leave them out"
            )
            raise InvalidRequest(why, param="messages")
        return list(chain.from_iterable(parts))

    def control_tokens(self, text: str, tokenizer: Tokenizer) -> list[str]:
        """Return the control tokens that a text contains; `encode` turns them into ordinary text."""
        return self._guard(tokenizer).control_tokens(text)

    def _guard(self, tokenizer: Tokenizer) -> PromptGuard:
        guard = self._guards.get(tokenizer)
        if guard is None:
            guard = self._guards[tokenizer] = PromptGuard(tokenizer.added_tokens, self.source + self.tool_source)
        return guard


def _before(end: str, text: str) -> str:
    head, found, tail = text.rpartition(end)
    if not found:
        why = "the base's chat template does not write the last message's text, which was to be continued"
        raise InvalidRequest(f"continue_final_message: {why}", param="continue_final_message")
    return head if tail.startswith(" ") else head.rstrip()


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{{param}}: the chat template refuses them: {reason}", param="messages")


def _plain(message: Message) -> dict[str, Any]:
    """Copy a message into a dict, joining a list of text parts with line breaks.

    Joining comes first, so that a special token split over two parts is whole when tokens are marked.
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


# Template environment -------------------------------------------------------------------------------------------------
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """Render the body of `{% generation %}...{% endgeneration %}`, which marks the assistant's text for trainers."""

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
    """Serialise as transformers' filter does, without HTML escapes; the guard's marks stay unescaped even in ASCII."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


class _Template:
    """Compile one template, and find out by examples how it takes messages.

    Args:
        form: the format of tool calls, by the template's markers.

    Raises:
        CorruptModel: it is not valid Jinja.
    """

    def __init__(self, source: str, special: Mapping[str, str], form: ToolFormat | None, file: str) -> None:
        self._special, environment = special, _environment()
        try:
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            self._compiled = environment.from_string(source)
        except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError) as e:
            # The last two come from Python's compiler: a break outside of a loop, brackets nested too deeply.
            what = f"{e.message} in line {e.lineno}" if isinstance(e, jinja2.TemplateSyntaxError) else str(e)
            with naming_file(file):
                raise CorruptModel(f"the chat template is not valid Jinja: {what}") from None
        self.calls_taken = find_calls_taken(form, partial(self._example, tools=[EXAMPLE_TOOL]))
        # Whether reasoning is a part of the content.
        self.reads_parts = reads_parts(source, self._example(REASONING_EXAMPLE) or "")

    def render(self, messages: Sequence[Message], **kwargs: Any) -> str:
        """Render messages.

        Raises:
            InvalidRequest: param messages; the template refuses them or cannot read them.
        """
        variables = {"tools": None, "documents": None, **self._special, **kwargs}
        try:
            return self._compiled.render(messages=messages, **variables)
        except RecursionError:
            raise _refused("nested too deeply") from None
        except _TEMPLATE_FAULTS as e:
            raise _refused(str(e) or type(e).__name__) from None

    def _example(self, messages: Sequence[Message], **kwargs: Any) -> str | None:
        try:
            return self.render([*messages], add_generation_prompt=False, **kwargs)
        except InvalidRequest:
            return None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return datetime.now().strftime(fmt)
