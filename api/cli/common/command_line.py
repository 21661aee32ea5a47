"""Rewrite the command line before it is parsed: lists after one flag, and commands named as in other tools."""

from collections.abc import Sequence

_LISTS = frozenset({"--lora-modules"})
_NAMES_ELSEWHERE = {"run": "chat", "ps": "pool", "ls": "list", "remove": "rm", "start": "serve", "version": "--version"}
_SHORT_OF_SERVE = {"-tp": "--tp", "-pp": "--pp", "-dp": "--data-parallel-size", "-q": "--quantization"}
"""vLLM's short flags, which would otherwise be parsed letter by letter."""


def rewritten(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in the form that the commands take: `help serve` is `serve --help`, `ps` is `pool`."""
    if not arguments:
        return []
    first, *rest = arguments
    if first == "help":
        return [*rest, "--help"]
    command = _NAMES_ELSEWHERE.get(first, first)
    if command == "serve":
        rest = [_SHORT_OF_SERVE.get(argument, argument) for argument in rest]
    return _spread([command, *rest])


def _spread(arguments: Sequence[str]) -> list[str]:
    """Repeat the flag of options that vLLM takes as lists: `--flag a b` becomes `--flag a --flag b`."""
    given: list[str] = []
    flag = ""
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in _LISTS else ""
            given.append(argument)
        else:
            given += [flag, argument] if flag and given[-1] != flag else [argument]
    return given
