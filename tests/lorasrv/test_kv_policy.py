"""Policies over keys and values: what transformers says with the same mask, whatever is done to the pages."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafted import Ask, Drafted, mixed
from hypothesis import given, settings
from hypothesis import strategies as st
from mispredict import expect_short_answers
from tiny_checkpoints import TinyCheckpoint
from tiny_engine import offline_engine

from adapter_store.store import AdapterStore
from lorasrv.errors import InvalidRequest
from lorasrv.kv_policy import KvPolicy, SelectPolicy, WindowPolicy
from lorasrv.sampling_params import BeamOptions, SamplingParams

WINDOW = WindowPolicy(recent=64)
FULL_ROWS = 16 + 64 + 16
LONG = tuple(10 + (7 * i + i * i % 31) % 300 for i in range(330))
GREEDY = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True, logprobs=2)
FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.long) for family in ("granite", "olmo2"))]


def seen(policy: WindowPolicy, position: int) -> list[int]:
    """Return the positions that a token sees, by the definition."""
    pages = [(at // 16, at) for at in range(position + 1)]
    return [at for page, at in pages if at < policy.sink or page >= (position - policy.recent) // 16]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(64, 130), st.integers(0, 300), st.integers(1, 40))
def test_rows_of_a_piece_see_the_same_pages(sink: int, recent: int, start: int, count: int) -> None:
    policy = WindowPolicy(recent=recent, sink=sink).placed(16, 512)
    pieces = list(policy.pieces(start, start + count))
    assert [at for first, end in pieces for at in range(first, end)] == list(range(start, start + count))
    for first, end in pieces:
        dropped = {16 * place + slot for place in policy.hole(first) for slot in range(16)}
        for position in range(first, end):
            assert seen(policy, position) == [at for at in range(position + 1) if at not in dropped]
            assert (position < policy.num_full_rows) == (not policy.hole(position))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_says_with_the_same_mask(tiny_hf_checkpoints: dict[str, TinyCheckpoint], family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_hf_checkpoints[family]()
    prompts = [list(LONG[:200]), list(LONG[100:170]), list(LONG[:30])]
    with offline_engine(model, max_num_seqs=16, max_num_batched_tokens=48) as llm:
        answers = llm.generate(prompts, GREEDY, kv_policy=WINDOW)
        full = llm.generate(prompts, GREEDY)
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    policy = WINDOW.placed(16, 48)
    for prompt, answer, plain in zip(prompts, answers, full, strict=True):
        tokens = [*prompt, *answer.token_ids]
        mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min)
        for row in range(len(tokens)):
            mask[row, seen(policy, row)] = 0.0
        with torch.inference_mode():
            logits = base(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0].log_softmax(-1)
        for at, found in enumerate(answer.logprobs, len(prompt) - 1):
            assert logits[at, found.token_id].item() == pytest.approx(found.logprob, abs=2e-4)
        assert answer.timing.kv is not None
        exact = answer.timing.kv.exact_tokens
        assert exact == max(0, min(70, FULL_ROWS - len(prompt) + 1))
        assert [found.token_id for found in plain.logprobs[:exact]] == list(answer.token_ids[:exact])
        if exact < 70:
            gap = abs(plain.logprobs[exact].logprob - answer.logprobs[exact].logprob)
            assert gap > 2e-4, "the first token behind is no longer exact"


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_are_selected_by_their_attention(tiny_hf_checkpoints: dict[str, TinyCheckpoint], family: str) -> None:
    """As transformers computes it: what its weights add up to decides what the next rows of its mask see."""
    from transformers import AutoModelForCausalLM

    model = tiny_hf_checkpoints[family]()
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    policy, sampling = SelectPolicy(budget=128, recent=64, every=48), replace(GREEDY, max_tokens=100)
    for prompt, first_drop in (list(LONG[:200]), 200), (list(LONG[30:90]), 156):
        with offline_engine(model, max_num_seqs=16, max_num_batched_tokens=48) as llm:
            [answer] = llm.generate([prompt], sampling, kv_policy=policy)
        tokens = [*prompt, *answer.token_ids][:-1]
        mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min).triu(1)
        masses, dropped = torch.zeros(len(tokens) // 16 + 1), set[int]()
        for check in range(len(prompt), len(tokens) + 1, 48):
            surplus = -(-check // 16) - len(dropped) - 8
            if surplus > 0:
                with torch.inference_mode():
                    out = base(torch.tensor([tokens]), attention_mask=mask[None, None], output_attentions=True)
                rows = sum(layer[0, :, check - 32 : check].sum((0, 1)) for layer in out.attentions)
                masses += torch.nn.functional.pad(rows, (0, 16 * len(masses) - len(rows))).view(-1, 16).sum(-1)
                kept = [page for page in range(1, (check - 64) // 16) if page not in dropped]
                for page in sorted(kept, key=lambda page: masses[page].item())[:surplus]:
                    dropped.add(page)
                    mask[check:, 16 * page : 16 * page + 16] = torch.finfo(torch.float32).min
        with torch.inference_mode():
            logits = base(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0].log_softmax(-1)
        for at, found in enumerate(answer.logprobs, len(prompt) - 1):
            assert logits[at, found.token_id].item() == pytest.approx(found.logprob, abs=2e-4)
        told = answer.timing.kv
        assert told is not None
        assert (told.dropped_tokens, told.exact_tokens) == (16 * len(dropped), first_drop - len(prompt) + 1)
        assert told.kept_tokens <= 128 + 48


@pytest.fixture(scope="module")
def roomy(model: Path, library: AdapterStore) -> Iterator[Drafted]:
    with closing(Drafted(model, library)) as drafted:
        yield drafted


def asks(rng: random.Random, count: int = 7) -> list[Ask]:
    """Return requests with windows of all kinds, and one without."""
    made = [Ask(LONG[:40], replace(GREEDY, max_tokens=20))]
    for _ in range(count):
        prompt = LONG[rng.randrange(60) :][: rng.choice([20, 95, 96, 97, 130, 250])]
        recent, sink = rng.choice([64, 70, 100]), rng.choice([1, 16, 30])
        policy: KvPolicy = WindowPolicy(recent=recent, sink=sink)
        if rng.random() < 0.5:
            policy = SelectPolicy(recent=recent, sink=sink, budget=rng.choice([176, 190]), every=rng.choice([32, 50]))
        sampling = replace(GREEDY, max_tokens=rng.randrange(1, 90), temperature=rng.choice([0.0, 0.9]), seed=5)
        made.append(
            Ask(
                prompt, sampling, rng.choice([None, "one", "two"]), rng.choice([1, 1, 3]), options={"kv_policy": policy}
            )
        )
    return made


def test_full_attention_bit_for_bit_until_something_is_dropped(roomy: Drafted) -> None:
    some = [Ask(LONG[:prompt], replace(GREEDY, max_tokens=FULL_ROWS - prompt + 1)) for prompt in (1, 50, 96)]
    windowed = [replace(ask, options={"kv_policy": WINDOW}) for ask in some]
    assert roomy.run(windowed) == roomy.run(some)
    one_more = [replace(ask, sampling=replace(GREEDY, max_tokens=ask.sampling.max_tokens + 1)) for ask in some]
    got, want = (roomy.run([replace(ask, options=o) for ask in one_more]) for o in ({"kv_policy": WINDOW}, {}))
    assert [said.logprobs[-1] != want[rid].logprobs[-1] for rid, said in got.items()] == [True] * 3


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"max_num_batched_tokens": 32}, marks=pytest.mark.long),
        {"pages": 34, "adapter_floor": 0.0, "max_num_batched_tokens": 48, "preemption_mode": "swap"},
        pytest.param(
            {"pages": 34, "adapter_floor": 0.0, "max_num_batched_tokens": 48, "preemption_mode": "recompute"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["chunks", "swap", "recompute"],
)
def test_an_answer_depends_on_its_request_alone(
    roomy: Drafted, model: Path, library: AdapterStore, given: dict[str, object]
) -> None:
    rng = random.Random(7)
    with closing(Drafted(model, library, max_num_seqs=16, **given)) as tight:  # type: ignore[arg-type]
        expect_short_answers(tight.scheduler.predictor)
        for _ in range(2):
            some = asks(rng)
            want = {}
            for number, ask in enumerate(some):
                for rid, said in roomy.run([ask]).items():
                    want[rid.replace("0.", f"{number}.", 1)] = said
            assert tight.run(some) == want
            aborted = [replace(ask, abort_after=rng.choice([None, 3, 30])) for ask in some]
            tight.compare(aborted, mixed, salt="shared")
        if "pages" in given:
            assert tight.engine.metrics.stats().preemptions_total > 0


def test_pages_behind_the_window_are_free(model: Path, library: AdapterStore) -> None:
    """A pool of 30 pages serves a context of 512 tokens, and refuses it without the window."""
    with closing(Drafted(model, library, pages=30, max_num_seqs=16, max_num_batched_tokens=64)) as small:
        most, kv = 0, small.engine._memory.kv
        ask = Ask(LONG, replace(GREEDY, max_tokens=180), options={"kv_policy": WINDOW})
        step = small._step

        def counted(*args: object) -> None:
            nonlocal most
            step(*args)  # type: ignore[arg-type]
            most = max(most, kv.num_pages)

        small._step = counted  # type: ignore[method-assign]
        said = small.run([ask])
        assert len(next(iter(said.values())).token_ids) == 180
        assert most <= (16 + 64 + 2 * 64) // 16 + 2 < 30
        with pytest.raises(InvalidRequest, match="pool"):
            small.run([replace(ask, options={})])


def test_later_pages_are_not_those_of_full_attention(roomy: Drafted) -> None:
    """Prefix pages are shared as far as they are the same, and not between policies."""
    sampling = replace(GREEDY, max_tokens=2)
    plain, window, other = (
        {"kv_policy": policy} if policy else {} for policy in (None, WINDOW, WindowPolicy(recent=80))
    )
    salt = "prefix"

    def cached(options: dict[str, object]) -> int:
        before = roomy.engine.metrics.stats().cached_tokens_total
        said = roomy.run([Ask(LONG[:200], sampling, options=options)], salt=salt)
        found = roomy.engine.metrics.stats().cached_tokens_total - before
        assert said == roomy.run([Ask(LONG[:200], sampling, options=options)])
        return found

    assert cached(window) == 0
    assert cached(plain) == 96
    assert cached(window) == cached(plain) == 192
    assert cached(other) == 112


def test_refusals(model: Path) -> None:
    with offline_engine(model) as llm:
        for policy, sampling, says in (
            (WindowPolicy(recent=63), GREEDY, r"kv_policy.recent must be at least 64 tokens \(4 pages\), not 63"),
            (WINDOW, replace(GREEDY, prompt_logprobs=1), "log-probabilities of the prompt"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                llm.generate([LONG[:20]], sampling, kv_policy=policy)
        with pytest.raises(InvalidRequest, match="beam search"):
            llm._message(LONG[:20], SamplingParams(max_tokens=4), llm._find(None), BeamOptions(2), WINDOW)
        for policy, says in (
            (SelectPolicy(budget=96, recent=64), "kv_policy.budget must be at least 112 tokens"),
            (SelectPolicy(budget=200, every=31), "kv_policy.every must be at least 32 tokens"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                llm.generate([LONG[:20]], GREEDY, kv_policy=policy)
    for size in (0, -1, 2**31):
        with pytest.raises(InvalidRequest, match="must be between 1 and"):
            WindowPolicy(recent=64, sink=size)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("mistral", {"sliding_window": 64}, "layers of this model have windows of their own"),
        ("mpt", {}, r"this model knows distances from the keys that it sees \(ALiBi\)"),
    ],
)
def test_models_whose_attention_is_not_free_to_choose(
    tiny_hf_checkpoints: dict[str, TinyCheckpoint], family: str, changes: dict[str, object], says: str
) -> None:
    with offline_engine(tiny_hf_checkpoints[family](**changes)) as llm:
        for policy in (WINDOW, SelectPolicy(budget=200)):
            with pytest.raises(InvalidRequest, match=says):
                llm.generate([LONG[:20]], GREEDY, kv_policy=policy)
        (answer,) = llm.generate([LONG[:20]], replace(GREEDY, max_tokens=2))
        assert len(answer.token_ids) == 2
