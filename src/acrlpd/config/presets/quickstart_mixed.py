"""The quick start with demonstrations that a filter can sort: most of them move the cube to the wrong place.

The scripted expert has strong noise on every action, and in about two of three episodes it moves the cube to the wrong
place. The expert decides for a place once, so a success is an expert's from beginning to end: there is little to gain
beyond imitation of the successes. Everything but the demonstrations is that of the preset `quickstart`.
"""

import dataclasses

from acrlpd.config.data import DemonstrationsConfig
from acrlpd.config.presets import quickstart

CONFIG = dataclasses.replace(
    quickstart.CONFIG,
    name="quickstart_mixed",
    data=dataclasses.replace(
        quickstart.CONFIG.data,
        data_dir="./data/quickstart_mixed",
        demonstrations=DemonstrationsConfig(num_episodes=80, quality="mixed", max_episode_steps=100),
    ),
)
