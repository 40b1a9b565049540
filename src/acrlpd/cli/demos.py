"""`acrlpd demos`: demonstrations by scripted experts."""

import dataclasses
import json
from pathlib import Path
from typing import Literal

from acrlpd.cli.data import JsonFlag
from acrlpd.text import print


def collect(
    env: str,
    output: Path,
    episodes: int = 100,
    mix: dict[str, float] | None = None,
    success_share: float | None = None,
    seed: int = 0,
    max_episode_steps: int | None = None,
    image_size: tuple[int, int] = (224, 224),
    codec: Literal["h264", "libsvtav1"] = "h264",
    num_workers: int | None = None,
    timeout: float = 300.0,
    json_: JsonFlag = False,
) -> None:
    """Collect a LeRobot v3.0 dataset with rewards. A collection that was interrupted continues.

    Args:
        env: Name of the environment, such as cube-single-play-singletask-v0, or module:name of your own; the module
            registers the environment and its expert.
        output: Directory of the new dataset.
        episodes: Episodes in the dataset.
        mix: Qualities of the expert and their shares, as in `--mix expert 0.2 mixed 0.8`. `acrlpd demos list`
            shows the qualities. Default: expert.
        success_share: Share of successes in the dataset, between 0 and 1. Default: keep every episode.
        seed: Seed of everything random.
        max_episode_steps: Steps after which an episode is cut. Default: the environment's own limit.
        image_size: Height and width of the cameras' images.
        codec: H.264, which encodes fast, or AV1 as lerobot writes it.
        num_workers: Processes that play; 0 means this process. Default: one per core.
        timeout: Seconds that an episode may take before its process is restarted.
    """
    from acrlpd.experts.demonstrations import DemonstrationSettings, collect_demonstrations

    settings = DemonstrationSettings(
        env=env,
        num_episodes=episodes,
        mix=mix or {"expert": 1.0},
        success_share=success_share,
        seed=seed,
        max_episode_steps=max_episode_steps,
        image_size=image_size,
        codec=codec,
    )
    collection = collect_demonstrations(
        settings, output, num_workers=num_workers, timeout_s=timeout, show_progress=not json_
    )
    if json_:
        print(json.dumps(dataclasses.asdict(collection), indent=2, default=str))
        return
    for reason in collection.failures:
        print(f"warning: an environment failed and was restarted: {reason}")
    print(
        f"{output}: {collection.episodes} episodes ({collection.successes} successes), {collection.steps} steps, "
        f"{collection.candidates} episodes tried"
    )


def list_(json_: JsonFlag = False) -> None:
    """List the environments that have a scripted expert, and the qualities of the expert."""
    from acrlpd.experts.expert import list_experts

    experts = list_experts()
    if json_:
        print(json.dumps(experts, indent=2))
        return
    for envs, qualities in experts.items():
        print(envs)
        for quality, shows in qualities.items():
            print(f"  {quality:<8}{shows}")


COMMANDS = {"collect": collect, "list": list_}
