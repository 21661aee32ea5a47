"""The drafters by name."""

from collections.abc import Callable

from lorasrv.config import SpeculationOptions
from lorasrv.speculation.drafter import Drafter
from lorasrv.speculation.forced_tokens import ForcedTokens
from lorasrv.speculation.prompt_lookup import Prediction, PromptLookup
from lorasrv.speculation.reply_corpus import ReplyCorpus

_MAKERS: dict[str, Callable[[SpeculationOptions], Drafter]] = {
    "grammar": lambda options: ForcedTokens(),
    "prediction": lambda options: Prediction(),
    "lookup": lambda options: PromptLookup(),
    "corpus": lambda options: ReplyCorpus(options.corpus_bytes),
}


def make_drafters(options: SpeculationOptions) -> list[Drafter]:
    """Return the drafters that the options name."""
    if options.speculation == "off":
        return []
    return [_MAKERS[name](options) for name in options.drafters if name != "corpus" or options.corpus_bytes]
