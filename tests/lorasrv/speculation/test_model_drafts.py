"""Models that draft: answers do not depend on them, and a model that is the served one is nearly always right."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from any_asks import any_asks, make_grammars
from drafted import Ask, Drafted, ScriptedDrafter, guesser
from mispredict import expect_short_answers

from adapter_store.store import AdapterStore
from lorasrv.config import SpeculationOptions
from lorasrv.errors import ConfigError
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import ModelDraft
from lorasrv.speculation_params import SpeculationParams
from lorasrv.worker.draft_runner import DraftRunner
from sgmv_kernels.formats.kv_format import KV_FORMATS, CodesKV

CODES = [name for name, kv_format in KV_FORMATS.items() if isinstance(kv_format, CodesKV)]
PROMPT = tuple(range(10, 30))
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
LAYERS = 3
TIGHT: dict[str, Any] = {"pages": 40, "adapter_floor": 0.0, "max_num_batched_tokens": 64}


def options(model: Path, name: str, layers: int = LAYERS) -> SpeculationOptions:
    """The served model drafts for itself: as a model of its own, or by all its layers, or by fewer."""
    if name == "model":
        return SpeculationOptions(drafters=("model",), draft_model=str(model))
    return SpeculationOptions(drafters=("layers",), draft_layers=layers)


def started(model: Path, library: AdapterStore, speculation: SpeculationOptions | None = None, **given: Any) -> Drafted:
    return Drafted(model, library, quantization="int8", drafters=[], speculation=speculation, **given)


@pytest.fixture(scope="module")
def plain(model: Path, library: AdapterStore) -> Iterator[Drafted]:
    with closing(started(model, library)) as drafted:
        yield drafted


@pytest.fixture(scope="module")
def plain_of(model: Path, library: AdapterStore, plain: Drafted) -> Iterator[Callable[[str], Drafted]]:
    """plain_of(kv_cache_dtype): one without drafts."""
    with ExitStack() as stack:
        started_for = cache(lambda kind: stack.enter_context(closing(started(model, library, kv_cache_dtype=kind))))
        yield lambda kind: plain if kind == "auto" else started_for(kind)


@pytest.fixture(scope="module", params=["model", "layers", "two layers"])
def drafting(request: pytest.FixtureRequest, model: Path, library: AdapterStore) -> Iterator[Drafted]:
    speculation = options(model, request.param, 2 if request.param == "two layers" else LAYERS)
    with closing(started(model, library, speculation=speculation)) as drafted:
        yield drafted


def same_answers(plain: Drafted, drafting: Drafted, asks: Sequence[Ask]) -> None:
    want, got = plain.run(asks), drafting.run(asks)
    for rid, said in want.items():
        if asks[int(rid.partition(".")[0])].abort_after is None:
            assert got[rid] == said


def test_answers_are_those_of_no_drafts(plain: Drafted, drafting: Drafted) -> None:
    rng, grammars = random.Random(5), make_grammars(plain)
    for _ in range(10):
        same_answers(plain, drafting, any_asks(plain, rng, grammars))
    [counts] = drafting.scheduler.speculator.accounts.by_drafter.values()
    assert counts.drafted >= counts.accepted > 50


@pytest.mark.parametrize(
    ("name", "preemption", "kind"),
    [
        ("layers", "recompute", "auto"),
        ("model", "swap", CODES[0]),
        *(
            pytest.param(*given, marks=pytest.mark.exhaustive)
            for given in (
                ("model", "swap", "auto"),
                ("model", "recompute", "auto"),
                ("layers", "swap", "auto"),
                ("model", "swap", CODES[1]),
            )
        ),
    ],
)
def test_preempted_answers_too(
    plain_of: Callable[[str], Drafted], model: Path, library: AdapterStore, name: str, preemption: str, kind: str
) -> None:
    """Pages come and go under the draft model's keys and values, too, and are copied for choices."""
    plain = plain_of(kind)
    rng, grammars = random.Random(6), make_grammars(plain)
    given = {"speculation": options(model, name), "preemption_mode": preemption, "kv_cache_dtype": kind, **TIGHT}
    given["pages"] = TIGHT["pages"] if kind == "auto" else 22
    with closing(started(model, library, **given)) as tight:
        expect_short_answers(tight.scheduler.predictor)
        for _ in range(2):
            asks = any_asks(plain, rng, grammars, most=4)
            asks += [
                Ask(PROMPT, replace(some, max_tokens=90), adapter=adapter, count=2)
                for some, adapter in ((GREEDY, None), (RANDOM, None), (GREEDY, "one"), (RANDOM, "two"))
            ]
            same_answers(plain, tight, asks)
        assert tight.engine.metrics.stats().preemptions_total > 0
        [counts] = tight.scheduler.speculator.accounts.by_drafter.values()
        assert counts.accepted > 100


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize(
    ("name", "adapter", "kind"),
    [
        *(("model", None, kind) for kind in ("auto", *CODES)),
        ("layers", None, "auto"),
        *(("layers", "one", kind) for kind in ("auto", *CODES)),
    ],
)
def test_the_served_model_drafts_what_it_says(
    plain_of: Callable[[str], Drafted],
    model: Path,
    library: AdapterStore,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    adapter: str | None,
    kind: str,
    sampling: SamplingParams,
) -> None:
    """Steps of up to nine tokens, greedy and random ones: both draw by the same race. All layers know the adapter, and
    the draft model's cache has the served one's format.
    """
    monkeypatch.setattr("lorasrv.worker.draft_rows.MIN_CONFIDENCE", 0.0)
    with closing(started(model, library, options(model, name), kv_cache_dtype=kind)) as drafting:
        asks = [Ask(PROMPT, sampling, adapter)]
        same_answers(plain_of(kind), drafting, asks)
        [counts] = drafting.scheduler.speculator.accounts.by_drafter.values()
        assert counts.accepted == counts.drafted > 40
        assert drafting.steps <= 12


@pytest.fixture(scope="module", params=["model", "two layers"])
def rejecting(request: pytest.FixtureRequest, model: Path, library: AdapterStore) -> Iterator[Drafted]:
    speculation = replace(options(model, request.param.split()[-1], 2), accept="rejection")
    with closing(started(model, library, speculation)) as drafted:
        yield drafted


class TestRejection:
    """`--accept rejection`: requests without a seed."""

    def test_what_has_a_seed_or_is_greedy_or_constrained_is_drawn_as_without(
        self, plain: Drafted, rejecting: Drafted
    ) -> None:
        rng, grammars = random.Random(8), make_grammars(plain)
        for _ in range(4):
            same_answers(plain, rejecting, any_asks(plain, rng, grammars))
        free = replace(RANDOM, seed=None, ignore_eos=False)
        asks = [Ask(PROMPT, free, constraint=grammar) for grammar in (None, *grammars[:1])]
        accepts = [group[0].accept for group in rejecting.messages([*asks, Ask(PROMPT, RANDOM)], "")]
        assert accepts == ["rejection", "same-draw", "same-draw"]
        assert plain.messages(asks, "")[0][0].accept is None

    def test_what_has_none_is_drafted(self, rejecting: Drafted) -> None:
        asks = [Ask(PROMPT, replace(RANDOM, seed=None), adapter) for adapter in (None, "one", "two")]
        before = sum(counts.accepted for counts in rejecting.scheduler.speculator.accounts.by_drafter.values())
        said = rejecting.run(asks)
        assert all(len(one.token_ids) == 60 and one.error is None for one in said.values())
        assert (
            sum(counts.accepted for counts in rejecting.scheduler.speculator.accounts.by_drafter.values()) > before + 20
        )

    def test_trees_of_a_model_and_of_another_drafter_too(self, model: Path, library: AdapterStore) -> None:
        guessing = ScriptedDrafter("guessing")
        guessing.script = guesser
        speculation = replace(options(model, "model"), accept="rejection", draft_trees=True)
        with closing(
            Drafted(model, library, quantization="int8", drafters=[guessing], speculation=speculation)
        ) as drafting:
            said = drafting.run([Ask(PROMPT, replace(RANDOM, seed=None), count=4)], guesser)
            assert all(len(one.token_ids) == 60 and one.error is None for one in said.values())
            counts = drafting.scheduler.speculator.accounts.by_drafter
            assert counts["model"].accepted > 20
            assert counts["guessing"].drafted > 20


def test_a_model_without_the_adapter_is_wrong_about_it(plain: Drafted, model: Path, library: AdapterStore) -> None:
    with closing(started(model, library, speculation=options(model, "model"))) as drafting:
        same_answers(plain, drafting, [Ask(PROMPT, GREEDY, "one")])
        [counts] = drafting.scheduler.speculator.accounts.by_drafter.values()
        assert counts.accepted < 0.5 * counts.drafted


def test_long_prompts_are_caught_up_with_in_pieces(
    plain: Drafted, model: Path, library: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorasrv.worker.draft_runner.MAX_CATCH_UP", 100)
    with closing(started(model, library, speculation=options(model, "model"))) as drafting:
        asks = [Ask(tuple(10 + (7 * i + n) % 300 for i in range(350)), GREEDY) for n in range(2)]
        same_answers(plain, drafting, asks)
        [counts] = drafting.scheduler.speculator.accounts.by_drafter.values()
        assert counts.accepted == counts.drafted > 40


@pytest.mark.parametrize("fault", ["raises", "says nothing", "says NaN"])
def test_a_model_that_fails_costs_no_answer(
    plain: Drafted, model: Path, library: AdapterStore, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def raises(*_: object) -> Any:
        raise RuntimeError("as asked")

    draft, forward = DraftRunner.draft, DraftRunner._forward

    def nothing(self: DraftRunner, *args: Any) -> Any:
        output = draft(self, *args)
        return replace(output, drafts={rid: ModelDraft((), ()) for rid in output.drafts})

    def not_a_number(self: DraftRunner, *args: Any) -> Any:
        logits, sampled = forward(self, *args)
        return torch.full_like(logits, float("nan")), sampled

    with closing(started(model, library, speculation=options(model, "model"))) as drafting:
        name, method = {"raises": ("draft", raises), "says nothing": ("draft", nothing)}.get(
            fault, ("_forward", not_a_number)
        )
        monkeypatch.setattr(DraftRunner, name, method)
        same_answers(plain, drafting, [Ask(PROMPT, GREEDY, count=2), Ask(PROMPT, RANDOM)])
        assert drafting.scheduler.speculator.accounts.by_drafter["model"].drafted == 0
        assert len(drafting.runner._models) == len(drafting.scheduler.speculator._models) == (fault != "raises")


@pytest.mark.parametrize(("most", "steps"), [(1, 32), (4, 14), (16, 9)])
def test_every_step_drafts_for_the_next(
    model: Path, library: AdapterStore, monkeypatch: pytest.MonkeyPatch, most: int, steps: int
) -> None:
    """However few tokens a request lets be drafted: a model that is right adds so many to each step."""
    monkeypatch.setattr("lorasrv.worker.draft_rows.MIN_CONFIDENCE", 0.0)
    with closing(started(model, library, options(model, "model"))) as drafting:
        ask = Ask(PROMPT, GREEDY, options={"speculation": SpeculationParams(max_draft=most)})
        drafting.run([ask])
        assert drafting.steps <= steps


def test_models_that_do_not_fit_are_refused(
    model: Path, library: AdapterStore, tiny_hf_checkpoints: dict[str, Callable[..., Path]]
) -> None:
    for given, why in (
        ({"draft_model": "smollm2-135m"}, "--draft-model smollm2-135m has other token ids than --model"),
        ({"draft_model": "nowhere"}, "--draft-model: model 'nowhere' not found"),
        (
            {"draft_model": str(tiny_hf_checkpoints["llama"](max_position_embeddings=128))},
            "--draft-model .* has a context of 128 tokens, requests may have 512; lower --max-model-len",
        ),
        (
            {"draft_model": str(tiny_hf_checkpoints["llama"](vocab_size=400))},
            "--draft-model .* has 400 tokens, --model 384: take one of as many",
        ),
        ({"draft_layers": LAYERS + 1}, "--draft-layers 4: --model has 3 layers"),
    ):
        with pytest.raises(ConfigError, match=why):
            Drafted(model, library, speculation=SpeculationOptions(**given))
    for given, why in (
        ({"draft_model": "x", "drafters": ("lookup",)}, "--draft-model drafts nothing: .* leaves model out"),
        ({"draft_layers": 2, "speculation": "off"}, "--draft-layers drafts nothing: --speculation"),
        ({"draft_layers": 0}, "--draft-layers must be"),
    ):
        with pytest.raises(ConfigError, match=why):
            SpeculationOptions(**given)
