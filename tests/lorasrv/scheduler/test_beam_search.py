"""Beam search: transformers' answers, whatever shares the batch, is preempted or aborted; every page accounted for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_scheduler import KEYS, Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from mispredict import expect_short_answers
from tiny_engine import checked_engine

from adapter_store.spec import AdapterKey
from lorasrv.config import Limits
from lorasrv.engine.input_processor import further_choices
from lorasrv.errors import ContextLengthExceeded, InvalidRequest, LimitExceeded
from lorasrv.llm import LLM
from lorasrv.outputs import FinishReason, Refusal, RequestId
from lorasrv.request import OnCold
from lorasrv.sampling_params import BeamOptions, SamplingParams
from lorasrv.scheduler.beam_search import BeamState
from sgmv_kernels.formats.kv_format import KV_FORMATS, CodesKV

VOCAB = 384
CODES = [name for name, kv_format in KV_FORMATS.items() if isinstance(kv_format, CodesKV)]
PROMPTS = [[10 + (7 * i) % 300 for i in range(n)] for n in (16, 45)]
TOKENS = 14
_engine = partial(checked_engine, target_itl_ms=None)
Oracle = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def oracle(model: Path, adapter_dirs: dict[str, Path]) -> Oracle:
    """oracle(prompt, adapter, ends, max_tokens, beams) -> the answers of transformers and PEFT, best first."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def model_of(name: str | None) -> Any:
        base = AutoModelForCausalLM.from_pretrained(model).eval()
        return base if name is None else PeftModel.from_pretrained(base, adapter_dirs[name]).eval()

    models = {name: model_of(name) for name in (None, "two", "three")}

    def generate(
        prompt: list[int], name: str | None, ends: list[int] | None, max_tokens: int, beams: BeamOptions
    ) -> list[list[int]]:
        config = models[name].generation_config
        config.eos_token_id = ends
        with torch.inference_mode():
            found = models[name].generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=beams.width,
                num_return_sequences=beams.width,
                length_penalty=beams.length_penalty,
                early_stopping=beams.early_stopping,
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=VOCAB - 1,
            )
        return [_unpadded(row[len(prompt) :].tolist()) for row in found]

    return generate


def _unpadded(tokens: list[int]) -> list[int]:
    while tokens and tokens[-1] == VOCAB - 1:
        tokens.pop()
    return tokens


@pytest.fixture(scope="module")
def llm(model: Path, adapter_dirs: dict[str, Path]) -> Iterator[LLM]:
    """A roomy one."""
    with _engine(model, adapter_dirs) as llm:
        yield llm


def _answers(done: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in done]


@pytest.mark.parametrize(
    ("name", "beams"),
    [
        (None, BeamOptions(1)),
        pytest.param("two", BeamOptions(2), marks=pytest.mark.long),
        (None, BeamOptions(4, length_penalty=0.0, early_stopping="never")),
        ("two", BeamOptions(4, length_penalty=2.0, early_stopping="never")),
        (None, BeamOptions(3, length_penalty=-1.0)),
        ("two", BeamOptions(5, early_stopping=True)),
        pytest.param(None, BeamOptions(8), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_answers_equal_transformers(llm: LLM, oracle: Oracle, beams: BeamOptions, name: str | None) -> None:
    free = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    plain = [one for done in llm.beam_search(PROMPTS, free, beams, [name] * 2) for one in done]
    # Tokens that do come up end answers: the tiny model's own end-of-sequence token hardly does.
    common = [token for one in plain for token in one.token_ids[3:9]]
    ends = sorted(set(common), key=lambda token: (common.count(token), token))[-3:]
    ended = SamplingParams(max_tokens=TOKENS, ignore_eos=True, stop_token_ids=tuple(ends))
    for sampling, tokens in ((free, None), (ended, ends)):
        for prompt, done in zip(PROMPTS, llm.beam_search(PROMPTS, sampling, beams, [name] * 2), strict=True):
            want = oracle(prompt, name, tokens, TOKENS, beams)
            assert _answers(done) == want if beams.width > 1 else _answers(done)[0] == want[0]
            for one in done:
                stopped = tokens is not None and one.token_ids[-1] in tokens
                assert one.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def _group(llm: LLM, prompt: list[int], name: str | None, beams: BeamOptions, tokens: int = 40) -> list[Any]:
    first = llm._message(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), llm._find(name), beams)
    others = [RequestId(f"{first.request_id}.{i}") for i in range(1, beams.width)]
    return [first, *further_choices(first, others)]


@pytest.mark.parametrize(
    ("preemption", "pages", "kernels"),
    [
        ("recompute", 30, {}),
        pytest.param("swap", 30, {}, marks=pytest.mark.long),
        *(("swap", 20, {"kv_cache_dtype": name, "kernels": "numba", "quantization": "int4"}) for name in CODES),
    ],
    ids=str,
)
def test_beams_and_others_in_a_pool_that_is_too_small(
    model, adapter_dirs, preemption: str, pages: int, kernels: dict[str, Any]
) -> None:
    """Groups on two adapters and the base beside plain requests; adapters come and go, requests are preempted."""
    work = [(PROMPTS[1], "two", 4), (PROMPTS[0], None, 3), (PROMPTS[1][5:], "three", 2)]
    plain = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [PROMPTS[1][i:] for i in range(6)]
    names = ["one", None, "three", "two", "one", None]
    with _engine(model, adapter_dirs, **kernels) as llm:
        want = [_answers(llm._run(_group(llm, prompt, name, BeamOptions(width)))) for prompt, name, width in work]
        want_plain = _answers(llm.generate(prompts, plain, names))
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 20, **kernels}
    with _engine(model, adapter_dirs, pages, preemption_mode=preemption, **options) as small:
        expect_short_answers(small.engine._parts.scheduler.predictor)
        groups = [_group(small, prompt, name, BeamOptions(width)) for prompt, name, width in work]
        others = [small._message(prompt, plain, small._find(name)) for prompt, name in zip(prompts, names, strict=True)]
        messages = [*others[:3], *groups[0], *groups[1], *others[3:], *groups[2]]
        done = dict(zip([m.request_id for m in messages], _answers(small._run(messages)), strict=True))
        shown = small.engine.metrics.stats()
        assert shown.preemptions_total > 0, "the pool was meant to be too small"
        assert shown.adapter_evictions_total > 0
    assert [[done[m.request_id] for m in group] for group in groups] == want
    assert [done[m.request_id] for m in others] == want_plain


def test_pages_are_shared_and_copied_on_write(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, held = llm.engine.metrics.stats().copied_pages_total, []
    runner = llm.engine._parts.executor.runner
    run = runner.run

    def noted(step: Any) -> Any:
        held.append(len({page for scheduled in step.requests for page in scheduled.page_table}))
        return run(step)

    monkeypatch.setattr(runner, "run", noted)
    llm._run(_group(llm, PROMPTS[1] * 4, "two", BeamOptions(8), tokens=20))
    assert max(held) < 2 * 8 + 12, "not eight times the prompt's eleven pages"
    assert llm.engine.metrics.stats().copied_pages_total > copies


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("after", [0, 1, 2, 9])
def test_aborting_one_beam_aborts_them_all(llm: LLM, victim: int, after: int) -> None:
    group = _group(llm, PROMPTS[1], "two", BeamOptions(4))
    for message in group:
        llm.engine.add_request(message)
    for _ in range(after):
        assert llm.engine.step() == []
    llm.engine.abort(group[victim].request_id)
    ended = llm.engine.step()
    assert {(one.request_id, one.finish_reason) for one in ended} == {(m.request_id, FinishReason.ABORT) for m in group}
    assert not llm.engine.has_requests
    assert _answers(llm._run(_group(llm, PROMPTS[0], None, BeamOptions(2)))), "the next group runs"


def test_a_group_that_its_limits_forbid_is_refused_whole(model, adapter_dirs) -> None:
    with _engine(model, adapter_dirs, adapter_limits=Limits(max_running=2)) as llm:
        with pytest.raises(InvalidRequest, match="3 beams run together") as refused:
            llm._run(_group(llm, PROMPTS[0], "two", BeamOptions(3)))
        assert refused.value.param is None, "no single field is wrong"
        assert not llm.engine.has_requests
        assert len(llm._run(_group(llm, PROMPTS[0], "two", BeamOptions(2)))) == 2
    narrow = {"adapter_limits": Limits(max_queued=1), "max_num_seqs": 2}
    with _engine(model, adapter_dirs, **narrow) as llm, pytest.raises(LimitExceeded):
        llm._run(_group(llm, PROMPTS[0], "two", BeamOptions(4)))


@pytest.mark.parametrize(
    ("others", "fields"), [(0, {"key": KEYS[0], "on_cold": OnCold.REJECT}), (3, {})], ids=["first", "second"]
)
def test_whichever_beam_is_refused_all_are_told_why(others: int, fields: dict[str, Any]) -> None:
    bench = Bench(pages=400, max_num_seqs=3, options={"key_limits": Limits(max_queued=1)})
    for number in range(others):
        bench.add(f"other {number}", max_tokens=100)
        bench.step()
    bench.outputs.clear()
    bench.add_beams("group", 3, 4, 3, **fields)
    ended = bench.scheduler.take_outputs()
    assert {output.request_id for output in ended} == {"group", "group.1", "group.2"}
    assert len({(output.error, output.refusal, output.retry_after_s) for output in ended}) == 1
    assert ended[0].refusal is (Refusal.LIMIT if others else Refusal.COLD)
    bench.add_beams("next", 3, 4, 2, principal="else")
    bench.run(300)
    assert bench.ends().keys() >= {"next", "next.1"}


def test_a_group_that_never_fits_is_refused(model, adapter_dirs) -> None:
    with _engine(model, adapter_dirs, 24) as llm:
        assert len(llm._run(_group(llm, PROMPTS[1], None, BeamOptions(5), tokens=17))) == 5
        with pytest.raises(ContextLengthExceeded, match="pages"):
            _group(llm, PROMPTS[1], None, BeamOptions(7), tokens=17)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"seed": 1}, "seed"),
        ({"temperature": 0.7}, "temperature"),
        ({"stop": ("x",)}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"stop_token_ids": tuple(range(9))}, "stop_token_ids"),
    ],
)
def test_fields_that_do_not_go_with_beams_are_refused_by_name(llm: LLM, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.beam_search([PROMPTS[0]], SamplingParams(max_tokens=20, **fields), BeamOptions(2))
    assert caught.value.param == param


def test_equals_are_taken_in_a_fixed_order() -> None:
    state = BeamState(BeamOptions(2), 3, frozenset())
    children = state.advance([[(7, -1.0), (9, -1.0), (8, -1.0)]], [[]])
    assert [(child.parent, child.token_id) for child in children] == [(0, 7), (0, 8)]
    children = state.advance([[(5, -1.0), (6, -2.0)], [(4, -1.0)]], [[7], [8]])
    assert [(child.parent, child.token_id) for child in children] == [(0, 5), (1, 4)]


def test_a_deadline_ends_each_beam_once() -> None:
    bench = Bench()
    bench.add_beams("late", 3, 60, 3, timeout_s=4.0)
    bench.run()
    assert bench.ends() == dict.fromkeys(("late", "late.1", "late.2"), FinishReason.TIMEOUT)


@dataclass(frozen=True)
class _Work:
    """One group."""

    width: int
    max_tokens: int
    key: AdapterKey | None
    principal: str

    def add(self, bench: Bench, name: str) -> None:
        bench.add_beams(name, 3, self.max_tokens, self.width, self.key, principal=self.principal)


def _answer(bench: Bench, name: str) -> list[tuple[int, ...]]:
    """The answers of a group, best first."""
    ended = {o.request_id: o.new_token_ids for o in bench.outputs if o.finish_reason is not None}
    return [ended[rid] for rid in ended if rid == name or rid.startswith(f"{name}.")]


_works = st.builds(
    _Work, st.integers(1, 4), st.integers(1, 9), st.sampled_from([None, *KEYS[:2]]), st.sampled_from(["ann", "bob"])
)


def test_an_adapter_without_room_waits_for_no_half_of_a_group() -> None:
    """The first beam waits for the second, which stands behind the adapter, which waits for the pages of the first."""
    bench = Bench(pages=30, max_num_batched_tokens=128)
    bench.add("cold", 80, 4, KEYS[4])
    bench.step()
    bench.add_beams("g", 23, 10, 2, None)
    bench.step()
    bench.arrive()
    for _ in range(40):
        bench.step()
        bench.arrive()
    assert not bench.scheduler.has_requests
    assert {"cold", "g"} <= bench.ends().keys()


@settings(max_examples=60, deadline=None)
@given(
    works=st.lists(_works, min_size=2, max_size=6),
    plain=st.integers(0, 4),
    pages=st.sampled_from([20, 28, 40, 64]),
    slots=st.integers(8, 12),
    most=st.sampled_from([None, 4, 6, 8]),
    lowered_after=st.integers(0, 20),
    preemption=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "fair"]),
)
def test_groups_never_wait_for_each_other_for_ever(
    works: list[_Work],
    plain: int,
    pages: int,
    slots: int,
    most: int | None,
    lowered_after: int,
    preemption: str,
    policy: str,
) -> None:
    """Several searches share slots, pages and limits with one another and with other requests; limits are lowered."""
    options = {"scheduling_policy": policy, "key_limits": Limits(max_running=most)}
    bench = Bench(pages, slots, 24, preemption, options=options)
    for i in range(plain):
        bench.add(f"plain{i}", 3, 12, KEYS[i % 3], principal="ann")
    for i, work in enumerate(works):
        work.add(bench, f"group{i}")
    for _ in range(lowered_after):
        bench.arrive()
        bench.step()
    for key in (*KEYS[:2], ""):
        bench.scheduler.quotas.set_limits(key, Limits(max_running=4))
    bench.run()
    assert set(bench.ends().values()) == {FinishReason.LENGTH}
    for i, work in enumerate(works):
        alone = Bench(64)
        work.add(alone, f"group{i}")
        alone.run()
        assert _answer(bench, f"group{i}") == _answer(alone, f"group{i}")


def test_a_limit_lowered_between_two_groups_stops_the_younger() -> None:
    """Each holds a part of what the limit leaves, and neither could end."""
    bench = Bench(options={"scheduling_policy": "fair"})
    for name in ("ann", "bob"):
        bench.add_beams(name, 12, 6, 4, KEYS[0], principal=name)
    for _ in range(3):
        bench.arrive()
        bench.step()
    assert bench.scheduler.num_running == 2, "the first beam of each"
    bench.scheduler.quotas.set_limits(KEYS[0], Limits(max_running=4))
    bench.run(200)
    assert set(bench.ends().values()) == {FinishReason.LENGTH}


def test_groups_run_together_as_far_as_there_is_room(llm: LLM) -> None:
    plain = llm._message(PROMPTS[0], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), llm._find(None))
    work = [(PROMPTS[1], None), (PROMPTS[0], "two"), (PROMPTS[1], "three")]
    want = [_answers(llm._run(_group(llm, prompt, name, BeamOptions(2), tokens=6))) for prompt, name in work]
    groups = [_group(llm, prompt, name, BeamOptions(2), tokens=6) for prompt, name in work]
    for message in (*(message for group in groups for message in group), plain):
        llm.engine.add_request(message)
    answers: dict[str, list[int]] = {}
    together = 0
    while llm.engine.has_requests:
        answers |= {one.request_id: list(one.new_token_ids) for one in llm.engine.step() if one.finish_reason}
        begun = {r.request_id for r in llm.engine._parts.scheduler.requests() if r.num_computed_tokens}
        together = max(together, sum(all(m.request_id in begun for m in group) for group in groups))
    assert together == 3
    assert [[answers[m.request_id] for m in group] for group in groups] == want


def test_a_group_without_room_waits_and_no_younger_one_passes_it() -> None:
    bench = Bench(max_num_seqs=6)
    for name, width in (("first", 3), ("large", 4), ("small", 2)):
        bench.add_beams(name, 3, 6, width)
    bench.add("plain", 3, 2)
    bench.run()
    ends = list(bench.ends())
    assert ends[0] == "plain"
    assert [name.split(".")[0] for name in ends[1:4]] == ["first"] * 3
    assert bench.first_step("large") == bench.first_step("small") > bench.first_step("first")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("width", [2, 3])
def test_beams_that_fill_the_pool_get_on_after_another_request_has_taken_pages(width: int, preemption: str) -> None:
    """Those that wait for a beam which had to give way need no page beside those that it needs."""
    for before in range(0, 12, 3):
        for tokens in (8, 11, 14, 17):
            bench = Bench(pages=4 * width, preemption=preemption, options={"max_wait_steps": 10**6})
            expect_short_answers(bench.scheduler.predictor)
            bench.add("plain", 3, tokens)
            for _ in range(before):
                bench.step()
            bench.add_beams("beams", 3, 13, width)
            bench.run(200)
            assert set(bench.ends().values()) == {FinishReason.LENGTH}
            assert len(bench.ends()) == 1 + width


def test_many_ends_leave_fewer_beams(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may name many tokens that end answers; a beam offers twenty, and not all may be ends."""
    sampling = SamplingParams(max_tokens=3, stop_token_ids=tuple(range(8)))
    monkeypatch.setattr(llm.input_processor, "_eos", tuple(range(8, 16)))
    with pytest.raises(InvalidRequest, match="at most 4 beams are possible; lower best_of") as caught:
        llm._message(PROMPTS[0], sampling, llm._find(None), BeamOptions(5))
    assert caught.value.param == "best_of"
    llm._message(PROMPTS[0], sampling, llm._find(None), BeamOptions(4))


def test_a_group_that_can_begin_does_not_wait_for_an_older_one_that_cannot() -> None:
    bench = Bench()
    bench.add_beams("cold", 3, 4, 2, KEYS[0])
    bench.add_beams("warm", 3, 4, 2)
    bench.step()
    assert bench.scheduler.num_running == 1, "the first beam of the group whose adapter need not come"
    assert bench.first_step("warm") == 0
    bench.run()
    assert [name[:4] for name in bench.ends()] == ["warm", "warm", "cold", "cold"]
