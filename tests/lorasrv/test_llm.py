"""Offline use: as the server refuses and answers, and nothing is left behind."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engine import GREEDY, PROMPT, offline_engine

from lorasrv.config import Limits
from lorasrv.errors import ContextLengthExceeded, EngineDead, InvalidRequest, PoisonRequest, RequestTimeout
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import BeamOptions
from lorasrv.text.bad_words import bad_word_ids
from lorasrv.worker import adapter_loader
from lorasrv.worker.adapter_source import HostAdapterStore


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_refusals_and_interrupts_leave_nothing_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with offline_engine(model) as llm:
        with pytest.raises(InvalidRequest, match=r"\[0, 384\)"):
            llm.generate([[384]], GREEDY)
        with pytest.raises(InvalidRequest, match="empty"):
            llm.generate([PROMPT, []], GREEDY)
        for _ in range(2):
            llm.engine._parts.poison.record([llm.input_processor.process(RequestId("bad"), PROMPT[1:], GREEDY)])
        with pytest.raises(PoisonRequest, match="2 times"):
            llm.generate([PROMPT, PROMPT[1:]], GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(llm.tokenizer, "encode", _interrupted)
            with pytest.raises(ContextLengthExceeded, match="tokens, but the text of prompt has at least"):
                llm.generate(["a" * 100_000], GREEDY)
            patch.setattr(llm, "_step", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT] * 3, GREEDY)
        assert not llm.engine.has_requests
        assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 20
        llm.engine.check_integrity()


@pytest.mark.parametrize("place", ["fetch_pinned", "pinned"])
def test_a_load_that_ctrl_c_ends_is_done_again(
    model: Path, adapter_dirs: dict[str, Path], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C ends it in its middle; later calls would wait for it for ever."""
    with offline_engine(model, adapter_dirs) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(HostAdapterStore, place, _interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT] * 2, GREEDY, ["one", "two"])
        assert all(answer.token_ids for answer in llm.generate([PROMPT] * 2, GREEDY, ["one", "two"]))
        llm.engine.check_integrity()


def test_what_calls_cost_is_not_kept(model: Path, adapter_dirs: dict[str, Path]) -> None:
    """Nobody takes it: it would grow with every adapter."""
    with offline_engine(model, adapter_dirs) as llm:
        for adapter in (None, "one", "two"):
            assert llm.generate([PROMPT], GREEDY, [adapter])[0].token_ids
            spent = llm.engine.step_stats.take()
            assert (spent.seconds, spent.moved) == ({}, {})


@pytest.mark.parametrize("place", ["_load", "_copy", "_plan"])
def test_ctrl_c_waits_until_the_accounts_are_whole(
    model: Path, adapter_dirs: dict[str, Path], alone, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an adapter is read or copied, or in the middle of a plan; the next call finds all as it should be."""
    with offline_engine(model, adapter_dirs) as llm:
        target = llm.engine._scheduler._planner if place == "_plan" else adapter_loader
        name = place.strip("_") if place == "_plan" else place
        real, left = getattr(target, name), [1]

        def interrupted(*args: Any) -> Any:
            if left:
                left.pop()
                signal.raise_signal(signal.SIGINT)
            return real(*args)

        monkeypatch.setattr(target, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT], GREEDY, ["one"])
        llm.engine.check_integrity()
        assert not llm.engine.has_requests
        assert list(llm.generate([PROMPT], GREEDY, ["one"])[0].token_ids) == alone(PROMPT, GREEDY, "one")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_a_step_that_cannot_be_repeated_nothing_is_answered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a pass of several processes: the others would answer the next one with this one's."""
    with offline_engine(model) as llm:
        executor, closed = llm.engine._executor, list[bool]()
        with monkeypatch.context() as patch:
            patch.setattr(executor, "collect", _interrupted)
            patch.setattr(executor, "recover", lambda: False)
            patch.setattr(executor, "close", lambda: closed.append(True))
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPT], GREEDY)
        assert closed == [True]
        for _ in range(2):
            with pytest.raises(EngineDead, match="load the model again"):
                llm.generate([PROMPT], GREEDY)


def test_calls_of_several_threads_take_turns(model: Path, adapter_dirs: dict[str, Path], alone) -> None:
    names = ["one", "two", None]
    with offline_engine(model, adapter_dirs) as llm, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda name: llm.generate([PROMPT] * 2, GREEDY, [name] * 2), names * 2))
    for name, answers in zip(names * 2, found, strict=True):
        assert [list(answer.token_ids) for answer in answers] == [alone(PROMPT, GREEDY, name)] * 2


def test_prompts_are_texts_or_token_ids(model: Path) -> None:
    with offline_engine(model) as llm:
        listed, of_numpy = llm.generate([[5, 9], np.array([5, 9])], GREEDY)
        assert listed.token_ids == of_numpy.token_ids
        wrong: list[Any]
        for wrong, kind in (([5, 9], "int"), ([b"hello"], "bytes"), ([[5, 1.5]], "list"), ([None], "NoneType")):
            with pytest.raises(InvalidRequest, match=f"each of prompts must be a text or a list .* not {kind}"):
                llm.generate(wrong, GREEDY)


def test_one_text_is_no_list_of_prompts(model: Path) -> None:
    with offline_engine(model) as llm, pytest.raises(InvalidRequest, match=r"give a list: \[text\]"):
        llm.generate("Alice was", GREEDY)


def test_lists_of_another_length_are_named(model: Path) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("adapter_ids", [None, None], "adapter_ids has 2 entries, prompts 1; give one for each prompt"),
        ("adapter_ids", "b", "adapter_ids is one text; give a list with one for each prompt"),
        ("sampling", [], "sampling has 0 entries, prompts 1; give one for each prompt"),
    ]
    with offline_engine(model) as llm:
        for param, given, says in cases:
            asked = {"sampling": GREEDY} | {param: given}
            with pytest.raises(InvalidRequest, match=says) as refused:
                llm.generate(["Alice"], **asked)
            assert refused.value.param == param
        with pytest.raises(InvalidRequest, match="adapter_ids has 2 entries, prompts 1"):
            llm.beam_search(["Alice"], GREEDY, BeamOptions(2), [None, None])
        assert not llm.engine.has_requests


def test_a_rate_is_waited_for_and_a_deadline_is_an_error(model: Path, adapter_dirs: dict[str, Path], alone) -> None:
    with offline_engine(model, adapter_dirs, max_num_seqs=1, adapter_limits=Limits(tokens_per_s=60.0)) as llm:
        answers = llm.generate([PROMPT] * 4, GREEDY, ["one"] * 4)
        assert [list(answer.token_ids) for answer in answers] == [alone(PROMPT, GREEDY, "one")] * 4
    with (
        offline_engine(model, max_num_seqs=1, queue_timeout_s=1e-6) as llm,
        pytest.raises(RequestTimeout, match="queue timeout"),
    ):
        llm.generate([PROMPT, PROMPT], GREEDY)


def test_defaults_are_refused_and_never_left_out_silently(
    model: Path, adapter_dirs: dict[str, Path], alone: Callable[..., list[int]]
) -> None:
    with offline_engine(model, adapter_dirs) as llm:
        prompted = '{"system":"You are Mia."}'
        llm.store.register_defaults("muse", prompted)
        llm.store.register_defaults("one", prompted, llm.store.resolve("one"))
        for name in ("muse", "one", "one@2"):
            with pytest.raises(InvalidRequest, match="ignore_defaults=True") as refused:
                llm.generate([PROMPT, PROMPT], GREEDY, ["one@1", name])
            assert name.partition("@")[0] in str(refused.value)
            with pytest.raises(InvalidRequest, match="ignore_defaults=True"):
                llm.beam_search([PROMPT], GREEDY, BeamOptions(2), [name])
        assert not llm.engine.has_requests
        names = ["muse", "one", "one@1"]
        answers = llm.generate([PROMPT] * 3, GREEDY, names, ignore_defaults=True)
        plain = [alone(PROMPT, GREEDY, name) for name in (None, "one", "one")]
        assert [list(answer.token_ids) for answer in answers] == plain
        assert llm.beam_search([PROMPT], GREEDY, BeamOptions(2), ["one"], ignore_defaults=True)


def test_bad_words_and_allowed_tokens_hold(model: Path) -> None:
    with offline_engine(model) as llm:
        plain = llm.generate([PROMPT], GREEDY)[0]
        words = {llm.tokenizer.decode([token]): token for token in plain.token_ids}
        word = next(w for w, token in words.items() if w.strip() and llm.tokenizer.encode(w, False) == [token])
        other = llm.generate([PROMPT], replace(GREEDY, bad_words=(word,)))[0]
        assert plain.token_ids != other.token_ids
        banned = {ids[0] for ids in bad_word_ids([word], llm.tokenizer, 384) if len(ids) == 1}
        assert banned & set(plain.token_ids)
        assert not banned & set(other.token_ids)
        assert not bad_word_ids([word], llm.tokenizer, min(banned)), "a token that the model lacks"
        few = (7, 11, 300)
        assert set(llm.generate([PROMPT], replace(GREEDY, allowed_token_ids=few))[0].token_ids) <= set(few)
        with pytest.raises(InvalidRequest, match=r"allowed_token_ids must contain token ids in \[0, 384\)"):
            llm.generate([PROMPT], replace(GREEDY, allowed_token_ids=(384,)))
