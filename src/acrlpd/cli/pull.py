"""`acrlpd pull`: downloads a policy or a dataset from the Hugging Face hub, and verifies it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from acrlpd.text import parse_arguments, print


@dataclasses.dataclass(frozen=True)
class PullOptions:
    """Download a repository of the Hugging Face hub to a directory, and verify its files."""

    # Repository: owner/name, owner/name@tag, or datasets/owner/name for a dataset.
    repo: tyro.conf.Positional[str]
    # Directory to make.
    output: Path


def main(args: Sequence[str]) -> int:
    options = parse_arguments(PullOptions, args=args, prog="acrlpd pull")
    from acrlpd.hub import parse_hub_address
    from acrlpd.process import setup_logging
    from acrlpd.publishing.pull import pull

    setup_logging()
    pulled = pull(parse_hub_address(options.repo), options.output)
    checked = f"{pulled.num_verified} checked" if pulled.num_verified else "nothing to check, it has no checksums"
    print(f"pulled commit {pulled.commit[:12]} to {options.output} ({checked})")
    return 0
