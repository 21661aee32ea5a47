"""Convert an Ollama Modelfile to a persona's defaults.

Parameters that have an equivalent here are converted; the others are reported. Format: Ollama's Modelfile reference.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from adapter_store.validation.report import BaseName
from api.cli.common.terminal import MULTILINE, CliError

_LINE = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+")
_FLOATS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_INTS = {"top_k": "top_k", "seed": "seed", "num_predict": "max_tokens"}
_UNLIMITED = (-1, -2)


@dataclass
class Modelfile:
    """Hold the contents of a Modelfile: the base, the persona's defaults, and notices of parts that were left out."""

    base: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def is_for(self, base_name: str) -> bool:
        """Return whether it names the served base, ignoring case, punctuation and quantization."""
        return BaseName.of(self.base).model == BaseName.of(base_name).model


def read_modelfile(text: str) -> Modelfile:
    """Parse a Modelfile.

    Raises:
        CliError: a line is malformed, or there is no FROM.
    """
    found = Modelfile()
    turns: list[dict[str, str]] = []
    system: list[str] = []
    for instruction, value in _instructions(text.replace("\r\n", "\n")):
        match instruction:
            case "FROM":
                found.base = value
            case "PARAMETER":
                _parameter(value, found)
            case "SYSTEM":
                system = [value]
            case "MESSAGE":
                role, _, said = value.partition(" ")
                said = _unquoted(said.strip())
                if role == "system":
                    system.append(said)
                elif role in ("user", "assistant"):
                    turns.append({"role": role, "content": said})
                else:
                    raise CliError(f"MESSAGE {role}: expected system, user or assistant")
            case "TEMPLATE":
                found.notices.append("left out: TEMPLATE; the base's own chat template is used")
            case "ADAPTER":
                found.notices.append(f"ADAPTER {value}: upload it (lorasrv upload), then import this file for its id")
            case "LICENSE":
                found.notices.append("left out: LICENSE")
            case _:
                raise CliError(f"{instruction} is not an instruction of a Modelfile")
    if not found.base:
        raise CliError("the Modelfile has no FROM")
    if text_of := "\n\n".join(part for part in system if part):
        found.defaults["system"] = text_of
    if turns:
        found.defaults["examples"] = [turns]
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction in capitals with its value; between three quotes, a value may have several lines."""
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        line = text[at:end]
        if not line.strip() or line.lstrip().startswith("#"):
            at = end + 1
            continue
        if (match := _LINE.match(line)) is None:
            raise CliError(f"{line.strip()[:40]!r} is not a line of a Modelfile")
        opening = line.find(MULTILINE, match.end())
        if opening >= 0:
            start = at + opening + len(MULTILINE)
            close = text.find(MULTILINE, start)
            if close < 0:
                raise CliError(f"{match[1].upper()}: the three quotes are not closed")
            before = line[match.end() : opening]
            yield match[1].upper(), before + text[start:close].strip()
            end = text.find("\n", close)
            end = len(text) if end < 0 else end
        else:
            yield match[1].upper(), _unquoted(line[match.end() :].strip())
        at = end + 1


def _unquoted(text: str) -> str:
    is_quoted = len(text) >= 2 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _parameter(value: str, found: Modelfile) -> None:
    name, _, given = value.partition(" ")
    given = _unquoted(given.strip())
    try:
        if name == "stop":
            found.defaults.setdefault("stop", []).append(given)
        elif name in _FLOATS:
            found.defaults[_FLOATS[name]] = _finite(given)
        elif name in _INTS and int(given) not in _UNLIMITED:
            found.defaults[_INTS[name]] = int(given)
        elif name not in _INTS:
            found.notices.append(f"left out: PARAMETER {name}")
    except ValueError:
        raise CliError(f"PARAMETER {name}: {given!r} is not a number") from None
