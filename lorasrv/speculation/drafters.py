"""The drafters by name."""

from collections.abc import Callable, Sequence

from lorasrv.config import SpeculationOptions
from lorasrv.errors import ConfigError
from lorasrv.speculation.drafter import Drafter
from lorasrv.speculation.forced_tokens import ForcedTokens
from lorasrv.speculation.lookahead import Lookahead
from lorasrv.speculation.prompt_lookup import Prediction, PromptLookup
from lorasrv.speculation.reply_corpus import ReplyCorpus
from lorasrv.speculation_params import MODEL_DRAFTERS

_MAKERS: dict[str, Callable[[SpeculationOptions], Drafter]] = {
    "grammar": lambda options: ForcedTokens(),
    "prediction": lambda options: Prediction(),
    "lookup": lambda options: PromptLookup(),
    "corpus": lambda options: ReplyCorpus(options.corpus_bytes),
    "lookahead": lambda options: Lookahead(*options.lookahead_window),
}


def make_drafters(options: SpeculationOptions) -> list[Drafter]:
    """Return the drafters that the options name."""
    used = [name for name in options.drafters if name in _MAKERS and options.uses(name)]
    there = {"corpus": options.corpus_bytes > 0, "lookahead": options.lookahead is not None}
    return [_MAKERS[name](options) for name in used if there.get(name, True)]


def draft_layers(num_layers: int, count: int | None, kv_source_layers: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the `count` layers of the model that draft, none for None: the first and last layers, which matter most,
    and the layers whose keys and values these read.

    Raises:
        ConfigError: there are fewer layers.
    """
    kept = count or 0
    if kept > num_layers:
        raise ConfigError(f"--draft-layers {kept}: --model has {num_layers} layers; take fewer")
    layers = {*range(kept - kept // 2), *range(num_layers - kept // 2, num_layers)}
    return tuple(sorted(layers | {source for layer, source in enumerate(kv_source_layers) if layer in layers}))


def model_names(options: SpeculationOptions) -> list[str]:
    """Return the names of the draft models on the worker that the options request."""
    there = {
        "medusa": options.draft_heads is not None or options.draft_head_bytes > 0,
        "model": options.draft_model is not None,
        "layers": options.draft_layers is not None,
    }
    return [name for name in MODEL_DRAFTERS if there[name] and options.uses(name)]
