"""Writes docs/hardware.md: what the robots' presets take on usual GPUs, by the plan. Needs no GPU, and a minute or two.

Run `python benchmarks/hardware.py`.
"""

import pathlib
from collections.abc import Iterator

from acrlpd.config import RLTrainConfig, apply_config_overrides, get_config
from acrlpd.config.plan.plan import Plan, as_flags, make_plan
from acrlpd.units import format_bytes, format_duration, format_seconds

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "hardware.md"
PRESETS = ("aloha", "aloha_pi05", "droid", "droid_pi05", "libero", "libero_pi05", "aloha_fold")
# One of each usual size: 24, 48, 80 and 141 GB.
ACCELERATORS = ("RTX-4090", "L40S", "H100", "H200")
HEADER = """\
# Which GPU for which preset

Made by `python benchmarks/hardware.py` from [the plan](configuration.md#the-plan); `acrlpd plan --config NAME
--accelerator GPU --devices N` says the same for your own config, for 24 accelerators.

Memory is the peak on one device. Hours are those of all updates; playing and evaluations come on top. Disk is what
checkpoints and replay take when they take the most. A flag in the last column is the smallest change with which the
preset fits, and the other columns are those of the preset with this flag. Times were fitted to updates measured on one
H200, where full-size policies agree within 1 %. No other GPU was measured: expect a third more or less there, and more
on GPUs without NVLink.

| preset | GPUs | memory | an update | the run | disk | change |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    PAGE.write_text(HEADER + "".join(f"{line}\n" for name in PRESETS for line in rows(name)))


def rows(preset: str) -> Iterator[str]:
    """One row for each GPU, alone and eight of them."""
    for accelerator in ACCELERATORS:
        for num_devices in (1, 8):
            yield row(preset, accelerator, num_devices)


def row(preset: str, accelerator: str, num_devices: int) -> str:
    config = get_config(preset)
    if config.fsdp.fsdp_devices > num_devices:
        config = apply_config_overrides(config, fsdp_devices=num_devices)
    change, plan = fit(config, accelerator, num_devices)
    known = plan.fits and plan.step_seconds is not None and plan.run_seconds is not None
    cells = [
        f"`{preset}`",
        plan.devices,
        format_bytes(plan.memory.peak) if plan.fits else f"{format_bytes(plan.memory.peak)}: too much",
        format_seconds(plan.step_seconds or 0.0) if known else "",
        format_duration(plan.run_seconds or 0.0) if known else "",
        format_bytes(plan.disk.total) if known else "",
        change,
    ]
    return f"| {' | '.join(cells)} |"


def fit(config: RLTrainConfig, accelerator: str, num_devices: int) -> tuple[str, Plan]:
    """The change that the config needs, and the plan with this change."""
    plan = make_plan(config, num_devices=num_devices, accelerator=accelerator)
    if plan.suggestion is None:
        return "none helps", plan
    if not plan.suggestion:
        return "", plan
    changed = apply_config_overrides(config, plan.suggestion)
    return f"`{as_flags(plan.suggestion)}`", make_plan(changed, num_devices=num_devices, accelerator=accelerator)


if __name__ == "__main__":
    main()
