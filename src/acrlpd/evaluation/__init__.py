"""The evaluation protocol: success with its interval, robustness, calibration, reports."""

from acrlpd.evaluation.calibration import Calibration, best_of_n_effect, calibrate
from acrlpd.evaluation.protocol import (
    Evaluation,
    EvaluationProtocol,
    create_env_pool,
    evaluate_policy,
    replan_steps,
)
from acrlpd.evaluation.report import print_evaluations, summary_table, write_json
from acrlpd.evaluation.statistics import Summary, summarize, wilson_interval
from acrlpd.evaluation.traces import EpisodeTrace

__all__ = [
    "Calibration",
    "EpisodeTrace",
    "Evaluation",
    "EvaluationProtocol",
    "Summary",
    "best_of_n_effect",
    "calibrate",
    "create_env_pool",
    "evaluate_policy",
    "print_evaluations",
    "replan_steps",
    "summarize",
    "summary_table",
    "wilson_interval",
    "write_json",
]
