"""The actor of an asynchronous online phase: a process that plays rounds while the learner trains.

Learner and actor share files and nothing else. The learner publishes the part of the agent that acts, the
actor writes rounds into the replay. Neither waits for the other's lock: an actor whose learner is gone
ends, a learner whose actor dies starts another one, and gives up when that keeps happening.
"""

import logging
import os
import pathlib
import subprocess
import sys
import time

import flax.serialization
import jax
import numpy as np

from acrlpd.agents import Agent
from acrlpd.config import RLTrainConfig
from acrlpd.data.pipeline.replay import Replay
from acrlpd.envs.env import EnvError
from acrlpd.training.checkpoints.items import acts_with_average
from acrlpd.training.online.rounds import Round, read_rounds

logger = logging.getLogger(__name__)

POLICY_FILE = "actor_policy.msgpack"
LOG_FILE = "actor.log"
LOCK_FILE = "actor.lock"
_POLL_S = 0.1
MAX_STARTS_IN_A_ROW = 3


def acting_part(agent: Agent, rl_config: RLTrainConfig) -> Agent:
    """The agent without what only learning needs."""
    return agent.replace(
        policy_params=agent.ema_params if acts_with_average(agent, rl_config) else agent.policy_params,
        ema_params=None,
        policy_opt_state=None,
        critic_opt_state=None,
        temperature_opt_state=None,
    )


class ActorProcess:
    """The learner's side: publishes the policy, starts the actor, takes its rounds."""

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path, replay: Replay) -> None:
        self._directory = directory
        self._replay = replay
        self._rl_config = rl_config
        self._refresh_steps = rl_config.online.actor_refresh_steps
        self._published: int | None = None  # the step of the policy that the actor has
        self._process: subprocess.Popen[bytes] | None = None
        self._starts_in_a_row = 0

    def update_policy(self, agent: Agent, step: int) -> None:
        if self._published is None or step - self._published >= self._refresh_steps:
            publish(self._directory, acting_part(agent, self._rl_config), step)
            self._published = step
        self._keep_alive()

    def round(self, number: int) -> Round:
        while not (played := self.finished_rounds(number)):
            self._keep_alive()
            time.sleep(_POLL_S)
        return played[0]

    def finished_rounds(self, first: int) -> list[Round]:
        # Those of now: an actor that is fast goes on playing while we look.
        found = read_rounds(self._replay.root, first)
        if found:
            self._replay.scan()
            self._starts_in_a_row = 0
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _keep_alive(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        log = self._directory / LOG_FILE
        if self._process is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            message = f"the actor process ended with exit code {self._process.returncode}; {log} ends with:\n{tail}"
            if self._starts_in_a_row >= MAX_STARTS_IN_A_ROW:
                raise EnvError(f"{message}\nIt played no round in {MAX_STARTS_IN_A_ROW} starts: giving up")
            logger.warning("%s\nStarting it again", message)
        self._starts_in_a_row += 1
        command = [sys.executable, "-m", "acrlpd.training.online.actor", str(self._directory), str(os.getpid())]
        # On a GPU both share the device: the actor takes what it needs, when it needs it.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def publish(directory: pathlib.Path, agent: Agent, step: int) -> None:
    """Makes a policy known to the actor; it reads either this one or the one before."""
    leaves = jax.device_get(jax.tree.leaves(agent))
    named = {f"{i:06d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}  # sorts in the order of the leaves
    path = directory / POLICY_FILE
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(flax.serialization.msgpack_serialize({"step": step, "leaves": named}))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EnvError(
            f"{path}, the policy for the actor process, could not be written: {error}. The run can go on with --resume "
            "when there is room"
        ) from error


def read_published(directory: pathlib.Path, template: Agent) -> tuple[Agent, int]:
    """The newest published policy, as an agent with the structure of `template`."""
    content = flax.serialization.msgpack_restore((directory / POLICY_FILE).read_bytes())
    leaves = [content["leaves"][name] for name in sorted(content["leaves"])]
    return jax.tree.unflatten(jax.tree.structure(template), leaves), int(content["step"])
