"""A budget for reasoning: what must come next, against a definition by the whole text, with and without a grammar."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from compiled_grammars import compiled_grammar, with_tokens
from hypothesis import example, given
from hypothesis import strategies as st
from spelled_engine import tiny_tokenizer
from tiny_tokenizers import sentencepiece

from lorasrv.request import ConstraintState
from lorasrv.sampling_params import TextOptions
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.reasoning import Markers, ReasoningReader
from lorasrv.text.reasoning_budget import BudgetState, ReasoningBudget
from lorasrv.text.structured_output.grammar import choice_of
from lorasrv.text.structured_output.matcher import GrammarState
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.text.tool_parsers.base import TextReader, Tool
from lorasrv.text.tool_parsers.formats import HERMES

MARKERS = "<think>", "</think>"
THINK = Markers(*MARKERS)
SPELLED = tiny_tokenizer()
BITS = (*MARKERS, "<", "</", "thi", "nk>", "\n", " ", "\u3000", "a", "é", "<s>")


TOKENIZERS = {
    "bytes": SPELLED,
    "tokens": with_tokens(SPELLED, *MARKERS, special=False),
    "special tokens": with_tokens(SPELLED, *MARKERS, special=True),
    "pieces": sentencepiece(["</", "</think", *"</think>a\n"]),
}


def budget_of(tokenizer: Tokenizer, num_tokens: int, *, is_open: bool) -> ReasoningBudget:
    text = TextOptions(shown_token_ids=THINK.shown(tokenizer))
    return ReasoningBudget(THINK, is_open, num_tokens, tokenizer, text)


def text_of(budget: ReasoningBudget, ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(budget.tokenizer, budget.text)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def num_in_front(budget: ReasoningBudget, ids: Sequence[int]) -> int | None:
    """The number of tokens before the reasoning; None: it has not begun."""
    if budget.is_open:
        return 0
    begun = (n for n in range(len(ids) + 1) if text_of(budget, ids[:n]).lstrip().startswith(THINK.begin))
    return next(begun, None)


def forced(budget: ReasoningBudget, ids: Sequence[int]) -> int | None:
    """By definition: the token that must follow these, the first of an answer."""
    first = num_in_front(budget, ids)
    reasoning = text_of(budget, ids).lstrip().removeprefix("" if budget.is_open else THINK.begin)
    if first is None or THINK.end in reasoning or len(ids) - first < budget.num_tokens:
        return None
    end = budget.tokenizer.encode_behind(THINK.end)
    written = max(n for n in range(len(end)) if list(ids[len(ids) - n :]) == end[:n])
    return end[written]


def only(state: ConstraintState) -> int | None:
    """The token that alone may come next; None: any."""
    if (words := state.allowed()) is None:
        return None
    [token] = [32 * word + bit for word in range(len(words)) for bit in range(32) if words[word] >> bit & 1]
    return token


@given(
    name=st.sampled_from(list(TOKENIZERS)),
    wanted=st.lists(st.sampled_from(BITS), max_size=12),
    num_tokens=st.integers(0, 12),
    is_open=st.booleans(),
    drafted=st.lists(st.sampled_from(BITS), max_size=3),
)
@example(name="bytes", wanted=["<think>", "a", "</", "thi"], num_tokens=3, is_open=False, drafted=["nk>", "a"])
@example(name="bytes", wanted=["\u3000", "<think>", "é"], num_tokens=1, is_open=False, drafted=[])
@example(name="tokens", wanted=["</", "thi", "nk>", "a"], num_tokens=3, is_open=True, drafted=["</think>"])
@example(name="special tokens", wanted=["<think>", "</", "a"], num_tokens=2, is_open=False, drafted=["</think>", "a"])
@example(name="pieces", wanted=["é", "a"], num_tokens=1, is_open=True, drafted=["</think>"])
@example(name="bytes", wanted=[*"aaaaaaaa", "<s>", "\n"], num_tokens=0, is_open=True, drafted=[])
def test_the_end_is_forced_where_the_budget_is_used_up(
    name: str, wanted: list[str], num_tokens: int, is_open: bool, drafted: list[str]
) -> None:
    budget = budget_of(TOKENIZERS[name], num_tokens, is_open=is_open)
    drafts = [token for bit in drafted for token in budget.tokenizer.encode_behind(bit)]
    state, ids, free = budget.begin(), list[int](), 0
    for token in (token for bit in wanted for token in budget.tokenizer.encode_behind(bit)):
        must = forced(budget, ids)
        assert must is None or len(ids) >= free
        if (first := num_in_front(budget, ids)) is not None and state.rest is state:
            assert len(ids) + state.num_free == max(len(ids), first + num_tokens), "the number is exact"
        free = max(free, len(ids) + state.num_free)
        assert only(state) == must
        assert state.forced()[:1] == ([] if must is None else [must])
        follows = [forced(budget, ids + drafts[:at]) in (None, draft) for at, draft in enumerate(drafts)]
        assert state.num_allowed(drafts) == [*follows, False].index(False)
        ids.append(token if must is None else must)
        state.advance(ids[-1])
    assert (state.error, state.is_over, budget.ends_answer) == (None, False, False)
    [letter] = budget.tokenizer.encode_behind("a")
    for _ in range(num_tokens + len(budget.end_ids) + 1):
        ids.append(letter if (must := only(state)) is None else must)
        state.advance(ids[-1])
    read = ReasoningReader(THINK, TextReader(), Detokenizer(budget.tokenizer, budget.text), is_open=is_open)
    read.count(ids)
    read.push(text_of(budget, ids))
    assert read.content_at is not None, "a reader finds the end, too"
    assert state.rest is None
    first = num_in_front(budget, ids)
    # Line breaks behind the marker, and tokens without text before them, are in front of the content, too.
    dropped = wanted.count("\n") + wanted.count("<s>")
    assert read.num_tokens <= (0 if first is None else first + num_tokens + len(budget.end_ids) + dropped)


def test_a_token_of_a_long_answer_costs_no_more_than_one_of_a_short_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BudgetState, "copy")  # it takes time in proportion to the answer
    budget = budget_of(SPELLED, 1100, is_open=False)
    state = budget.begin()
    for text in ("\u3000", THINK.begin, "a"):
        for token in budget.tokenizer.encode_behind(text) * (1 if text == THINK.begin else 1000):
            state.advance(token)
        assert len(state._held) < len(THINK.end)
    assert state.num_allowed([token] * 100) == 100
    assert state._is_within


# With a grammar -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_special", [None, False, True])
async def test_a_grammar_goes_on_behind_a_forced_end(
    builtin_tokenizer: Tokenizer, is_open: bool, is_special: bool | None
) -> None:
    """Wherever the reasoning is cut: within a character, or within the closing marker."""
    tokenizer = (
        builtin_tokenizer if is_special is None else with_tokens(builtin_tokenizer, *MARKERS, special=is_special)
    )
    grammar = THINK.in_front_of(choice_of(["yes", "no"], "p"), tokenizer, is_open=is_open)
    compiled = await compiled_grammar(tokenizer, grammar)
    begin = [] if is_open else tokenizer.encode_behind(THINK.begin)
    thought = tokenizer.encode_behind(" 漢字 🦜 </thin")
    answer = tokenizer.encode_behind("\n\nyes")
    for num_tokens in range(len(thought) + 1):
        budget = replace(budget_of(tokenizer, num_tokens, is_open=is_open), grammar=compiled)
        assert budget.ends_answer
        state, ids = budget.begin(), list[int]()
        for token in [*begin, *thought]:
            must = only(state) if state.forced() else token
            ids.append(must if must is not None else token)
            state.advance(ids[-1])
            if len(ids) >= len(begin) + num_tokens and not state.forced():
                break
        while rest := state.forced():
            assert state.num_allowed([*rest, *answer]) == len(rest) + len(answer)
            state.advance(rest[0])
            ids.append(rest[0])
        assert ids[: len(begin) + num_tokens] == [*begin, *thought][: len(begin) + num_tokens]
        assert text_of(budget, ids).endswith(THINK.end)
        assert len(ids) <= len(begin) + num_tokens + len(budget.end_ids)
        assert state.num_allowed(tokenizer.encode_behind("maybe")) == 0
        rest = state.rest
        assert isinstance(rest, GrammarState)
        for each in (state.copy(), rest):
            for token in answer:
                each.advance(token)
            assert each.error is None
            assert each.is_over


@pytest.mark.parametrize("is_special", [None, True])
async def test_a_call_that_was_begun_in_the_reasoning_is_cut(
    builtin_tokenizer: Tokenizer, is_special: bool | None
) -> None:
    """Without a part of its own for reasoning, calls may stand in it."""
    tokenizer = builtin_tokenizer if is_special is None else with_tokens(builtin_tokenizer, *MARKERS, special=True)
    calls = HERMES.unforced_grammar([Tool("clock", {"type": "object"}, is_strict=True)], tokenizer)
    compiled = await compiled_grammar(tokenizer, THINK.with_markers(calls, tokenizer))
    said = tokenizer.encode_behind('<think>Now <tool_call>\n{"name": "clock", "argu')
    begun = len(tokenizer.encode_behind("<think>"))
    budget = replace(budget_of(tokenizer, len(said) - begun, is_open=False), grammar=compiled)
    state = budget.begin()
    assert state.num_allowed([*said, *tokenizer.encode_behind("ments")]) == len(said)
    for token in [*said, *budget.end_ids]:
        state.advance(token)
    wrong, right = (tokenizer.encode_behind(f'So <tool_call>\n{{"name": "{name}", ') for name in ("watch", "clock"))
    assert state.num_allowed(wrong) < len(wrong)
    assert state.num_allowed(right) == len(right)
    assert state.error is None
