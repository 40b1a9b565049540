"""Where a dataset lies: a local directory, or a Hugging Face hub id that is fetched once."""

import os
import re
from pathlib import Path

from acrlpd.data.sources.source import DatasetError

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(path_or_repo_id: str | Path) -> Path:
    """The local directory of a dataset.

    A hub id is looked for where lerobot keeps its datasets ($HF_LEROBOT_HOME), then in the hub's own
    cache ($HF_HOME), then downloaded there.
    """
    path = Path(path_or_repo_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise DatasetError(f"{path} is a file; give the dataset's directory")
    repo_id = str(path_or_repo_id)
    if not _REPO_ID.fullmatch(repo_id):
        raise DatasetError(f"{path}: no such directory, and not a hub id of the form owner/name either")
    local = _lerobot_home() / repo_id
    return local if local.is_dir() else _download(repo_id)


def _lerobot_home() -> Path:
    hub_home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_LEROBOT_HOME", hub_home / "lerobot")).expanduser()


def _download(repo_id: str) -> Path:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise DatasetError(
            f"{repo_id!r} is neither a directory here nor in {_lerobot_home()}; to fetch it from the hub "
            "install the extra: pip install 'acrlpd[hub]'"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, repo_type="dataset"))
    except (OSError, ValueError) as error:  # every error of the hub client is one of these
        raise DatasetError(
            f"{repo_id}: no such directory here or in {_lerobot_home()}, and cannot fetch dataset {repo_id!r} from the "
            f"hub: {error}"
        ) from error
