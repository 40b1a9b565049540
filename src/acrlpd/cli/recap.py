"""`acrlpd recap`: RECAP in rounds of training and playing."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge

from acrlpd.cli.train import PlanLimits, TrainOptions, check
from acrlpd.config.bounds import require_bounds
from acrlpd.config.command_line import parse_config_args
from acrlpd.config.overrides import apply_config_overrides
from acrlpd.config.plan.accelerators import claim_device_memory


@dataclasses.dataclass(frozen=True)
class RecapOptions(PlanLimits):
    """Train in rounds; after each round the policy plays, and the next round learns from these episodes as well.

    Every round starts from the weights that the config names. The same command continues after an interruption.
    """

    # Rounds of training and playing.
    rounds: Annotated[int, Ge(1)] = 2
    # Episodes that the policy of each round plays.
    episodes: Annotated[int, Ge(1)] = 50


# Options that `acrlpd recap --help run` shows.
_RARE = tuple(field.name for field in dataclasses.fields(PlanLimits))


def main(args: Sequence[str]) -> int:
    config, options = parse_config_args(RecapOptions, args, prog="acrlpd recap", rare=_RARE)
    require_bounds(options, "--")
    claim_device_memory()
    from acrlpd.training.demonstrations import collect_missing_demonstrations
    from acrlpd.training.recap_rounds import check_rounds, run_rounds

    config = apply_config_overrides(config, {"online.episodes_per_round": options.episodes})
    check_rounds(config)
    collect_missing_demonstrations(config)
    check([config], TrainOptions(ignore_plan=options.ignore_plan, allow_long=options.allow_long))
    return run_rounds(config, num_rounds=options.rounds)
