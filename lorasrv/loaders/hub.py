"""Base models by their name on the Hugging Face hub: `hf:org/name`, `hf:org/name@revision`.

Downloaded to huggingface_hub's own cache, by its rules (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE): what is there
is not downloaded again, and serves where the hub cannot be reached. Weights as safetensors only, never a pickle.
"""

import re
import sys
from functools import cache
from pathlib import Path

from lorasrv.errors import ModelNotFound

PREFIX = "hf:"
FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def is_hub_name(model: str) -> bool:
    """Whether it is the hub that is meant."""
    return model.startswith(PREFIX)


@cache
def snapshot(model: str, *, download: bool = True) -> tuple[Path, str]:
    """The folder of a model, downloaded if it is not there, and the name it is served under. Asked once a process, so
    that all of it serves the same commit. Without `download` the network is not asked.

    Raises: ModelNotFound: it is not there, not for this user, or the hub cannot be reached; says which.
    """
    found = _NAME.fullmatch(model.removeprefix(PREFIX))
    if found is None:
        raise ModelNotFound(f"model {model!r}: expected hf:org/name or hf:org/name@revision")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    repo, revision = found.groups()
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=list(FILES), local_files_only=not download)
        return Path(folder), repo
    except HFValidationError:
        why = "that is no name of the hub's"
    except GatedRepoError:
        why = "its owner lets in only whom it knows: ask there, and set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "the hub has none of that name, or it is private: then set HF_TOKEN"
    except RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except LocalEntryNotFoundError:
        why = "it was not downloaded yet" + (
            ", and the hub cannot be reached" if download else "; lorasrv serve does that"
        )
    except (HfHubHTTPError, OSError) as error:
        why = f"the hub does not give it: {str(error).splitlines()[0]:.200}"
    raise ModelNotFound(f"model {model!r}: {why}")
