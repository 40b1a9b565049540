"""`acrlpd plan`: what a config needs, before it runs."""

import dataclasses
import json
import math
from collections.abc import Sequence

from acrlpd.config.command_line import Flag, parse_config_args
from acrlpd.config.tree import ConfigError
from acrlpd.config.validation import validate_config


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The devices that the plan is made for."""

    # Number of accelerators; default: as many as the config's fsdp_devices.
    devices: int | None = None
    # Name of the accelerator; an unknown name lists the known ones.
    accelerator: str = "H100"
    # Memory of one accelerator in GiB; default: the memory of the named accelerator.
    device_memory: float | None = None
    # Print JSON.
    json: Flag = False


def main(args: Sequence[str]) -> int:
    """Prints the plan. The command succeeds even if the config does not fit."""
    config, options = parse_config_args(
        PlanOptions,
        args,
        prog="acrlpd plan",
        description="Memory, FLOPs and step time of a config on named accelerators; nothing is compiled.",
    )
    if options.device_memory is not None and not 0 < options.device_memory < math.inf:
        raise ConfigError(f"--device-memory must be above 0 GiB; found {options.device_memory}")
    num_devices = config.fsdp.fsdp_devices if options.devices is None else options.devices
    validate_config(config, num_devices=num_devices).raise_for_errors()
    from acrlpd.config.plan.plan import make_plan
    from acrlpd.config.plan.table import plan_to_dict, print_plan

    plan = make_plan(
        config,
        num_devices=num_devices,
        device_memory_gib=options.device_memory,
        accelerator=options.accelerator,
    )
    if options.json:
        print(json.dumps(plan_to_dict(plan), indent=2))
    else:
        print_plan(plan)
    return 0
