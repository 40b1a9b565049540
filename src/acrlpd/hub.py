"""Repositories of the Hugging Face hub: their addresses, what is fetched from them and what is uploaded to them.

Every failure of the hub's client becomes a `HubError` of one line that says what to do. The client is the package
huggingface_hub, of the extra `hub`; it reads HF_ENDPOINT, HF_TOKEN and HF_HOME.
"""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from acrlpd.installation import install_command

Kind = Literal["model", "dataset"]

_PREFIX = {"model": "", "dataset": "datasets/"}
# A pathlib.Path, which is what command lines make of an address, has only one of the two slashes of hf://.
_SCHEME = re.compile(r"hf:/{1,2}")
_ADDRESS = re.compile(
    r"(?P<dataset>datasets/)?(?P<repo>(?!datasets/)[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/@\s]+))?(?:/(?P<path>[^@\s]+))?"
)
_EXPECTED = "expected hf://owner/name, hf://owner/name@tag, or hf://datasets/owner/name for a dataset"


class HubError(ValueError):
    """The hub cannot give or take a repository; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class HubAddress:
    """A repository of the hub, at one of its states."""

    repo_id: str  # owner/name
    kind: Kind = "model"
    revision: str | None = None  # a tag, branch or commit; None: the newest state
    path: str = ""  # a directory within the repository

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{_PREFIX[self.kind]}{self.repo_id}{revision}{'/' if self.path else ''}{self.path}"


def is_hub_address(path: str | Path) -> bool:
    return _SCHEME.match(str(path)) is not None


def parse_hub_address(text: str | Path) -> HubAddress:
    """The repository that `text` names, with or without the hf:// before it."""
    found = _ADDRESS.fullmatch(_SCHEME.sub("", str(text), count=1).rstrip("/"))
    if found is None or ".." in found["repo"]:
        raise HubError(f"{text} is not an address of a repository: {_EXPECTED}")
    kind: Kind = "dataset" if found["dataset"] else "model"
    return HubAddress(found["repo"], kind, found["revision"], found["path"] or "")


def fetch(address: HubAddress, *, one_of: Sequence[str] = (), patterns: Sequence[str] = ("*",)) -> Path:
    """Where the repository, or the file that the address names, lies in the hub's cache on this machine.

    Of a repository the files that match `patterns` are fetched. If files are named by `one_of`, a repository that has
    none of them is refused before anything is fetched. Without a network, a copy in the cache will do.
    """
    hub = _require_client()
    within = f"{address.path}/" if address.path else ""
    wanted = [f"{within}{pattern}" for pattern in patterns]
    with _explained(address):
        try:
            names = _all_files(address)
            if address.path in names:
                wanted = [address.path]
            elif one_of:
                refuse_foreign(address, _within(address, names), one_of)
        except Exception as error:
            if not _is_unreachable(error):
                raise
        patterns = [*wanted, address.path] if address.path else wanted
        directory = hub.snapshot_download(
            address.repo_id, repo_type=address.kind, revision=address.revision, allow_patterns=patterns
        )
    return Path(directory) / address.path


def list_files(address: HubAddress) -> list[str]:
    """The names of the files of a repository, within the path of the address."""
    with _explained(address):
        return _within(address, _all_files(address))


def _all_files(address: HubAddress) -> list[str]:
    info = _require_client().HfApi().repo_info(address.repo_id, repo_type=address.kind, revision=address.revision)
    return [file.rfilename for file in info.siblings or ()]


def _within(address: HubAddress, names: Sequence[str]) -> list[str]:
    within = f"{address.path}/" if address.path else ""
    return [name.removeprefix(within) for name in names if name.startswith(within)]


def refuse_foreign(address: HubAddress, names: Sequence[str], one_of: Sequence[str]) -> None:
    """Refuses a repository that has none of the files by which acrlpd knows what a directory holds."""
    if not set(names) & set(one_of):
        found = ", ".join(sorted(names)[:5]) or "nothing"
        raise HubError(
            f"{address} has nothing that acrlpd reads: expected {', '.join(one_of[:-1])} or {one_of[-1]}; found {found}"
        )


def resolve(address: HubAddress) -> str:
    """The commit that the address stands for now."""
    hub = _require_client()
    with _explained(address):
        return str(hub.HfApi().repo_info(address.repo_id, repo_type=address.kind, revision=address.revision).sha)


def download(address: HubAddress, directory: Path) -> None:
    """Copies a repository to a directory. A download that was interrupted goes on with what is there."""
    hub = _require_client()
    wanted = [f"{address.path}/*"] if address.path else None
    with _explained(address):
        hub.snapshot_download(
            address.repo_id,
            repo_type=address.kind,
            revision=address.revision,
            local_dir=directory,
            allow_patterns=wanted,
        )
    shutil.rmtree(directory / ".cache", ignore_errors=True)  # the client's notes about its downloads
    (directory / ".gitattributes").unlink(missing_ok=True)  # the hub's own, which says what git stores elsewhere


def existing_files(address: HubAddress) -> list[str] | None:
    """The names of the files of a repository; None if there is no such repository yet."""
    hub = _require_client()
    with _explained(address):
        try:
            return _all_files(address)
        except hub.errors.RepositoryNotFoundError as error:
            if _status(error) == 401:  # The hub answers so to a wrong token, too.
                raise
            return None


def existing_tags(address: HubAddress) -> list[str]:
    hub = _require_client()
    with _explained(address):
        return [tag.name for tag in hub.HfApi().list_repo_refs(address.repo_id, repo_type=address.kind).tags]


def upload(
    address: HubAddress, folder: Path, *, message: str, tags: Sequence[str], private: bool, replace: Sequence[str]
) -> None:
    """Uploads a folder, and names the new state by `tags`, which may have named another state before.

    A repository that does not exist is made. Files of the repository that match `replace` and are not in the folder
    are deleted from its newest state; the states before keep them.
    """
    hub = _require_client()
    api = hub.HfApi()
    with _explained(address):
        api.create_repo(address.repo_id, repo_type=address.kind, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            repo_type=address.kind,
            folder_path=folder,
            commit_message=message,
            delete_patterns=list(replace),
        )
        named = set(existing_tags(address))
        for tag in tags:
            if tag in named:
                api.delete_tag(address.repo_id, repo_type=address.kind, tag=tag)
            api.create_tag(address.repo_id, repo_type=address.kind, tag=tag)


def _require_client() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ModuleNotFoundError:
        raise HubError(f"the hub needs the package huggingface_hub: {install_command('hub')}") from None
    return huggingface_hub


@contextlib.contextmanager
def _explained(address: HubAddress) -> Iterator[None]:
    """Turns the errors of the hub's client into one line; an error that is not the hub's stays as it is."""
    hub = _require_client()
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        if _is_unreachable(error):
            raise HubError(
                f"the hub at {hub.constants.ENDPOINT} cannot be reached for {address}: check the network and "
                "HF_ENDPOINT, or copy the directory from another machine"
            ) from error
        if isinstance(error, (OSError, ValueError)):
            raise HubError(_reason(hub, error, address)) from error
        raise


def _is_unreachable(error: BaseException) -> bool:
    """Whether there is no way to the hub. The client uses one library or another for its connections."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "LocalEntryNotFoundError" in names and error.__cause__ is not None:  # there is no copy in the cache either
        return _is_unreachable(error.__cause__)
    return bool(names & {"ConnectError", "ConnectTimeout", "ConnectionError", "ReadTimeout", "ProxyError"})


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(hub: ModuleType, error: Exception, address: HubAddress) -> str:
    login = "log in with `hf auth login`, or set HF_TOKEN to a token that may"
    if isinstance(error, hub.errors.GatedRepoError):
        return f"{address} is open only to those who asked for it: ask on its page, then {login} read it"
    if isinstance(error, hub.errors.RevisionNotFoundError):
        with contextlib.suppress(HubError):
            tags = ", ".join(sorted(existing_tags(address))) or "no tags"
            return f"{address.repo_id} has no tag, branch or commit {address.revision!r}; it has {tags}"
    if _status(error) in (401, 403) and "RepositoryNotFoundError" not in type(error).__name__:
        return f"the hub refuses the token for {address}: {login} read and write this repository"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        other: Kind = "model" if address.kind == "dataset" else "dataset"
        if _exists(hub, address.repo_id, other):
            twin = dataclasses.replace(address, kind=other)
            return f"{address.repo_id} is a {other}, where a {address.kind} is wanted; its address is {twin}"
        return (
            f"the hub has no {address.kind} {address.repo_id}, or hides it from you: check the name, and for a private "
            f"repository {login} read it"
        )
    return f"{address}: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"


def _exists(hub: ModuleType, repo_id: str, kind: Kind) -> bool:
    try:
        return bool(hub.HfApi().repo_exists(repo_id, repo_type=kind))
    except (OSError, ValueError):
        return False
