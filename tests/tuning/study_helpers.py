"""Studies whose trials are real processes that do not train."""

import pathlib
import sys
from typing import Any

from acrlpd.config import RLTrainConfig, apply_config_overrides, get_config
from acrlpd.process import setup_logging
from acrlpd.tuning.objective import choose_objective
from acrlpd.tuning.report import StudyResult
from acrlpd.tuning.space import Space, parse_space
from acrlpd.tuning.study_files import StudySettings, split_evenly
from acrlpd.tuning.trial import TrialStarter
from acrlpd.tuning.tuner import run_study

FAKE_TRIAL = (sys.executable, str(pathlib.Path(__file__).with_name("fake_trial.py")))
RATES = "  rates: {pi0_lr: {low: 1.0e-5, high: 1.0e-1, log: true}}\n"
CRITICS = "  critics: {critic.num_critics: [2, 4]}\n"
STAGES = f"stages:\n{CRITICS}{RATES}"
SEEDS = (0, 1)


def tuned_config(directory: pathlib.Path, **overrides: Any) -> RLTrainConfig:
    """A config whose trials are judged in an environment."""
    changes = {"env.id": "toy_env:toy", "checkpoints.directory": str(directory), "training.offline_steps": 40}
    return apply_config_overrides(get_config("debug"), changes | overrides)


def make_space(config: RLTrainConfig, text: str = STAGES) -> Space:
    return parse_space(text, "space.yaml", config)


def run(
    directory: pathlib.Path,
    *,
    text: str = STAGES,
    trials: int = 8,
    jobs: int = 2,
    evaluations: int = 1,
    final_seeds: int = 0,
    **overrides: Any,
) -> StudyResult:
    """Runs or continues a study in this process."""
    setup_logging()
    config = tuned_config(directory, **overrides)
    space = make_space(config, text)
    settings = StudySettings(SEEDS, 20, evaluations, split_evenly(trials, len(space.stages)))
    starter = TrialStarter(choose_objective(config), jobs, FAKE_TRIAL)
    return run_study(config, space, settings, starter, trials=trials, final_seeds=final_seeds, final_steps=None)


def is_alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
