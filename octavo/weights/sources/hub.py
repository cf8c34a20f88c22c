"""Download a model repository from a Hugging Face hub. The hub library reads HF_ENDPOINT, HF_TOKEN, HF_HOME and
HF_HUB_OFFLINE."""

from pathlib import Path

from octavo.errors import ConfigError
from octavo.weights.sources.names import how_named
from octavo.weights.sources.names import looks_like_hub_id as looks_like_hub_id

_SMALL_FILES = ["*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_WEIGHTS = ["*.safetensors"]
# Subfolders and consolidated files hold the same weights again, in other layouts. The only files wanted from a subfolder
# are the templates in additional_chat_templates; a pattern cannot exempt one folder, so these list file types instead.
_NOT_WANTED = ["*/*.json", "*/*.model", "*/*.txt", "*/*.safetensors", "consolidated*", "adapter_model*"]


class NoSafetensors(ConfigError):
    """The repository has other files; some of them may be .gguf files."""


def fetch(hub_id: str, revision: str = "", *, weights: bool = True) -> Path:
    """Return the folder with the repository's files. Files that are not in the hub's cache are downloaded."""
    folder = _snapshot(hub_id, revision, _SMALL_FILES + (_WEIGHTS if weights else []))
    if weights and not any(folder.glob(_WEIGHTS[0])):
        raise NoSafetensors(
            f"{hub_id} has no safetensors weights on the hub, and pickled ones (.bin, .pt) are never opened: "
            "pass a model that has them, or a .gguf file"
        )
    return folder


def _snapshot(hub_id: str, revision: str, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = constants.ENDPOINT
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=_NOT_WANTED,
            )
        )
    except GatedRepoError as error:  # a subclass of RepositoryNotFoundError, so it comes first
        raise ConfigError(
            f"{hub_id} is gated: accept its terms at {endpoint}/{hub_id} and set HF_TOKEN to a token that may read it"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{hub_id!r} is neither a file or folder here nor a model at {endpoint}: "
            f"{how_named(hub_id)} (a private model needs HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{hub_id} has no revision {revision!r} at {endpoint}: change --revision") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(_unreachable(hub_id, endpoint, constants.HF_HUB_OFFLINE, error)) from error
    except Exception as error:  # the library passes on what its HTTP stack raises, which differs by version
        raise ConfigError(
            f"cannot fetch {hub_id} from {endpoint} ({_first_line(error)}): try again, or pass a local model folder"
        ) from error


def _unreachable(hub_id: str, endpoint: str, offline: bool, error: Exception) -> str:
    if offline:
        return (
            f"{hub_id!r} is not a file or folder here and not (completely) in the hub cache, and HF_HUB_OFFLINE is set: "
            "unset it once to download the model, or pass a local model folder"
        )
    cause = f" ({_first_line(error.__cause__)})" if error.__cause__ else ""
    named = "" if "/" in hub_id else f"; {how_named(hub_id)}"
    return (
        f"{hub_id!r} is not a file or folder here, and fetching it from {endpoint} failed{cause}: "
        f"check the connection (or HF_ENDPOINT), or pass a local model folder or .gguf file{named}"
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
