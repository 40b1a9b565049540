"""`acrlpd data stats`: the norm statistics of a config's dataset, with every flag that `acrlpd train` has."""

import dataclasses
from collections.abc import Sequence

from acrlpd.config.command_line import Flag, parse_config_args
from acrlpd.config.data import NORM_STATS_FILE
from acrlpd.data.pipeline.config_norm_stats import write_norm_stats
from acrlpd.text import print


@dataclasses.dataclass(frozen=True)
class StatsOptions:
    """Compute the norm statistics of a config's dataset, from its columns alone."""

    # Replace statistics of the same name that belong to another dataset, another config or released weights.
    overwrite: Flag = False


def main(args: Sequence[str]) -> int:
    config, options = parse_config_args(StatsOptions, args, prog="acrlpd data stats")
    directory, norm_stats = write_norm_stats(config, overwrite=options.overwrite)
    for name, values in norm_stats.items():
        print(f"{name}: {values.dim} dims")
    print(f"wrote {directory / NORM_STATS_FILE}")
    return 0
