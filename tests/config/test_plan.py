"""The plan as a whole: verdicts, the smallest change, predicted time."""

import dataclasses
import importlib.util
import io
import json
import re
from pathlib import Path

import pytest

from acrlpd.cli.plan import plan_to_dict, print_plan
from acrlpd.config import ConfigError, apply_config_overrides, get_config, list_configs
from acrlpd.config.plan.accelerators import accelerator, find_accelerator
from acrlpd.config.plan.cost import estimate_disk
from acrlpd.config.plan.plan import GIB, larger_accumulations, make_plan
from acrlpd.config.registry import describe_config
from acrlpd.console import Console

ROOT = Path(__file__).parents[2]
# A full fine-tune of full-size pi0 that one 80 GB device just holds.
FULL = apply_config_overrides(
    get_config("aloha"),
    {
        "freeze_pi0_backbone": False,
        "model.action_horizon": 50,
        "batch_size": 32,
        "gradient_accumulation_steps": 1,
        "best_of_n_samples": 4,
        "critic.num_critics": 10,
        "critic.hidden_dims": [512, 512, 512],
    },
)


# The methods of the Q-chunking paper differ in their programs, its domains only in the width of the state.
OTHER_DOMAINS = ("cube_triple", "cube_quadruple", "scene", "puzzle_3x3")
# Presets whose program is that of another preset: they differ in their data or in the number of candidates.
SAME_PROGRAM = ("quickstart_mixed", "bfn_n_cube_double", "fql_n_cube_double", "rlpd_ac_cube_double")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in list_configs()
        if not name.startswith("rl_") and not name.endswith((*OTHER_DOMAINS, "_seeds")) and name not in SAME_PROGRAM
    ],
)
def test_every_preset_plans_and_prints(name):
    """Presets that name their hardware run there, and take the time and the disk that they say."""
    said = re.search(r"takes (\S+) hours\sand\s(\S+) GiB of disk on\s(one|eight)\s(\w+)", describe_config(name))
    number, accelerator = ("eight", "H200") if said is None else said.group(3, 4)
    plan = make_plan(get_config(name), num_devices={"one": 1, "eight": 8}[number], accelerator=accelerator)
    assert plan.fits
    assert plan.step_seconds > 0
    assert not plan.is_too_long
    if said is not None:
        assert plan.run_seconds / 3600 == pytest.approx(float(said.group(1)), rel=0.05)
        assert plan.disk.total / 2**30 == pytest.approx(float(said.group(2)), rel=0.05)
    assert (said is not None) == (get_config(name).weight_loader.path or "").startswith("gs://")
    console = Console(width=100, file=io.StringIO())
    print_plan(plan, console)
    text = console.file.getvalue()
    arrays = ("parameters", "gradients", "optimizer", "ema", "critics", "activations", "candidates", "batch")
    for word in (*arrays, "FLOP"):
        assert word in text
    assert json.loads(json.dumps(plan_to_dict(plan)))["fits"] is True


def test_the_page_about_hardware_is_what_its_script_makes():
    """One row, because a row of another preset takes seconds; the plan of this one is known from the test above."""
    spec = importlib.util.spec_from_file_location("hardware", ROOT / "benchmarks" / "hardware.py")
    hardware = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hardware)
    page = hardware.PAGE.read_text()
    assert page.startswith(hardware.HEADER)
    assert hardware.row("aloha", "H100", 1) in page.splitlines()
    assert len(page.removeprefix(hardware.HEADER).splitlines()) == 7 * 4 * 2


def test_full_fine_tune_needs_what_was_measured():
    """One H200, as XLA and the clock said; benchmarks/plan_against_xla-2026-11-15.md has all that was measured."""
    plan = make_plan(FULL, accelerator="H200")
    assert plan.memory.peak / 2**30 == pytest.approx(67.8, rel=0.06)
    assert plan.step_seconds == pytest.approx(1.422, rel=0.03)
    frozen = make_plan(apply_config_overrides(FULL, {"freeze_pi0_backbone": True}), accelerator="H200")
    assert frozen.memory.peak / 2**30 == pytest.approx(14.3, rel=0.06)
    assert frozen.step_seconds == pytest.approx(0.770, rel=0.03)
    assert plan.disk.checkpoint / 2**30 == pytest.approx(48.34, rel=0.01)
    assert frozen.disk.checkpoint / 2**30 == pytest.approx(10.23, rel=0.01)


@pytest.mark.parametrize(
    ("name", "changes", "measured"),
    [
        # Measured before its targets became those of an implicit value, which need no candidates.
        ("aloha_sim", {"backup": "best_of_n", "acrlpd.policy_data": "all"}, 23.3e-3),
        ("qc_cube_double", {}, 0.946e-3),
    ],
)
def test_small_policies_take_the_time_of_many_small_products(name, changes, measured):
    plan = make_plan(apply_config_overrides(get_config(name), changes), accelerator="H200")
    assert plan.step_seconds == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(
    ("devices", "memory", "changes", "expected"),
    [
        (1, 80, {}, set()),
        (1, 80, {"model.remat_policy": "dots"}, {"model.remat_policy"}),
        (1, 96, {"batch_size": 128}, {"training.gradient_accumulation_steps"}),
        (8, 48, {}, {"fsdp.fsdp_devices"}),
        (1, 40, {}, {"model.paligemma_variant"}),
        (1, 16, {}, {"freeze_pi0_backbone"}),
        (1, 15, {}, {"freeze_pi0_backbone", "training.gradient_accumulation_steps"}),
        (1, 8, {}, None),
    ],
)
def test_smallest_change(devices, memory, changes, expected):
    config = apply_config_overrides(FULL, changes)
    plan = make_plan(config, num_devices=devices, device_memory_gib=memory)
    if expected is None:
        assert plan.suggestion is None
        assert "use more or larger devices" in plan.verdict
        return
    assert plan.suggestion is not None
    assert set(plan.suggestion) == expected
    changed = apply_config_overrides(config, plan.suggestion)
    assert make_plan(changed, num_devices=devices, device_memory_gib=memory).fits
    for key, value in plan.suggestion.items():
        assert f"--{key}" in plan.verdict
        assert value is True or f"--{key} {value}" in plan.verdict


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"offline_steps": 100, "save_frequency": 1_000}, 1),  # at the end only
        ({"offline_steps": 5_000}, 2),  # the newest, and the one that replaces it
        ({"offline_steps": 5_000, "max_to_keep": 3}, 4),
        ({"offline_steps": 20_000, "keep_period": 5_000}, 5),  # 5, 10, 15, 20, and the one that replaces 19
        ({"offline_steps": 20_000, "keep_period": 5_000, "save_frequency": 2_000}, 3),  # 10 and 20, while 18 is there
        ({"offline_steps": 5_000, "env.id": "x"}, 3),  # the best
        ({"offline_steps": 5_000, "data.validation_share": 0.1}, 3),  # the best by held-out episodes
    ],
)
def test_checkpoints_on_disk(changes, kept):
    sections = {"save_frequency": "training.", "max_to_keep": "checkpoints.", "keep_period": "checkpoints."}
    defaults = {"save_frequency": 1_000, "max_to_keep": 1, "keep_period": None, "data.validation_share": 0.0}
    changes = {f"{sections.get(name, '')}{name}": value for name, value in (defaults | changes).items()}
    disk = estimate_disk(apply_config_overrides(get_config("debug"), changes))
    assert (disk.num_checkpoints, disk.replay) == (kept, 0)


def test_disk_of_the_replay():
    """As many environment steps as the updates need, with JPEGs of each camera."""
    config = get_config("aloha_sim")
    steps = 4_000 + 2_250 / 0.04
    assert estimate_disk(config).replay == pytest.approx(steps * 3 * 84 * 84 * 3 * 0.15, rel=0.05)


def test_time_scales_with_work_and_chips():
    one = make_plan(FULL, accelerator="H100").step_seconds
    assert make_plan(FULL, accelerator="A100-80GB").step_seconds > 2 * one
    assert make_plan(FULL, num_devices=8, accelerator="H100").step_seconds < one / 4
    more = apply_config_overrides(FULL, {"best_of_n_samples": 32})
    assert make_plan(more, accelerator="H100").step_seconds > 2 * one


def test_on_a_cpu_the_plan_counts_float32() -> None:
    """A full update of the frozen pi0 took 10.2 GiB of state and asked for 28.8 GiB more, on a CPU on 2026-11-19."""
    config = apply_config_overrides(get_config("aloha_seeds"), {"data.repo_id": "fake"})
    assert make_plan(config, device_memory_gib=24).fits
    plan = make_plan(config, device_memory_gib=24, on_cpu=True)
    assert not plan.fits and plan.memory.peak == pytest.approx(39 * GIB, rel=0.3)
    assert "JAX finds no GPU or TPU here" in plan.verdict and "`acrlpd doctor`" in plan.verdict
    assert make_plan(config, device_memory_gib=64, on_cpu=True).fits


def test_without_an_accelerator_there_is_no_time():
    plan = make_plan(FULL, device_memory_gib=80)
    assert plan.step_seconds is None and plan.run_seconds is None and not plan.is_too_long
    console = Console(width=100, file=io.StringIO())
    print_plan(plan, console)
    text = console.file.getvalue()
    assert "peak" in text and "FLOP" not in text  # without a time, they say nothing
    assert dataclasses.replace(plan, device_memory_gib=10).fits is False
    with pytest.raises(ValueError, match="device_memory_gib"):
        make_plan(FULL)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        # As people write them.
        *(("h200", "H200"), ("rtx 4090", "RTX-4090"), ("RTX4090", "RTX-4090"), ("4090", "RTX-4090")),
        *(("a100-80gb", "A100-80GB"), ("A100 40", "A100-40GB"), ("H100 SXM", "H100"), ("h100sxm5", "H100")),
        *(("v5e", "TPU-v5e"), ("tpu v6e", "TPU-v6e"), ("RTX A6000", "A6000"), ("rtx6000ada", "RTX-6000-Ada")),
        # As JAX names devices.
        *(("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe")),
        *(("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-PCIE-40GB", "A100-40GB")),
        *(("NVIDIA GeForce RTX 4090", "RTX-4090"), ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada")),
        *(("TPU v4", "TPU-v4"), ("TPU v5 lite", "TPU-v5e"), ("TPU v5", "TPU-v5p"), ("NVIDIA L4", "L4")),
        *(("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("NVIDIA GeForce RTX 3090", "RTX-3090"), ("NVIDIA B200", "B200")),
        *(("NVIDIA GeForce RTX 5090", "RTX-5090"), ("NVIDIA L40S", "L40S"), ("NVIDIA RTX A6000", "A6000")),
        *(("NVIDIA A10", "A10"), ("NVIDIA A10G", "A10G"), ("TPU v5p", "TPU-v5p"), ("TPU v6 lite", "TPU-v6e")),
        *(("NVIDIA H100 NVL", "H100-NVL"), ("NVIDIA GH200 480GB", "GH200"), ("GH200 96GB", "GH200")),
        *(("NVIDIA L40", "L40"), ("NVIDIA A40", "A40"), ("NVIDIA GeForce RTX 3090 Ti", "RTX-3090-Ti")),
        *(("3090ti", "RTX-3090-Ti"), ("l4 24gb", "L4"), ("B200 192GB", "B200")),
    ],
)
def test_accelerators_by_their_usual_names(given: str, name: str) -> None:
    assert accelerator(given).name == name


@pytest.mark.parametrize(
    "given",
    [
        *("h20", "cpu", "24GB", "NVIDIA H1000", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        *("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "H200 NVL"),
        *("NVIDIA H100 96GB HBM3", "NVIDIA GH200 144G HBM3e", "GH200 144GB", "Tesla V100-SXM2-32GB"),
    ],
)
def test_other_devices_are_not_taken_for_known_ones(given: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown accelerator '{given}'"):
        accelerator(given)


def test_an_accelerator_of_two_sizes_needs_its_size() -> None:
    with pytest.raises(ConfigError, match="did you mean A100-40GB or A100-80GB"):
        accelerator("A100")
    assert find_accelerator() is None  # tests run on CPUs


@pytest.mark.parametrize(("batch_size", "devices", "now"), [(24, 2, 2), (24, 5, 1), (7, 1, 1), (36, 1, 3)])
def test_larger_accumulations_are_all_that_divide_the_batch(batch_size, devices, now):
    config = apply_config_overrides(
        get_config("debug"), {"batch_size": batch_size, "training.gradient_accumulation_steps": now}
    )
    wanted = [steps for steps in range(now + 1, batch_size + 1) if batch_size % (steps * devices) == 0]
    assert list(larger_accumulations(config, devices)) == wanted
