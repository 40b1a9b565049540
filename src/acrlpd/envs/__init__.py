"""Environments behind one adapter, several of them at once, and rollouts of action chunks.

Importing this package imports neither JAX nor a simulator: the processes of parallel environments need no JAX, and a
simulator is imported when one of its environments is made.
"""

from acrlpd.envs.env import Env, EnvError, EnvSpec
from acrlpd.envs.episodes import Rollout, rollout_features
from acrlpd.envs.pool import EnvFailure, EnvPool
from acrlpd.envs.registry import make_env, make_gymnasium, register_env
from acrlpd.envs.rollouts import ChunkPolicy, Chunks, Plan, joint_rollouts, rollouts
