"""`aloha_sim` with demonstrations that a filter cannot sort: the quick ones fail, and the successes make detours.

In half of the demonstrations the right arm first grasps beside the cube, which costs 65 steps, and then hands the cube
over. In the other half the right arm is quick, but the left hand closes before it has reached the cube. The policy has
210 steps, which are enough for the quick way and too few for the detour. Imitation of the successes makes the detour.
Critics learn from all demonstrations that the quick beginning and the good ending belong together, so the policy clones
everything and the critics choose. The reward is -1 until the success, so that a detour costs something.

What the preset reaches has not been measured yet.
"""

import dataclasses

from acrlpd.config.data import DemonstrationsConfig
from acrlpd.config.presets import aloha_sim

CONFIG = dataclasses.replace(
    aloha_sim.CONFIG,
    name="aloha_sim_detours",
    acrlpd=dataclasses.replace(aloha_sim.CONFIG.acrlpd, policy_data="all", discount=0.99),
    qchunking=dataclasses.replace(aloha_sim.CONFIG.qchunking, success_ratio=None),
    data=dataclasses.replace(
        aloha_sim.CONFIG.data,
        data_dir="./data/aloha_sim_detours",
        rewards=dataclasses.replace(aloha_sim.CONFIG.data.rewards, kind="minus_one_zero"),
        demonstrations=DemonstrationsConfig(num_episodes=300, quality="detours", max_episode_steps=300),
    ),
    env=dataclasses.replace(aloha_sim.CONFIG.env, max_episode_steps=210),
)
