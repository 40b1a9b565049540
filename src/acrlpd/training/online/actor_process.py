"""The actor of an asynchronous online phase: a process that plays rounds while the learner trains.

Learner and actor share files and nothing else. The learner publishes the part of the agent that acts; the actor writes
rounds into the replay. An actor whose learner is gone ends. A learner whose actor dies starts another one, and gives
up when actors keep dying.
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
from acrlpd.envs import EnvError
from acrlpd.policies.acting_model import ActingModel, acting_model
from acrlpd.training.online.rounds import Round, read_rounds

logger = logging.getLogger(__name__)

POLICY_FILE = "actor_policy.msgpack"
LOG_FILE = "actor.log"
LOCK_FILE = "actor.lock"
_POLL_S = 0.1
MAX_STARTS_IN_A_ROW = 3


class ActorProcess:
    """The learner's side: publishes the policy, starts the actor and takes its rounds."""

    def __init__(self, rl_config: RLTrainConfig, directory: pathlib.Path, replay: Replay) -> None:
        self._directory = directory
        self._replay = replay
        self._rl_config = rl_config
        self._refresh_steps = rl_config.online.actor_refresh_steps
        self._published: int | None = None  # the step of the newest published policy
        self._process: subprocess.Popen[bytes] | None = None
        self._starts_in_a_row = 0

    def update_policy(self, agent: Agent, step: int) -> None:
        if self._published is None or step - self._published >= self._refresh_steps:
            publish(self._directory, acting_model(agent, self._rl_config), step)
            self._published = step
        self._keep_alive()

    def round(self, number: int) -> Round:
        while not (played := self.finished_rounds(number)):
            self._keep_alive()
            time.sleep(_POLL_S)
        return played[0]

    def finished_rounds(self, first: int) -> list[Round]:
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
        # Learner and actor share a GPU, so the actor must not reserve most of its memory at the start.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def publish(directory: pathlib.Path, model: ActingModel, step: int) -> None:
    """Makes a policy known to the actor, which reads either this policy or the one before."""
    leaves = jax.device_get(jax.tree.leaves(model))
    named = {f"{i:06d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}  # sorts in the order of the leaves
    path = directory / POLICY_FILE
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(flax.serialization.msgpack_serialize({"step": step, "leaves": named}))
        temporary.replace(path)  # without the fsync of `files`: the file need not survive a crash of the machine
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise EnvError(
            f"{path}, the policy for the actor process, could not be written: {error}. The run can go on with --resume "
            "when there is room"
        ) from error


def read_published(directory: pathlib.Path, template: ActingModel) -> tuple[ActingModel, int]:
    """The newest published policy, with the structure of `template`, and its step."""
    content = flax.serialization.msgpack_restore((directory / POLICY_FILE).read_bytes())
    leaves = [content["leaves"][name] for name in sorted(content["leaves"])]
    return jax.tree.unflatten(jax.tree.structure(template), leaves), int(content["step"])
