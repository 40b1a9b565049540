"""A measurement as a scenario with four seeds would give it, for tests of what is made of measurements."""

from typing import Any

from acrlpd.config import config_hash, get_config, to_dict
from acrlpd.evaluation.statistics import wilson_interval
from acrlpd.regression.baseline import Measurement, Origin, Success

ORIGIN = Origin(
    date="2026-11-18",
    acrlpd="0.1.0",
    jax="0.10.2",
    jaxlib="0.10.2",
    python="3.11.7",
    processor="a processor",
    cores=2,
    devices="1 x cpu",
)


def success(*successes: int, episodes: int = 25) -> Success:
    total = episodes * len(successes)
    return Success(successes, (episodes,) * len(successes), wilson_interval(sum(successes), total))


def measurement(**changes: Any) -> Measurement:
    config = get_config("debug")
    fields: dict[str, Any] = {
        "scenario": "example",
        "seeds": (0, 1, 2, 3),
        "config": to_dict(config),
        "config_hash": config_hash(config),
        "origin": ORIGIN,
        "early": {"critic_loss": (1.0, 1.1, 0.9, 1.05), "actor_loss": (0.0, 0.0, 0.0, 0.0)},
        "final": {"critic_loss": (0.50, 0.55, 0.45, 0.52), "actor_loss": (0.0, 0.0, 0.0, 0.0)},
        "metric_names": ("actor_loss", "critic_loss"),
        "success": {"offline": success(21, 18, 22, 25)},
        "update_flops": 2e7,
        "program_bytes": 2_000_000,
        "num_compilations": 14,
        "peak_host_bytes": 900_000_000,
        "update_cost": (0.0200, 0.0194, 0.0196, 0.0201, 0.0182, 0.0198, 0.0166, 0.0190, 0.0276),
        "problems": (),
    }
    return Measurement(**(fields | changes))
