"""SmolLM2 in float32: the base and three personas against transformers + PEFT, and every mix of them against itself.

Matrix products round differently with the number of rows, so two runs may part where the two likeliest tokens are
nearly equal: a first difference counts as equal if the oracle's gap between them is below 1e-3.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mispredict import expect_short_answers
from tiny_engine import offline_engine

from lorasrv.config import SchedulerOptions
from lorasrv.llm import LLM
from lorasrv.models.loader import open_checkpoint, state_dict_fp32
from lorasrv.outputs import RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams

BASE = Path("smollm2-135m")
MAX_TIE = 1e-3
NEW_TOKENS = 48
PROMPTS = {"numba": 2, "turbulent": 12, "all": 20, "torch": 4}
"""All of them, and plain torch, which is slow, are in `make test-exhaustive`."""
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[
        "numba",
        pytest.param("torch", marks=pytest.mark.exhaustive),
        pytest.param("all", marks=pytest.mark.exhaustive),
    ],
)
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(kernels: str, personas: dict[str, Path]) -> Iterator[LLM]:
    chosen, slots = "torch" if kernels == "torch" else "numba", SchedulerOptions(max_num_seqs=20)
    with offline_engine(BASE, personas, kernels=chosen, scheduler=slots, pool_bytes=700 << 20) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts(llm: LLM, kernels: str, heldout: list[str]) -> list[list[int]]:
    assert llm.chat_template is not None
    chats = [[{"role": "user", "content": text}] for text in heldout[: PROMPTS[kernels]]]
    return [llm.chat_template.encode(chat, llm.tokenizer) for chat in chats]


@pytest.fixture(scope="module")
def answers(llm: LLM, prompts: list[list[int]], personas: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    """Greedy tokens of every prompt from the base and each persona, all of them mixed in shared batches."""
    names: list[str | None] = [None, *personas]
    pairs = [(name, prompt) for prompt in prompts for name in names]
    done = llm.generate([p for _, p in pairs], GREEDY, [n for n, _ in pairs])
    llm.engine.check_integrity()
    return {name: [list(c.token_ids) for (n, _), c in zip(pairs, done, strict=True) if n == name] for name in names}


@pytest.fixture(scope="module")
def oracle() -> torch.nn.Module:
    """transformers with the very same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint("smollm2-135m")
    spec = checkpoint.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state_dict_fp32(checkpoint))
    checkpoint.close()
    return model


def _first_difference(logits: torch.Tensor, prompt: list[int], answer: list[int]) -> float | None:
    """None if greedy decoding gives the answer; else the gap between the likeliest token and ours where they part.

    Token by token this is what `generate` would do: up to the first difference, both see the same tokens.
    """
    rows = logits[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
    wrong = (rows.argmax(-1) != torch.tensor(answer)).nonzero()
    if not len(wrong):
        return None
    at = int(wrong[0])
    return float(rows[at].max() - rows[at, answer[at]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    [None, 0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)],
    ids=["base", "persona1", "persona2", "persona3"],
)
def test_greedy_tokens_equal_transformers_and_peft(
    oracle, llm, prompts, answers, personas, which, kernels, capsys
) -> None:
    from peft import PeftModel

    name = None if which is None else list(personas)[which]
    model = oracle if name is None else PeftModel.from_pretrained(oracle, personas[name])
    try:
        gaps = []
        for prompt, answer in zip(prompts, answers[name], strict=True):
            assert len(answer) == NEW_TOKENS
            with torch.inference_mode():
                gaps.append(_first_difference(model(torch.tensor([prompt + answer])).logits[0], prompt, answer))
    finally:
        if name is not None:
            model.unload()
    parted = [gap for gap in gaps if gap is not None]
    with capsys.disabled():
        print(f"\n{kernels}, {name or 'base'}: {len(gaps) - len(parted)} of {len(gaps)} equal, ties: {parted}")
    assert all(gap < MAX_TIE for gap in parted)
    assert name is None or answers[name] != answers[None], "the persona says what the base says"


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["turbulent"], indirect=True)
def test_a_turbulent_mixed_batch_equals_each_request_alone(
    oracle, prompts, personas, capsys: pytest.CaptureFixture[str]
) -> None:
    """Base and personas, mixed lengths, arriving at different steps, chunked; one aborted; a pool so small that some
    are preempted. What is left equals the same requests run one at a time."""
    names: list[str | None] = [None, *personas]
    scheduler = SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=48)
    work = [(names[i % 4], prompts[i] + prompts[i][: 7 * (i % 5)], 48 + 6 * (i % 5)) for i in range(12)]
    with offline_engine(BASE, personas, scheduler=scheduler, pool_bytes=40 << 20) as llm:
        expect_short_answers(llm.engine._parts.scheduler.predictor)
        alone = [list(llm.generate([p], _greedy(n), [name])[0].token_ids) for name, p, n in work]
        together, preemptions = _run_arriving(llm, work, aborted=5)
        llm.engine.check_integrity()
        assert preemptions >= 1, "the pool was meant to be too small"
    compared = [(i, a, t) for i, (a, t) in enumerate(zip(alone, together, strict=True)) if i != 5]
    ties = [_tie(oracle, personas, work[i], a, t) for i, a, t in compared if a != t]
    with capsys.disabled():
        print(f"\nmixed batch: {len(compared) - len(ties)} of {len(compared)} equal, parted at ties: {ties}")
    assert all(gap < MAX_TIE for gap in ties)
    assert len(together[5]) < work[5][2], "the aborted request was cut short"


def test_swapping_two_adapters_changes_the_tokens(llm: LLM, prompts: list[list[int]], personas) -> None:
    one, other = list(personas)[:2]
    params = SamplingParams(max_tokens=16, temperature=0.0)
    first = llm.generate(prompts[:2], params, [one, other])
    second = llm.generate(prompts[:2], params, [other, one])
    assert first[0].token_ids != second[0].token_ids
    assert first[1].token_ids != second[1].token_ids


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def _run_arriving(llm: LLM, work: list[tuple[str | None, list[int], int]], aborted: int) -> tuple[list[list[int]], int]:
    """Two requests join at every second step; one is aborted on the way."""
    tokens: list[list[int]] = [[] for _ in work]
    waiting = list(enumerate(work))
    step = 0
    while waiting or llm.engine.has_requests:
        for i, (name, prompt, n) in waiting[:2] if step % 2 == 0 else []:
            key = llm.store.resolve(name).key if name else None
            llm.engine.add_request(
                llm.input_processor.process(RequestId(f"t{i}"), prompt, _greedy(n), RequestOptions(adapter_key=key))
            )
            waiting = waiting[1:]
        if len(tokens[aborted]) == 9:
            llm.engine.abort(RequestId(f"t{aborted}"))
        for output in llm.engine.step():
            tokens[int(output.request_id[1:])] += output.new_token_ids
        step += 1
    return tokens, llm.engine.metrics.stats().preemptions_total


def _tie(oracle, personas, work: tuple[str | None, list[int], int], one: list[int], other: list[int]) -> float:
    """The oracle's gap between the two tokens where two answers part."""
    from peft import PeftModel

    name, prompt, _ = work
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    model = oracle if name is None else PeftModel.from_pretrained(oracle, personas[name])
    with torch.inference_mode():
        row = model(torch.tensor([prompt + one[:at]])).logits[0, -1]
    if name is not None:
        model.unload()
    return float((row[one[at]] - row[other[at]]).abs())
