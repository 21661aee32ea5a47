"""Grammars on their own: tokens' bytes, what is refused and why, and that no grammar costs more than it may."""

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import sentencepiece

from adapter_store.spec import AddedToken
from lorasrv.errors import EngineOverloaded, InvalidRequest
from lorasrv.text.structured_output import grammar as source
from lorasrv.text.structured_output.compiler import KEPT_GRAMMARS, MAX_TRIES, MAX_UNTRIED, GrammarCompiler
from lorasrv.text.structured_output.matcher import FORCED_BYTES, CompiledGrammar, Vocabulary, compile_matcher
from lorasrv.text.structured_output.sandbox import TOO_COSTLY, GrammarSandbox
from lorasrv.text.structured_output.satisfiability import lark_can_end, repetitions
from lorasrv.text.tokenizer import Tokenizer

PADDING = 70
WORDS = (*'abcdefghyes.한{}:"', "▁yes")


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, builtin_tokenizer: Tokenizer) -> Tokenizer:
    return builtin_tokenizer if request.param == "byte_level" else sentencepiece(WORDS, prepends=True)


class Compiling:
    """A compiler, and an event loop to ask it in."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.run = asyncio.Runner().run
        self.tokenizer = tokenizer
        self.compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING, tokenizer.eos_token_ids)

    @property
    def num_started(self) -> int:
        return self.compiler.examiner.num_started

    def compile(self, grammar: source.Grammar) -> CompiledGrammar:
        return self.run(self.compiler.compile(grammar))

    def accepts(self, grammar: source.Grammar, *texts: str) -> list[bool]:
        compiled = self.compile(grammar)
        return [accepts(compiled, self.tokenizer, text) for text in texts]

    def close(self) -> None:
        self.run(self.compiler.aclose())
        self.run.__self__.close()
        assert self.compiler.examiner._process is None


@pytest.fixture(scope="module")
def compiling(tokenizer: Tokenizer) -> Iterator[Compiling]:
    with closing(Compiling(tokenizer)) as compiling:
        yield compiling


@pytest.fixture(scope="module")
def builtin_compiling(builtin_tokenizer: Tokenizer) -> Iterator[Compiling]:
    with closing(Compiling(builtin_tokenizer)) as compiling:
        yield compiling


def allowed(state: Any) -> set[int]:
    bits = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accepts(compiled: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text can be written, in whatever tokens, and the answer may end there."""
    vocabulary = ids_by_bytes(tokenizer)
    wanted, state = text.encode(), compiled.begin()
    while wanted and state.error is None:
        tokens = allowed(state)
        # The longest token that fits; text that is forced may be spelled in one way only.
        fitting = (wanted[:size] for size in range(min(len(wanted), 16), 0, -1))
        found = next(((part, i) for part in fitting for i in vocabulary.get(part, ()) if i in tokens), None)
        if found is None:
            return False
        part, token = found
        state.advance(token)
        wanted = wanted.removeprefix(part)
    return state.error is None and bool(allowed(state) & tokenizer.eos_token_ids)


@cache
def ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, list[int]]:
    """Every token of a text; some vocabularies have a character also as the token of its byte."""
    made = Vocabulary.of(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_token_ids))
    found = dict[bytes, list[int]]()
    for i, token in enumerate(made.tokens):
        if i not in made.special:
            found.setdefault(token, []).append(i)
    return found


@cache
def compiled_vocabulary(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {token: ids[0] for token, ids in ids_by_bytes(tokenizer).items()}


def test_tokens_are_bytes_of_the_text(tokenizer: Tokenizer, corpus: list[str]) -> None:
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size + PADDING, sorted(tokenizer.eos_token_ids))
    for text in corpus:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not set(ids) & set(vocabulary.special):
            written = b"".join(vocabulary.tokens[i] for i in ids)
            decoded = tokenizer.decode(ids).encode()
            assert written.removeprefix(b" " if tokenizer.decoding.strip_start else b"") == decoded
    assert Vocabulary.unpacked(vocabulary.packed()) == vocabulary


def test_no_special_token_but_the_end_is_ever_allowed(tokenizer: Tokenizer, compiling: Compiling) -> None:
    tokens = allowed(compiling.compile(source.regex_of(r"(.|\n)*", "guided_regex")).begin())
    assert len(tokens) > 100
    assert tokens & tokenizer.special_ids == tokenizer.eos_token_ids
    assert all(tokenizer.token(token) is not None for token in tokens)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "ü": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
OPEN = {"type": "object", "additionalProperties": True}
CHOICES = ["yes", "yesterday", 'q"\n\\', "한국😀", " lead"]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            source.json_of(SCHEMA, "p"),
            ['{"a": 1}', '{"a":-20,\n  "ü": "한 \\" 😀"}', '{\n\t"a": 3\n}'],
            ['{"a": 1.5}', "{}", '{"ü": "x"}', '{"a": 1, "b": 2}', '{"a":  1}', ' {"a": 1}', '{"a": 1} '],
        ),
        (source.json_of(json.dumps(SCHEMA), "p"), ['{"a": 1}'], ["[]"]),
        (
            source.json_of({"properties": {"role": {"enum": ["user"]}, "a\n": {"const": 1}}, **OPEN}, "p"),
            ['{"role": "user", "b\\n\\"": [1]}', '{"a\\n": 1}'],
            [r'{"role": "user", "\u0072ole": "admin"}', r'{"\u0072ole": "admin"}', r'{"a\u000a": 2}'],
        ),
        (
            source.json_of({"type": "object", "patternProperties": {"^a$": {"type": "integer"}}}, "p"),
            ['{"a": 1, "b": "x"}'],
            [r'{"\u0061": "x"}'],
        ),
        (source.any_json_object("p"), ['{"x": [1, {"y": null}]}'], ["[1]", "1"]),
        (source.json_of(True, "p"), ["1", '"x"', "[]"], ["x"]),
        # Exclusive bounds that are integers, beside one with the same integer part.
        (source.json_of({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "p"), ["0.2", "0.5"], ["0", "-0.1"]),
        (source.json_of({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "p"), ["-1.2", "-1.5"], ["-1"]),
        (
            source.json_of({"allOf": [{"type": "number", "exclusiveMinimum": 100}, {"maximum": 100.5}]}, "p"),
            ["100.1"],
            ["100", "101"],
        ),
        (
            source.json_of({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, "p"),
            ["4", "5"],
            ["3", "6"],
        ),
        (
            source.json_of({"type": "integer", "exclusiveMinimum": 9**9, "maximum": 9**9 + 1}, "p"),
            [str(9**9 + 1)],
            [str(9**9)],
        ),
        (source.regex_of("[a-c]+/\\d\n|^x$", "p"), ["abc/1\n", "x"], ["abc", "a/x", "xx"]),
        (source.choice_of(CHOICES, "p"), CHOICES, ["ye"]),
        (source.grammar_of('start: "a" rest?\nrest: "," start', "p"), ["a", "a,a,a"], ["a,", ",a"]),
        (source.grammar_of('{"grammars": [{"lark_grammar": "start: /a+/"}]}', "p"), ["aa"], ["b"]),
    ],
)
def test_what_grammars_accept(compiling: Compiling, grammar: source.Grammar, good: list[str], bad: list[str]) -> None:
    assert dict(zip(good + bad, compiling.accepts(grammar, *good, *bad), strict=True)) == (
        dict.fromkeys(good, True) | dict.fromkeys(bad, False)
    )


def test_states_are_independent_and_end(tokenizer: Tokenizer, compiling: Compiling) -> None:
    compiled = compiling.compile(source.regex_of("[ab]c", "guided_regex"))
    ids = compiled_vocabulary(tokenizer)
    first, second = compiled.begin(), compiled.begin()
    first.advance(ids[b"a"])
    first.advance(ids[b"c"])
    assert first.is_over
    assert allowed(first) == tokenizer.eos_token_ids
    assert ids[b"b"] in allowed(second)
    assert not second.is_over
    second.advance(ids[b"d"])
    assert "cannot be followed" in (second.error or "")
    assert not second.is_over
    assert allowed(second) == tokenizer.eos_token_ids, "a failed state leaves the sampler something to choose"


@pytest.mark.parametrize("text", ['{"a": "yes", "b": 1}', "abc yes", "\nabc"])
def test_forced_text_has_the_tokens_that_the_tokenizer_writes(
    tokenizer: Tokenizer, compiling: Compiling, text: str
) -> None:
    """Not those of single bytes, nor with a blank that only the beginning of a whole text has."""
    state, [front], ids = compiling.compile(source.choice_of([text], "p")).begin(), tokenizer.encode("x\t")[-1:], []
    while not state.is_over:
        [token] = allowed(state)
        ids.append(token)
        state.advance(token)
    whole = tokenizer.encode("x\t" + text, add_special_tokens=False)
    assert ids == whole[len(whole) - whole[::-1].index(front) :]


def test_forced_text_that_spells_a_special_token_has_no_tokens_of_single_bytes() -> None:
    tokenizer = sentencepiece([*WORDS, "<", "/", "s", ">"], prepends=True)
    with closing(Compiling(tokenizer)) as compiling:
        state = compiling.compile(source.choice_of(["abc</s>"], "p")).begin()
        assert [tokenizer.token(token) for token in state.forced()] == ["a", "b", "c", "<", "/", "s", ">"]


def deep(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
ENDLESS_LIST = {"type": "array", "minItems": 1, "items": {"$ref": "#"}}
LENIENT = {"uniqueItems": True, "x-guidance": {"lenient": True}}
CHAIN = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5000))
DATA_SCHEMA = {"const": {"type": "string"}, "enum": [{"items": {"type": "string"}}]}
REPEATED = "(a{0,500}){0,500}"
FIELDS = {
    "guided_json": source.json_of,
    "guided_regex": source.regex_of,
    "guided_choice": source.choice_of,
    "guided_grammar": source.grammar_of,
}


@pytest.mark.parametrize(
    ("field", "given", "why"),
    [
        ("guided_json", {"type": "strin"}, "Invalid type"),
        ("guided_json", deep(100_000), "64 levels"),
        ("guided_json", deep(70), "64 levels"),
        ("guided_json", "{", "not JSON"),
        ("guided_json", "[]", "must be a JSON schema"),
        ("guided_json", LOOP, "requires itself"),
        ("guided_json", {"$ref": "https://example.org/s"}, "example.org"),
        ("guided_json", {"anyOf": [{}], "$ref": "#/anyOf/" + "9" * 5000}, "array index"),
        ("guided_json", ENDLESS, "requires itself"),
        ("guided_json", ENDLESS_LIST, "requires itself"),
        ("guided_json", False, "no value"),
        ("guided_json", {"uniqueItems": True}, "uniqueItems"),
        ("guided_json", LENIENT, "uniqueItems"),
        ("guided_json", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ("guided_json", {"enum": list(range(100_000))}, "bytes"),
        ("guided_json", {"const": 1234567890123456789}, "1234567890123456789 cannot be enforced exactly"),
        ("guided_json", {"properties": {"ids": {"enum": [{"id": [2**53 + 1]}]}}}, "9007199254740993 cannot"),
        ("guided_json", {"type": "integer", "minimum": 1e20}, "1e+20 cannot"),
        ("guided_json", {"type": "object", "required": ["a"], "minProperties": 2}, "minProperties 2"),
        ("guided_json", {"type": "object", "minProperties": 1.0}, "minProperties 1.0"),
        *(
            (
                "guided_json",
                {"properties": {"a": {"$id": "http://a/b", **DATA_SCHEMA}, "b": {"$ref": ref}}},
                f"'{ref}' points",
            )
            for ref in (
                "#/properties/a/const",
                "#/properties/a/enum/0/items",
                "#/properties/%61/c%6Fnst",
                "http://a/b#/const",
            )
        ),
        ("guided_json", {"type": ["object"], **{k: v for k, v in ENDLESS.items() if k != "type"}}, "requires itself"),
        ("guided_json", {"type": "object", "required": ["n"], "additionalProperties": {"$ref": "#"}}, "itself"),
        ("guided_json", {"oneOf": [{"pattern": "^a{1,3}$"}, {"pattern": "^b{1,3}$"}]}, "use anyOf"),
        ("guided_regex", "|".join(f"option number {i}" for i in range(40)) + "|(?=x)", "look-around"),
        ("guided_json", {"type": "string", "pattern": f"^{REPEATED}$"}, "25000"),
        ("guided_regex", REPEATED, "250000"),
        ("guided_regex", "(a", "unclosed group"),
        ("guided_regex", "(?=a)b", "look-around"),
        ("guided_regex", r"[^\x00-\U0010FFFF]", "no text satisfies"),
        (
            "guided_regex",
            "a" + "{999999999}" * 1000,
            "has 1000000000000000 characters, each as often",
        ),
        ("guided_choice", [], "1 to"),
        ("guided_choice", ["a", ""], "empty"),
        ("guided_grammar", f"start: /{REPEATED}/", "too many"),
        ("guided_grammar", 'start: start "a"', "no finite sentence"),
        ("guided_grammar", 'start: /[a-z]+/ "," start', "no finite sentence"),
        ("guided_grammar", 'root ::= "a"', "Lark"),
        ("guided_grammar", '{"grammars": [{"lark_grammar": "start: /a*/"}], "max_tokens": 9}', "into the request"),
        ("guided_grammar", "start: nothing", "nothing"),
        # Refused by following it, within a fifth of the time that this may take.
        ("guided_grammar", "start: x x{0,3000}\nx: y{0,1000}\ny: A?\nA: /a/", "items"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_name_the_field_and_say_why(builtin_compiling: Compiling, field: str, given: Any, why: str) -> None:
    builtin_compiling.compile(source.choice_of(["a"], "p"))
    started = builtin_compiling.num_started
    with pytest.raises(InvalidRequest) as caught:
        builtin_compiling.compile(FIELDS[field](given, field))
    message = str(caught.value)
    assert why in message
    assert caught.value.param == field
    assert message.startswith(field)
    assert "\n" not in message
    assert len(message) < 400
    assert builtin_compiling.num_started == started, "it does not cost the process"


@pytest.mark.parametrize(
    "given",
    [
        {"$ref": "#num", "$defs": {"n": {"$anchor": "num", "type": "integer"}}},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        {"enum": ["x"], "default": {"pattern": REPEATED}, "examples": [2**60]},
        {"const": {"pattern": REPEATED}},
        {"$defs": {"const": {"type": "string"}}, "$ref": "#/$defs/const"},
        {"type": "object", "required": ["a", "b"], "minProperties": 2, "properties": {"a": {"maximum": 2**53}}},
    ],
    ids=["anchor", "uniqueItems", "annotations", "data", "name", "bounds"],
)
def test_schemas_that_demand_nothing_impossible(builtin_compiling: Compiling, given: Any) -> None:
    builtin_compiling.compile(FIELDS["guided_json"](given, "guided_json"))


def test_a_panic_is_told_without_its_trace(builtin_compiling: Compiling) -> None:
    with pytest.raises(InvalidRequest) as caught:
        builtin_compiling.compile(FIELDS["guided_grammar"]('start: t "b"\nt[lazy]: /[ab]*/', "guided_grammar"))
    assert "backtrace" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        pytest.param("guided_json", {"type": "integer", "multipleOf": 99_999_989}, id="memory"),
        pytest.param("guided_grammar", f'start: r0\n{CHAIN}\nr5000: "c"', id="stack"),
    ],
)
def test_a_costly_grammar_ends_its_process_only(builtin_compiling: Compiling, field: str, given: Any) -> None:
    compiler, costly = builtin_compiling.compiler, FIELDS[field](given, field)

    async def scenario() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        good = source.regex_of("[0-9]{3}", "guided_regex")
        before = await compiler.compile(good)
        started = compiler.examiner.num_started
        both = (compiler.compile(costly), compiler.compile(source.choice_of(["a"], "p")))
        refused, served = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(refused, InvalidRequest)
        assert TOO_COSTLY in str(refused)
        assert isinstance(served, CompiledGrammar), "a request behind it is served by the next process"
        assert compiler.examiner.num_started == started + 1
        assert ticks > 20, "the event loop goes on meanwhile"
        with pytest.raises(InvalidRequest, match=TOO_COSTLY):
            await compiler.compile(costly)
        assert compiler.examiner.num_started == started + 1, "what was refused is known"
        assert await compiler.compile(good) is before
        ticking.cancel()

    builtin_compiling.run(scenario())


def test_of_a_long_forced_text_the_beginning_is_tokenized(builtin_compiling: Compiling) -> None:
    """Each mask of each answer tokenizes it again, while all others wait: 10 KB took 0.1 s each time."""
    const = "<|im_end|>" + "ab" * 100 + "é" * 5_000
    state = builtin_compiling.compile(source.json_of({"const": const}, "p")).begin()
    text_of = {i: token for token, i in compiled_vocabulary(builtin_compiling.tokenizer).items()}
    rest = f'"{const}"'.encode()
    for _ in range(200):
        tokens = state.forced()
        assert 16 <= len(tokens) <= FORCED_BYTES
        assert state.num_allowed(tokens) == len(tokens)
        assert rest.startswith(b"".join(text_of[token] for token in tokens))
        assert tokens[0] in allowed(state)
        state.advance(tokens[0])
        rest = rest.removeprefix(text_of[tokens[0]])


EXPLOSIVE = "[ab]*a[ab]{60}c"
"""Its lexer has as many states as there are ways to go on."""


def test_an_answer_that_uses_the_lexer_up_ends_no_other(builtin_compiling: Compiling) -> None:
    """Answers of one grammar share a lexer: one that exceeded its limit of states failed all of them."""
    compiled = builtin_compiling.compile(source.regex_of(EXPLOSIVE, "p"))
    letters = [compiled_vocabulary(builtin_compiling.tokenizer)[letter] for letter in (b"a", b"b")]
    chance, others, shared = random.Random(1), [compiled.begin() for _ in range(3)], compiled._matcher
    alone, costly = CompiledGrammar(compiled._compile, compiled.vocab_size, compiled.ends).begin(), compiled.begin()
    begun = [chance.choice(letters) for _ in range(20)]
    for state in (*others, alone):
        for token in begun:
            state.advance(token)
    ahead = others[0].copy()
    while compiled._matcher is shared and costly.error is None:
        costly.allowed()
        costly.advance(chance.choice(letters))
    assert shared.deep_copy().consume_token(letters[0]) is False, "it is used up"
    for token in [chance.choice(letters) for _ in range(100)]:
        for state in (ahead, *others):
            assert state.forced() == alone.forced()
            assert np.array_equal(state.allowed(), alone.allowed())
        for state in (ahead, *others, alone, costly):
            state.advance(token)
            assert (state.error, state.is_over) == (None, False)
    assert allowed(compiled.begin()) >= set(letters)


@pytest.mark.parametrize("letters", ["bcdef", "bcdefghijk"])
@pytest.mark.parametrize("states", ["of the parser", "of the lexer"])
def test_what_a_vocabulary_can_follow_one_of_twice_its_size_can(letters: str, states: str) -> None:
    """A mask may try all tokens, of words and blanks here."""
    ends = ["".join(end) for size in range(14) for end in product("a ", repeat=size)]
    words = [f"{letter}{end}".encode() for letter in letters for end in ends]
    trie = Vocabulary((b"<end>", b".", *words), (0,), (0,)).build()
    many = {
        "of the parser": source.grammar_of('start: WORD (" " WORD)* "."\nWORD: /[a-z]{1,12}/', "p"),
        "of the lexer": source.regex_of("|".join(f"{letter}[a ]*a[a ]{{8}}{letter}" for letter in letters), "p"),
    }
    compile_ = partial(compile_matcher, trie, many[states].text)
    assert CompiledGrammar(compile_, len(words) + 2, (0,)).error == ""


def test_a_step_that_no_lexer_can_do_ends_its_own_answer(builtin_compiling: Compiling) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    costly = "|".join(f"{letter}[a-z]{{60}}{number}" for number, letter in enumerate(letters))
    text = source.regex_of(f"[ab]*c|d{{64}}[a-z]*({costly})", "p").text
    compiler, ids = builtin_compiling.compiler, compiled_vocabulary(builtin_compiling.tokenizer)
    assert compiler._base is not None
    compiled = CompiledGrammar(partial(compile_matcher, compiler._base, text), compiler._vocab_size, compiler._ends)
    cheap, state = compiled.begin(), compiled.begin()
    cheap.advance(ids[b"a"])
    for _ in range(66):
        state.allowed()
        state.advance(ids[b"d"])
    assert "too many expressions" in (state.error or "")
    assert allowed(state) == set(compiler._ends)
    assert {ids[b"a"], ids[b"b"], ids[b"c"]} <= allowed(cheap)
    cheap.advance(ids[b"c"])
    assert cheap.is_over


@pytest.mark.parametrize(("error", "says"), [(asyncio.CancelledError, ""), (EngineOverloaded, "killed by the system")])
def test_the_next_is_served_after_one_that_did_not_end(builtin_compiling: Compiling, error, says: str) -> None:
    compiler = builtin_compiling.compiler
    grammar = source.choice_of([f"not known yet {says}"], "p")

    async def scenario() -> None:
        await compiler.compile(source.choice_of([f"before {says}"], "p"))
        process, known = compiler.examiner._process, len(compiler._verdicts)
        assert process is not None
        # However fast it is: it does not get to the grammar.
        process.send_signal(signal.SIGSTOP)
        task = asyncio.create_task(compiler.compile(grammar))
        while process.stdout._waiter is None:
            await asyncio.sleep(0)
        (process.kill if says else task.cancel)()
        with pytest.raises(error, match=says or None):
            await task
        assert await compiler.compile(source.choice_of([f"after {says}"], "p"))
        assert len(compiler._verdicts) == known + 1, "its cost is not known yet"

    builtin_compiling.run(scenario())


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("abc", 3),
        ("a{5}", 5),
        ("(ab){3}c", 7),
        ("(a{0,500}){0,500}", 250_000),
        (r"[a-z\]{9}]{4}", 4),
        (r"\p{L}{3}\{9}", 6),
        ("a{x}", 4),
        ("(a|b{2,}){3,4}", 12),
        ("((((a{9}){9}){9}){9}){9}", 9**5),
        ("a{", 2),
        ("a" + "{999999999}" * 1000, 10**15),
    ],
)
def test_repetitions(pattern: str, count: int) -> None:
    assert repetitions(pattern) == count


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ('start: "a"', True),
        ('start: "a" start', False),
        ('start: "a" start | "b"', True),
        ('start: "a" start?', True),
        ("start: A (start)*\nA: /x/", True),
        ("start: A start+\nA: /x/", False),
        ("start: A start{0,3}\nA: /x/", True),
        ("start: A start{2,}\nA: /x/", False),
        ("start: A start~0..2\nA: /x/", True),
        ("start: A start~1..2\nA: /x/", False),
        ('start: left right\nleft: "(" right ")"\nright: "[" left "]" | left', False),
        ('start: left right\nleft: "(" right ")"\nright: "[" left "]" | left\n  | "x" // end\n', True),
        ('start: ("a" | start) start\n', False),
        ('start: ("a" | start) ("b" | start)\n', True),
        ('start: "\\" start" end\nend: "//" | end', True),
        ("start: value start\nvalue: %json {}", True),
        ("begin: begin", True),
    ],
)
def test_grammars_that_end(text: str, ends: bool) -> None:
    assert lark_can_end(text) == ends


BLANKS = " " * 200_000
MANY = [f"x{i}" for i in range(14_000)]
LOOP = {"type": "object", "properties": {"x0": {"$ref": "#/$defs/a"}}, "required": MANY}


@pytest.mark.parametrize(
    "make",
    [
        partial(source.grammar_of, f"start: a{{{BLANKS}x"),
        partial(source.grammar_of, f"start: a{{{BLANKS}5}}\na: /x/"),
        partial(source.json_of, {"allOf": [{"$id": "a"}] * 4000 + [{"$ref": "#/x"}] * 4000}),
        partial(source.json_of, {"anyOf": [{"$ref": "#/$defs/a"}] * 3300, "$defs": {"a": LOOP}}),
        partial(
            source.json_of, {"allOf": [{"$ref": "#/$defs/a"}] * 3300, "$defs": {"a": {"$ref": "#/" + "x/" * 60_000}}}
        ),
        partial(source.json_of, {"required": ["x"] * 1_000_000}),
        partial(source.json_of, {"oneOf": [{"type": "object", "required": MANY[:n]} for n in (7_000, 7_001)]}),
        partial(source.json_of, {"oneOf": [{"enum": [*range(n, 300 * n, n)]} for n in range(1, 150)]}),
        partial(
            source.json_of,
            {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "oneOf": [{"$ref": "#/$defs/a"}] * 9},
        ),
    ],
    ids=["no count", "a count", "ids", "required", "a long reference", "too large", "names", "numbers", "itself"],
)
def test_no_text_takes_long_to_look_through(make: Callable[[str], object]) -> None:
    """In this process, and under the interpreter's lock: some of these took minutes."""
    begun_s = time.process_time()
    with suppress(InvalidRequest):
        make("p")
    assert time.process_time() - begun_s < 5


def test_what_is_malformed_or_too_deep_to_look_through_is_left_to_the_compiler() -> None:
    """No depth that the text allows overflows this process's stack."""
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)}
    assert source.json_of({"$ref": "#/$defs/a0", "$defs": chain}, "p")
    assert source.grammar_of("start: " + "(" * 3000 + '"a"' + ")" * 3000, "p")
    assert source.json_of({"patternProperties": 5}, "p")


def test_tokens_of_the_last_tokenizers_are_kept(builtin_tokenizer: Tokenizer) -> None:
    """Those of a vocabulary are some 24 MB, a hundred times a small grammar."""
    grammar = source.regex_of("[ab]{1,3}", "p")
    first = builtin_tokenizer.vocab_size
    owns = [builtin_tokenizer.extended([AddedToken(first, f"<own{n}>", special=False)]) for n in range(MAX_TRIES + 2)]
    with closing(Compiling(builtin_tokenizer)) as compiling:
        compile_for = partial(compiling.compiler.compile, grammar)
        base, used = compiling.compile(grammar), compiling.run(compile_for(own=owns[0]))
        for own in owns:
            compiling.run(compile_for(own=own))
            assert compiling.run(compile_for(own=owns[0])) is used
            assert compiling.compile(grammar) is base
        assert set(compiling.compiler._tries) == {owns[0], *owns[-MAX_TRIES + 1 :]}


def test_few_compiled_grammars_outlive_their_answers(builtin_tokenizer: Tokenizer) -> None:
    """Answers make them grow: by 390 MB from a text of 1 KB. What is kept of all is that they may be compiled."""
    grammars = [source.regex_of(f"[ab]{{1,{n}}}", "p") for n in range(1, KEPT_GRAMMARS + 3)]
    with closing(Compiling(builtin_tokenizer)) as compiling:
        states = [compiling.compile(grammar).begin() for grammar in grammars]
        assert [compiling.compile(grammar) for grammar in grammars] == [state._grammar for state in states]
        compiling.run(compiling.compiler.aclose())
        del states
        assert {text for _, text, _ in compiling.compiler._in_use} == {g.text for g in grammars[-KEPT_GRAMMARS:]}
        assert compiling.accepts(grammars[0], "a", "aa") == [True, False]
        assert compiling.num_started == 1, "it was not tried again"


def test_requests_that_come_at_once_with_one_grammar_share_it(builtin_tokenizer: Tokenizer) -> None:
    grammar = source.regex_of("[ab]{1,3}", "p")
    with closing(Compiling(builtin_tokenizer)) as compiling:
        compiling.compile(grammar)

        async def scenario() -> list[object]:
            return await asyncio.gather(*(compiling.compiler.compile(grammar, "key") for _ in range(2 * MAX_UNTRIED)))

        assert len(set(compiling.run(scenario()))) == 1


def test_ends_outside_of_the_vocabulary_are_no_ends() -> None:
    tokenizer = sentencepiece(WORDS, prepends=True)
    assert Vocabulary.of(tokenizer, tokenizer.vocab_size, [2, 10**6]).ends == (2,)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset({10**6}))
    with pytest.raises(InvalidRequest, match="names no token that ends an answer"):
        asyncio.run(compiler.compile(source.choice_of(["a"], "p")))


def test_a_process_that_does_not_start_is_no_fault_of_the_request(tmp_path: Path) -> None:
    """It may be memory that is short; the next request tries again, though one was being started ahead of it."""

    async def scenario() -> None:
        script = tmp_path / "child.py"
        command = (sys.executable, str(script))
        script.write_text("")
        examiner = GrammarSandbox(b"", command)
        for _ in range(2):
            with pytest.raises(EngineOverloaded, match="does not start"):
                await examiner.examine("x")
        with pytest.raises(EngineOverloaded, match="does not start"):
            await GrammarSandbox(b"", (str(tmp_path / "missing"),)).examine("x")
        examiner._starting = asyncio.create_task(examiner._started())
        await asyncio.wait([examiner._starting])
        script.write_text('for _ in "ab":\n    print(\'{"error": null}\', flush=True)\ninput()\n')
        assert await examiner.examine("x") is None
        await examiner.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["binary", "password", "byte", "decimal", "regex", "json-pointer", "foo", "unknown"])
def test_formats_that_are_not_enforced_are_annotations(builtin_compiling: Compiling, name: str) -> None:
    assert builtin_compiling.accepts(source.json_of({"type": "string", "format": name}, "schema"), '"anything"') == [
        True
    ]


def test_formats_that_are_enforced(builtin_compiling: Compiling) -> None:
    page = (Path(__file__).parents[4] / "docs" / "structured-output.md").read_text("utf-8")
    for name in source.FORMATS:
        grammar = source.json_of({"type": "string", "format": name}, "schema")
        assert builtin_compiling.accepts(grammar, '"a b c"') == [False], name
        assert f"`{name}`" in page


def test_only_the_format_of_a_schema_is_one() -> None:
    """Neither a property of that name, nor what is written in data, and wherever schemas stand."""
    data = {"enum": [{"format": "foo"}], "default": {"format": "foo"}, "const": {"format": "foo"}}
    schema = {
        "properties": {"format": {"type": "string"}, "enum": {"format": "foo"}, "x": data},
        "items": [{"format": "foo", "type": "string"}, {"format": "date"}],
        "$defs": {"default": {"anyOf": [{"format": "foo"}, True]}},
        "format": "foo",
    }
    checked = source.checked_schema(schema, "schema")
    del checked["x-guidance"]
    assert checked == {
        "properties": {"format": {"type": "string"}, "enum": {}, "x": data},
        "items": [{"type": "string"}, {"format": "date"}],
        "$defs": {"default": {"anyOf": [{}, True]}},
        "additionalProperties": False,
    }


def test_schemas_that_end_are_not_refused() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "all": {"items": {"$ref": "#"}}},
        "required": ["left"],
    }
    twice = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "string"}}}
    for schema in (tree, twice, {"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"type": "null"}}}, {"$ref": "#/none"}):
        assert source.json_of(schema, "p")
