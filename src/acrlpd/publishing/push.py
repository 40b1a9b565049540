"""Uploading: a folder is put together of links to the files and of what is written for the hub, and sent."""

import dataclasses
import json
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from acrlpd import hub
from acrlpd.checksums import CHECKSUMS_FILE
from acrlpd.hub import HubAddress, HubError
from acrlpd.models.openpi_pytorch import WEIGHTS_FILE
from acrlpd.monitoring.report import generate_training_report
from acrlpd.publishing.cards import REPORT_FILE
from acrlpd.publishing.parcels import LABELS_FILE, README, Parcel, pack
from acrlpd.runs.checkpoint_layout import EXPORT_FILE, HUB_FILE
from acrlpd.runs.directory import CONFIG_FILE
from acrlpd.training.verification import parts_to_verify

# Files that the hub itself puts into a new repository.
_OF_THE_HUB = (".gitattributes", README)
# What an upload replaces: everything that acrlpd puts into a repository.
_REPLACED = (
    *("params/*", "critic/*", "assets/*", "run/*", "train_state/*", CONFIG_FILE, "config.json", EXPORT_FILE),
    *(CHECKSUMS_FILE, WEIGHTS_FILE, "report.*", "meta/*", "data/*", "videos/*", "images/*", LABELS_FILE),
)


def push(
    directory: Path,
    address: HubAddress,
    *,
    tag: str | None = None,
    public: bool = False,
    overwrite: bool = False,
    train_state: bool = False,
    announce: Callable[[Parcel], object] = lambda _: None,
) -> HubAddress:
    """Uploads an export, the newest checkpoint of a run, one checkpoint, or a dataset, and tags the new state.

    Returns the address with the tag. `tag` None is step-<step> for a policy. A tag that exists is moved only with
    `overwrite`. `announce` is called before the first byte is sent.
    """
    parcel = pack(directory, train_state=train_state)
    if parcel.kind == "dataset":
        address = dataclasses.replace(address, kind="dataset")
    elif address.kind == "dataset":
        raise HubError(f"{directory} is a policy, and {address} is the address of a dataset; leave datasets/ out")
    if address.revision is not None or address.path:
        raise HubError(f"push to owner/name; found {address}. --tag names the new state")
    own = (tag,) if tag is not None else parcel.tags if parcel.kind == "model" else ()
    _refuse_what_would_be_lost(address, own, overwrite=overwrite)
    if parcel.kind == "model":
        _refuse_damage(parcel)
    announce(parcel)
    state = dataclasses.replace(address, revision=own[0] if own else None)
    with tempfile.TemporaryDirectory(prefix="acrlpd-push-") as folder:
        _put_together(parcel, Path(folder), state)
        hub.upload(
            address,
            Path(folder),
            message=f"Upload {parcel.title}",
            tags=tuple(dict.fromkeys((*own, *(parcel.tags if parcel.kind == "dataset" else ())))),
            private=not public,
            replace=_REPLACED,
        )
    return state


def _refuse_what_would_be_lost(address: HubAddress, tags: tuple[str, ...], *, overwrite: bool) -> None:
    names = hub.existing_files(address)
    if names is None:
        return
    if HUB_FILE not in names and set(names) - set(_OF_THE_HUB):
        others = ", ".join(sorted(set(names) - set(_OF_THE_HUB))[:3])
        raise HubError(f"{address} has files that acrlpd did not put there ({others}): choose another repository")
    taken = sorted(set(tags) & set(hub.existing_tags(address)))
    if taken and not overwrite:
        raise HubError(f"{address} has the tag {taken[0]} already: choose another --tag, or move it with --overwrite")


def _refuse_damage(parcel: Parcel) -> None:
    """Damaged files are noticed here and not by everybody who downloads them. What stays here may be damaged."""
    for part in parts_to_verify(parcel.directory):
        if part.name in parcel.description["left_out"]:
            continue
        for problem in part.problems(lambda _: None):
            raise HubError(f"nothing was uploaded: {problem}")


def _put_together(parcel: Parcel, folder: Path, address: HubAddress) -> None:
    for name, path in parcel.files.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    if parcel.record is not None:
        generate_training_report([parcel.record.directory], folder / REPORT_FILE)
    description = {"acrlpd": version("acrlpd"), **parcel.description}
    (folder / HUB_FILE).write_text(json.dumps(description, indent=1) + "\n")
    (folder / README).write_text(parcel.card(address))
