"""Environments behind one adapter, several at once, rollouts of action chunks, demonstrations.

Importing this imports neither JAX nor a simulator: the processes of parallel environments need no JAX, and
a simulator is imported when an environment of it is made.
"""

from acrlpd.envs.env import Env, EnvSpec, Step
from acrlpd.envs.episodes import Rollout, rollout_features
from acrlpd.envs.errors import EnvError
from acrlpd.envs.pool import EnvFailure, EnvPool
from acrlpd.envs.registry import list_envs, make_env, make_gymnasium, register_env
from acrlpd.envs.rollouts import ChunkPolicy, Chunks, rollouts

__all__ = [
    "ChunkPolicy",
    "Chunks",
    "Env",
    "EnvError",
    "EnvFailure",
    "EnvPool",
    "EnvSpec",
    "Rollout",
    "Step",
    "list_envs",
    "make_env",
    "make_gymnasium",
    "register_env",
    "rollout_features",
    "rollouts",
]
