"""`acrlpd push`: uploads a policy or a dataset to the Hugging Face hub."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from acrlpd.config.command_line import Flag
from acrlpd.text import parse_arguments, print


@dataclasses.dataclass(frozen=True)
class PushOptions:
    """Upload an export, a checkpoint of a run, or a dataset to the Hugging Face hub.

    With a policy go its critics, norm statistics, config and report, and a card with measured results. The state of the
    optimizers stays here. A new repository is private unless --public is given.
    """

    # An export, a run (its newest checkpoint is taken), one of its checkpoints, or a LeRobot dataset.
    directory: tyro.conf.Positional[Path]
    # Repository: owner/name.
    repo: tyro.conf.Positional[str]
    # Name of the new state; default: step-<step> for a policy.
    tag: str | None = None
    # Make a new repository public.
    public: Flag = False
    # Move a tag that exists to the new state.
    overwrite: Flag = False
    # Upload the state of the optimizers, too.
    train_state: Flag = False


def main(args: Sequence[str]) -> int:
    options = parse_arguments(PushOptions, args=args, prog="acrlpd push")
    from acrlpd.hub import parse_hub_address
    from acrlpd.process import setup_logging
    from acrlpd.publishing.push import push
    from acrlpd.units import format_bytes

    setup_logging()
    address = push(
        options.directory,
        parse_hub_address(options.repo),
        tag=options.tag,
        public=options.public,
        overwrite=options.overwrite,
        train_state=options.train_state,
        announce=lambda parcel: print(
            f"uploading {parcel.title}: {len(parcel.files)} files, {format_bytes(parcel.num_bytes)}"
        ),
    )
    print(f"pushed to {address}")
    return 0
