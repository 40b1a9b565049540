"""Downloading: a copy of a repository on this machine, verified."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from acrlpd import hub
from acrlpd.checksums import Recorded, file_problem
from acrlpd.data.pipeline.labels import labels_path
from acrlpd.hub import HubAddress, HubError
from acrlpd.models.openpi_pytorch import WEIGHTS_FILE
from acrlpd.publishing.parcels import LABELS_FILE
from acrlpd.runs.checkpoint_layout import EXPORT_FILE, HUB_FILE, RUN, RUN_FILE
from acrlpd.training.verification import parts_to_verify

# A repository that has none of these holds nothing of acrlpd, openpi or LeRobot.
_KNOWN = (HUB_FILE, EXPORT_FILE, f"{RUN}/{RUN_FILE}", "params/_METADATA", WEIGHTS_FILE, "meta/info.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What was downloaded."""

    directory: Path
    commit: str
    num_verified: int  # files or parts; 0: the repository has no checksums, because others made it


def pull(address: HubAddress, output: Path) -> Pulled:
    """Copies a repository to `output`, which appears when it is complete and verified.

    A download that was interrupted goes on where it ended when the same state is pulled to the same place again.
    """
    output = output.expanduser().absolute()
    if output.exists():
        raise HubError(f"{output} exists; choose another --output")
    commit = hub.resolve(address)
    if not _COMMIT.fullmatch(commit):
        raise HubError(f"{address}: the hub answers with the commit {commit!r}; expected 40 hexadecimal digits")
    state = dataclasses.replace(address, revision=commit)
    hub.refuse_foreign(address, hub.list_files(state), _KNOWN)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{commit[:12]}.partial")
    hub.download(state, partial)
    directory = partial / address.path
    problems, num_verified = _verify(directory)
    if problems:
        shutil.rmtree(partial)
        more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        raise HubError(
            f"{address} is damaged and was not kept: {problems[0]}{more}. Pull another state, or push it again"
        )
    if (directory / LABELS_FILE).is_file() and (directory / "meta" / "info.json").is_file():
        (directory / LABELS_FILE).rename(labels_path(output))  # first: nobody looks for labels inside of a dataset
    directory.rename(output)
    shutil.rmtree(partial, ignore_errors=True)
    return Pulled(output, commit, num_verified)


def _verify(directory: Path) -> tuple[list[str], int]:
    """What is wrong with the copy, and how much of it could be checked."""
    if (directory / EXPORT_FILE).is_file() or (directory / RUN / RUN_FILE).is_file():
        parts = parts_to_verify(directory)
        return [problem for part in parts for problem in part.problems(lambda _: None)], len(parts)
    recorded = dict(_recorded_files(directory))
    return [problem for path, entry in recorded.items() if (problem := file_problem(path, entry))], len(recorded)


def _recorded_files(directory: Path) -> Iterator[tuple[Path, Recorded]]:
    """The files of a dataset with the checksums that the upload wrote down."""
    file = directory / HUB_FILE
    if not file.is_file():
        return
    try:
        for name, (size, checksum) in json.loads(file.read_text()).get("files", {}).items():
            yield directory / name, Recorded(int(size), str(checksum))
    except (ValueError, TypeError, AttributeError) as error:
        raise HubError(f"{file.name} of the repository is damaged: {error}") from error
