"""What a scripted expert is, which expert acts in which environment, and one demonstration.

Environments know nothing of experts: the table in this module finds the expert by the environment's name.
"""

import abc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from acrlpd.choice import hint, import_name
from acrlpd.envs.env import Env, EnvError, Step
from acrlpd.envs.episodes import Rollout, stack
from acrlpd.envs.registry import OGBENCH_NAMES, find_by_pattern, import_registration, is_registered, typed_names


class Expert(abc.ABC):
    """Acts in one episode of an environment. An expert may read the state of the simulator."""

    # The name of each quality -> what demonstrations of this quality show, for `acrlpd demos list`.
    qualities: ClassVar[Mapping[str, str]]

    @abc.abstractmethod
    def __init__(self, env: Env, quality: str, rng: np.random.Generator) -> None:
        """`env` has been reset: the expert is for the episode that begins. Everything random comes from `rng`."""

    @abc.abstractmethod
    def act(self) -> np.ndarray:
        """The action [a] for the present state."""


# Name or pattern of environments -> their expert; as "module:Name" where its module is imported only when needed.
_EXPERTS: dict[str, type[Expert] | str] = {
    **dict.fromkeys(OGBENCH_NAMES, "acrlpd.experts.ogbench:OGBenchExpert"),
    "gym_aloha/AlohaTransferCube-v0": "acrlpd.experts.aloha:TransferExpert",
    "corridor": "acrlpd.experts.corridor:CorridorExpert",
}


def register_expert(env: str, expert: type[Expert] | str) -> None:
    """Gives environments of a name, or of a pattern such as "kitchen-*", an expert.

    `expert` is a class that inherits from `Expert`, or its "module:Name", which is imported when it is needed. Define
    the class at the top level of a module, because the processes of parallel environments import it. Call this where
    the environment is registered: "module:name" of the environment then imports both.
    """
    if not isinstance(expert, str):
        _require_expert(env, expert)
    _EXPERTS[env] = expert


def find_expert(env: str, qualities: Iterable[str] = ()) -> type[Expert]:
    """The expert of the environment with this name, which must know all of the `qualities`."""
    found = find_by_pattern(_EXPERTS, import_registration(env))
    if found is None:
        known = typed_names(_EXPERTS)
        what = "has no scripted expert" if is_registered(env) else "is not registered, and so it has no scripted expert"
        raise EnvError(
            f"environment {env!r} {what}. For your own environment write a module that calls "
            "register_env(name, make) of acrlpd.envs and register_expert(name, MyExpert) of acrlpd.experts, and name "
            "the environment as module:name (docs/demonstrations.md). Episodes that were recorded elsewhere become a "
            "dataset through acrlpd.data.tools.lerobot_writer.LeRobotWriter (docs/data.md). These environments have an "
            f"expert: {', '.join(known)}{hint(env, known)}"
        )
    expert = _load_expert(env, found)
    for quality in qualities:
        if quality not in expert.qualities:
            raise EnvError(f"the expert of {env!r} has the qualities {', '.join(expert.qualities)}; found {quality!r}")
    return expert


def list_experts() -> dict[str, Mapping[str, str]]:
    """The environments of every expert, as text -> the expert's qualities and what they show."""
    by_expert: dict[type[Expert] | str, list[str]] = {}
    for env, expert in _EXPERTS.items():
        by_expert.setdefault(expert, []).append(env)
    return {", ".join(envs): _load_expert(envs[0], expert).qualities for expert, envs in by_expert.items()}


def _load_expert(env: str, expert: type[Expert] | str) -> type[Expert]:
    """The class itself, or the class that "module:Name" names."""
    return _require_expert(env, import_name(expert), expert) if isinstance(expert, str) else expert


def _require_expert(env: str, expert: Any, path: str | None = None) -> type[Expert]:
    """Refuses what is no expert, before an episode is played; `path` is the expert's "module:Name", if it has one."""
    if not (isinstance(expert, type) and issubclass(expert, Expert)):
        raise EnvError(
            f"the expert of {env!r} must be a class that inherits from {Expert.__module__}.{Expert.__name__}; found "
            f"{path or expert!r}"
        )
    qualities = getattr(expert, "qualities", None)
    if not isinstance(qualities, Mapping) or not qualities:
        raise EnvError(
            f"the expert of {env!r}, {expert.__module__}:{expert.__name__}, must have the class attribute `qualities`, "
            'the names of its qualities and what they show, such as {"expert": "reaches the ball"}; found '
            f"{qualities!r}"
        )
    return expert


def demonstrate(env: Env, expert: type[Expert], seed: int, quality: str) -> Rollout:
    """One episode of an expert, with an observation of every step."""
    env.reset(seed)
    acting = expert(env, quality, np.random.default_rng(seed))
    observations, actions = [], []
    steps: list[Step] = []
    while not steps or not steps[-1].done:
        observations.append(env.observe())
        actions.append(env.executed(acting.act()))
        steps.append(env.step(actions[-1]))
    return Rollout(
        seed=seed,
        prompt=env.prompt,
        actions=np.stack(actions),
        rewards=np.array([step.reward for step in steps], np.float32),
        success=np.array([step.success for step in steps]),
        terminated=steps[-1].terminated,
        observations=stack(observations),
    )
