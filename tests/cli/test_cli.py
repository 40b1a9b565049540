"""The command line as a user meets it: help, errors with exit code 2, and machine-readable output."""

import json
import re
import subprocess
import sys

import pytest

from acrlpd.cli import doctor
from acrlpd.cli.main import COMMANDS, main
from acrlpd.cli.train import TrainOptions, refuse
from acrlpd.config import ConfigError, apply_config_overrides, cli, get_config, load_config
from acrlpd.config.plan.plan import make_plan


def test_help_lists_every_command_and_does_not_import_jax():
    code = "import sys; from acrlpd.cli.main import main; main(['--help']); sys.exit('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name}" in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name, capsys):
    try:
        code = main([name, "--help"])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 0
    assert f"acrlpd {name}" in capsys.readouterr().out


def shown_flags(capsys, *args) -> list[str]:
    with pytest.raises(SystemExit) as exit_:
        main(["train", *args])
    assert exit_.value.code == 0
    return re.findall(r"^\W+--(?!help)(\w[^\s,]+)", capsys.readouterr().out, re.MULTILINE)


def test_help_shows_twenty_flags_first_and_the_rest_by_section(capsys):
    first = shown_flags(capsys, "--help")
    assert len(first) == 20
    assert {"config", "exp-name", "data-dir", "resume", "batch-size"} <= set(first)
    assert set(first) < set(shown_flags(capsys, "--config", "debug", "--help", "all"))
    section = shown_flags(capsys, "--config", "debug", "--help", "actor-lr-schedule")
    assert section == [f"actor-lr-schedule.{name}" for name in ("warmup-steps", "peak-lr", "decay-steps", "decay-lr")]
    assert {"distributed", "auto-batch", "async", "improvement"} <= set(shown_flags(capsys, "--help", "run"))


def test_help_has_the_values_of_the_config_and_the_comments_of_its_fields(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--config", "quickstart", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "--batch-size INT Windows per update over all devices and micro-batches." in text
    assert "slower steps. (default: 64)" in text


def test_version_and_no_arguments(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("acrlpd ")
    assert main([]) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["configs", "lits"], "unknown command 'lits'; did you mean 'list'?"),
        (["train"], "--config is missing"),
        (["train", "--confg", "debug"], "--config is missing (found --confg)"),
        (["train", "--help", "critics"], "unknown topic of help 'critics'; did you mean 'critic'?"),
        (["train", "--config", "alhoa"], "unknown config 'alhoa'; did you mean 'aloha'?"),
        (["train", "--config", "missing.yaml"], "config file missing.yaml cannot be read: [Errno 2] No such file"),
        (["train", "--config", "debug", "--max_steps", "0"], "--max_steps must be at least 1"),
        (["train", "--config", "debug", "--resume", "--overwrite"], "--resume and --overwrite contradict"),
        (["train", "--config", "debug", "--environment", "prod"], "unknown environment 'prod'"),
        (["plan", "--config", "aloha", "--accelerator", "H3"], "unknown accelerator 'H3'"),
        (["plan", "--config", "aloha", "--devices", "0"], "num_devices must be at least 1; found 0"),
        (["plan", "--config", "aloha_seeds", "--devices", "3"], "does not split into 2 micro-batches over 3 devices"),
        (["plan", "--config", "aloha", "--device-memory", "-1"], "--device-memory must be above 0 GiB"),
        (["configs", "show", "nothing"], "unknown config 'nothing'"),
        (["configs", "diff", "aloha", "drod"], "unknown config 'drod'; did you mean 'droid'?"),
    ],
)
def test_user_errors_give_exit_code_2_and_one_message(args, message, capsys):
    assert main(args) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.startswith("acrlpd: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no_such_flag"], "Unrecognized options: --no_such_flag"),
        (["--batch_size", "many"], "--batch-size"),
        (["--critic.activation", "relux"], "--critic.activation"),
        (["--model.paligemma_variant", "gemma_9b"], "paligemma_variant must be one of"),
    ],
)
def test_flags_that_do_not_exist_or_do_not_parse(args, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--config", "debug", *args])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_config_that_cannot_run_is_refused_with_all_reasons_before_any_compile(capsys):
    batches = ["--batch_size", "31", "--gradient_accumulation_steps", "2"]
    files = ["--data.tokenizer", "no.model", "--weight_loader.path", "no_weights"]
    assert main(["train", "--config", "aloha", *batches, "--qchunking.horizon_length", "30", *files]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "cannot run (5 errors)" in error
    for part in ("batch_size 31", "the critics see 30 actions", "--lerobot_repo_id or --data_dir", *files[1::2]):
        assert part in error


def test_debug_shows_the_traceback(capsys):
    assert main(["configs", "show", "nothing", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_stops_training(capsys):
    """A full fine-tune of pi0 does not fit into this machine's memory, unless it is a very large one."""
    sizes = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "siglip_variant": "So400m/14"}
    model = [part for name, size in sizes.items() for part in (f"--model.{name}", size)]
    args = ["train", "--config", "debug", *model, "--model.image_resolution", "224", "224", "--batch_size", "4096"]
    assert main(args) == 2
    table, error = capsys.readouterr()
    assert "activations" in table
    assert (table + error).count("does not fit") == 1
    assert "--ignore_plan" in error


def test_the_plan_says_what_train_refuses(capsys):
    command = ["plan", "--config", "debug", "--accelerator", "H100"]
    assert main(command) == 0
    assert "refuses" not in capsys.readouterr().out
    assert main([*command, "--offline_steps", "1000000000", "--device_memory", "0.001"]) == 0
    text = capsys.readouterr().out
    assert "refuses a run that does not fit, unless --ignore_plan" in text
    assert "refuses a run of more than a week, unless --allow_long" in text


def test_a_run_of_more_than_a_week_is_refused_unless_it_is_allowed():
    """The network is small, so that the test is; its updates are many."""
    config = apply_config_overrides(get_config("debug"), {"offline_steps": 10**9})
    plan = make_plan(config, accelerator="H100")
    assert plan.is_too_long
    with pytest.raises(ConfigError, match="for 1,000,000,000 updates") as error:
        refuse(plan, TrainOptions())
    [most] = re.findall(r"--max_steps (\d+) takes a week", str(error.value))
    assert "days" in str(error.value) and "--allow_long" in str(error.value)
    refuse(plan, TrainOptions(allow_long=True))
    shorter = apply_config_overrides(config, {"offline_steps": int(most)})
    refuse(make_plan(shorter, accelerator="H100"), TrainOptions())
    unknown = make_plan(config, device_memory_gib=80, device_kind="NVIDIA A800")  # has no time
    refuse(unknown, TrainOptions())
    assert "debug on 1 x NVIDIA A800: " in unknown.summary
    assert "it predicts no time, and no run is too long for it; `acrlpd plan --accelerator NAME`" in unknown.summary
    assert "no time" not in plan.summary


def test_seed_flags_end_up_in_the_config():
    config = cli(
        [
            *("--config", "droid", "--exp_name", "mine", "--pi0_lr", "1e-5", "--critic-lr", "1e-3"),
            *("--batch_size", "32", "--bc_weight", "0.2", "--best_of_n_samples", "8", "--fsdp_devices", "4"),
            *("--gradient_accumulation_steps", "2", "--checkpoint_dir", "/runs", "--lerobot_repo_id", "me/data"),
            *("--data_dir", "/data", "--offline_steps", "100", "--online-steps", "50", "--freeze_pi0_backbone"),
            *("--critic.hidden_dims", "64", "32", "--acrlpd.ema-decay", "None", "--no_wandb"),
        ]
    )
    assert (config.exp_name, config.batch_size, config.freeze_pi0_backbone) == ("mine", 32, True)
    assert config.actor_lr_schedule.peak_lr == 1e-5
    assert config.actor_lr_schedule.decay_lr == pytest.approx(1e-6)
    assert config.critic_lr_schedule.peak_lr == 1e-3
    assert config.acrlpd.loss_weights.bc_weight == 0.2
    assert (config.acrlpd.num_action_samples, config.acrlpd.ema_decay) == (8, None)
    assert (config.fsdp.fsdp_devices, config.training.gradient_accumulation_steps) == (4, 2)
    assert (config.checkpoints.directory, config.data.repo_id, config.data.data_dir) == ("/runs", "me/data", "/data")
    assert (config.training.offline_steps, config.training.online_steps) == (100, 50)
    assert config.critic.hidden_dims == (64, 32)
    assert config.logging.wandb == "disabled"


def test_max_steps_cuts_online_first_and_lengthens_the_last_phase():
    config = cli(["--config", "droid", "--offline_steps", "100", "--online_steps", "50", "--max_steps", "120"])
    assert (config.training.offline_steps, config.training.online_steps) == (100, 20)
    config = cli(["--config", "droid", "--max_steps", "7"])
    assert (config.training.offline_steps, config.training.online_steps) == (7, 0)
    config = cli(["--config", "aloha_fold", "--max_steps", "50000"])  # the preset has 20,000
    assert (config.training.offline_steps, config.training.online_steps) == (50_000, 0)
    config = cli(["--config", "libero", "--max_steps", "50000"])
    assert (config.training.offline_steps, config.training.online_steps) == (20_000, 30_000)
    config = cli(["--config", "libero", "--online_steps", "100", "--max_steps", "50000"])
    assert (config.training.offline_steps, config.training.online_steps) == (49_900, 100)
    config = cli(["--config", "libero", "--offline_steps", "9", "--online_steps", "5", "--max_steps", "50000"])
    assert (config.training.offline_steps, config.training.online_steps) == (9, 5)
    config = cli(["--config", "droid_seeds", "--max_steps", "3000000"])  # nobody can act: there is no environment
    assert (config.training.offline_steps, config.training.online_steps) == (2_800_000, 200_000)


def test_config_from_a_file_with_flags_on_top(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("base_config: debug\ncritic:\n  num_critics: 3\nbatch_size: 16\n")
    config = cli(["--config", str(path), "--batch_size=32"])
    assert (config.critic.num_critics, config.batch_size) == (3, 32)


def test_the_last_of_two_configs_counts():
    assert cli(["--config", "aloha", "--config", "droid"]).name == "droid"
    config = cli(["--config=aloha", "--environment", "debug", "--config=droid", "--environment=production"])
    assert config == get_config("droid")


def test_configs_print_json(capsys):
    assert main(["configs", "list", "--json"]) == 0
    assert "aloha" in json.loads(capsys.readouterr().out)
    assert main(["configs", "show", "aloha", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["critic"]["num_critics"] == 8
    assert main(["configs", "diff", "aloha", "aloha_pi05", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model.pi05"] == {"first": False, "second": True}
    assert main(["configs", "diff", "aloha", "aloha"]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_shown_config_is_a_file_that_loads(capsys, tmp_path):
    assert main(["configs", "show", "libero"]) == 0
    (tmp_path / "libero.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "libero.yaml") == get_config("libero")


def test_plan_prints_a_table_and_json(capsys):
    args = ["plan", "--config", "aloha", "--devices", "8", "--accelerator", "h100 sxm"]
    assert main(args) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("activations", "candidates", "samples/s", "minutes", "disk", "fits: "))
    assert "no time" not in table
    assert main([*args, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    parts = plan["bytes_per_device"]
    assert parts["peak"] <= plan["usable_bytes"] < plan["device_memory_bytes"] == 80 * 2**30
    assert plan["samples_per_second"] == pytest.approx(32 / plan["step_seconds"])
    assert plan["run_seconds"] == pytest.approx(30_000 * plan["step_seconds"])
    disk = plan["disk_bytes"]
    assert disk["total"] == disk["num_checkpoints"] * disk["checkpoint"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device-memory", "24"], "no time, because --device-memory names no accelerator"),
        ([], "no time, because this machine has no accelerator that the plan knows"),
    ],
)
def test_a_plan_without_an_accelerator_says_why_it_has_no_time(args, message, capsys):
    assert main(["plan", "--config", "debug", *args]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert message in text and "RTX-4090" in text
    assert "samples/s" not in text and "peak" in text and "checkpoints of" in text


def test_doctor_reports_what_breaks_instead_of_breaking(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"packages": doctor.check_packages, "disk": lambda: 1 / 0})
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [check["status"] for check in report["checks"]] == ["ok", "failed"]
    assert "ZeroDivisionError" in report["checks"][1]["message"]
    assert main(["doctor"]) == 1
    assert "not ready" in capsys.readouterr().out


@pytest.mark.parametrize(
    "check", [doctor.check_packages, doctor.check_extras, doctor.check_devices, doctor.check_rendering]
)
def test_doctor_looks_at_this_machine(check):
    result = check()
    assert result.status in ("ok", "warning")
    assert result.message


@pytest.mark.slow
def test_doctor_finds_this_machine_healthy():
    command = [sys.executable, "-m", "acrlpd.cli.main", "doctor", "--train", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert report["healthy"]
    checks = {check["name"]: check for check in report["checks"]}
    assert set(checks) == {"packages", "extras", "devices", "rendering", "tokenizer", "train step"}
    assert len(checks["train step"]["details"]["losses"]) == 2
