"""Acting in environments by action chunks: one policy call for all environments, then a chunk in each."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from acrlpd.envs.env import Columns, EnvError
from acrlpd.envs.episodes import Executed, Rollout, Start, check_filming, execute_chunk, stack, start_episode
from acrlpd.envs.pool import EnvFailure, EnvPool

logger = logging.getLogger(__name__)

# An episode that fails this often is left out; so many failures in a row end the rollouts.
_ATTEMPTS = 2
_MAX_FAILURES_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class Chunks:
    """What a policy answers."""

    actions: np.ndarray  # float32 [n, T, a] in the environment's units
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # name -> [n], for the record


# (observations {column: [n, ...]}, prompts [n], seed of this call's noise) -> chunks
ChunkPolicy = Callable[[Columns, Sequence[str], int], Chunks]


@dataclasses.dataclass(frozen=True)
class _Planned:
    """An episode to play."""

    seed: int
    film: bool
    attempt: int = 1


@dataclasses.dataclass
class _Episode:
    """An episode under way in a slot."""

    planned: _Planned
    prompt: str
    observations: list[Columns]  # all of them, or the last one only
    video: list[np.ndarray]
    parts: list[Executed] = dataclasses.field(default_factory=list)
    values: list[dict[str, float]] = dataclasses.field(default_factory=list)


def rollouts(
    envs: EnvPool,
    policy: ChunkPolicy,
    seeds: Iterable[int],
    *,
    replan_steps: int,
    policy_seed: int = 0,
    record: bool = False,
    films: int = 0,
) -> Iterator[Rollout]:
    """Plays one episode per seed and yields each as soon as it is over; stops when the seeds do.

    `replan_steps` of every chunk are executed before the policy is asked again. The policy sees half of the
    environments at a time while the other half steps (all at once if their number is odd), always as many,
    so it compiles once. With `record` every step's observation is kept (and rendered), without only what
    the policy sees. The first `films` episodes are filmed. Everything follows from the seeds, the policy
    and the number of environments.

    An episode that is lost to a crash or a time-out is started again once and then left out; what was
    yielded before is not affected. `envs.failures` has the reasons.
    """
    return _Rollouts(envs, policy, seeds, replan_steps, policy_seed, record, films).play()


class _Rollouts:
    def __init__(
        self,
        envs: EnvPool,
        policy: ChunkPolicy,
        seeds: Iterable[int],
        replan_steps: int,
        policy_seed: int,
        record: bool,
        films: int,
    ) -> None:
        if replan_steps < 1:
            raise EnvError(f"replan_steps must be at least 1; found {replan_steps}")
        self._envs = envs
        self._policy = policy
        self._replan_steps = replan_steps
        self._policy_seed = policy_seed
        self._record = record
        self._films = films > 0
        self._planned = (_Planned(int(seed), i < films) for i, seed in enumerate(seeds))
        self._again: list[_Planned] = []
        self._active: dict[int, _Episode] = {}
        self._running: set[int] = set()  # slots with a call under way
        self._results: dict[int, Any] = {}  # of slots whose turn has not come
        self._policy_calls = 0
        self._failures_in_a_row = 0

    def play(self) -> Iterator[Rollout]:
        groups = _groups(self._envs)
        if self._films and isinstance(failure := self._envs.run({0: (check_filming,)})[0], EnvFailure):
            raise EnvError(failure.reason)
        try:
            while True:
                for group in groups:
                    finished = self._receive(group)
                    self._start(group)
                    self._act(group)
                    yield from finished
                if not self._active and not self._again:
                    return
        finally:  # whoever uses the pool next must not get our answers
            while self._running:
                self._running.discard(self._envs.next_result()[0])

    def _start(self, group: Sequence[int]) -> None:
        """Fills the idle slots of a group; a start that fails is tried again like any other failure."""
        while True:
            idle = [slot for slot in group if slot not in self._active]
            starting = {slot: planned for slot in idle if (planned := self._next_planned()) is not None}
            if not starting:
                return
            for slot, planned in starting.items():
                self._submit(slot, start_episode, planned.seed, planned.film)
            for slot, planned in starting.items():
                result = self._result(slot)
                if isinstance(result, EnvFailure):
                    self._failed(result, planned)
                else:
                    assert isinstance(result, Start)
                    self._active[slot] = _Episode(planned, result.prompt, [result.observation], result.video)

    def _act(self, group: Sequence[int]) -> None:
        """Asks the policy and sends a chunk into every active slot of the group."""
        active = [slot for slot in group if slot in self._active]
        if not active:
            return
        chunks = self._ask(group, active)
        for row, slot in enumerate(group):
            if slot in self._active:
                episode = self._active[slot]
                episode.values.append({name: float(value[row]) for name, value in chunks.values.items()})
                actions = chunks.actions[row, : self._replan_steps]
                self._submit(slot, execute_chunk, actions, self._record, episode.planned.film)

    def _receive(self, group: Sequence[int]) -> list[Rollout]:
        """What came of the chunks of a group."""
        finished = []
        for slot in [slot for slot in group if slot in self._active]:
            result = self._result(slot)
            episode = self._active[slot]
            if isinstance(result, EnvFailure):
                del self._active[slot]
                self._failed(result, episode.planned)
                continue
            assert isinstance(result, Executed)
            self._failures_in_a_row = 0
            episode.parts.append(result)
            episode.video += result.video
            kept = episode.observations if self._record else []
            episode.observations = kept + result.observations
            if result.done:
                finished.append(_finish(self._active.pop(slot), self._record))
        return finished

    def _ask(self, group: Sequence[int], active: Sequence[int]) -> Chunks:
        """One policy call for a group; an idle slot repeats an active one, so that shapes never change."""
        episodes = [self._active.get(slot, self._active[active[0]]) for slot in group]
        seed = int(np.random.SeedSequence([self._policy_seed, self._policy_calls]).generate_state(1)[0])
        self._policy_calls += 1
        chunks = self._policy(stack([e.observations[-1] for e in episodes]), [e.prompt for e in episodes], seed)
        found, action_dim = chunks.actions.shape, self._envs.spec.action_dim
        if len(found) != 3 or (found[0], found[2]) != (len(group), action_dim) or found[1] < self._replan_steps:
            raise EnvError(
                f"the policy must give chunks [{len(group)}, {self._replan_steps} or more, {action_dim}] for "
                f"environment {self._envs.name!r}; found {list(found)}"
            )
        if not np.isfinite(chunks.actions).all():
            raise EnvError("the policy gives actions that are not finite: its weights may have diverged")
        return chunks

    def _submit(self, slot: int, function: Callable[..., Any], *args: Any) -> None:
        self._running.add(slot)
        self._envs.submit(slot, function, *args)

    def _result(self, slot: int) -> Any:
        """Waits for the answer of a slot and keeps those of others that come before it."""
        while slot not in self._results:
            answered, result = self._envs.next_result()
            self._running.discard(answered)
            self._results[answered] = result
        return self._results.pop(slot)

    def _next_planned(self) -> _Planned | None:
        return self._again.pop(0) if self._again else next(self._planned, None)

    def _failed(self, failure: EnvFailure, planned: _Planned) -> None:
        self._failures_in_a_row += 1
        # All environments at once, as when their processes are killed together, is one mishap.
        if self._failures_in_a_row >= max(_MAX_FAILURES_IN_A_ROW, 2 * self._envs.num_envs):
            raise EnvError(
                f"environment {self._envs.name!r} failed {self._failures_in_a_row} times in a row; the last "
                f"time: {failure.reason}"
            )
        if planned.attempt < _ATTEMPTS:
            self._again.append(dataclasses.replace(planned, attempt=planned.attempt + 1))
        else:
            logger.warning("%s: the episode with seed %d is left out", self._envs.name, planned.seed)


def _groups(envs: EnvPool) -> list[range]:
    """Two halves that take turns: one steps while the policy looks at the other.

    The same however many processes there are, so that the result does not depend on the machine.
    """
    half, odd = divmod(envs.num_envs, 2)
    return [range(envs.num_envs)] if odd else [range(half), range(half, envs.num_envs)]


def _finish(episode: _Episode, record: bool) -> Rollout:
    lengths = [len(part.rewards) for part in episode.parts]
    names = episode.values[0]
    return Rollout(
        seed=episode.planned.seed,
        prompt=episode.prompt,
        actions=np.concatenate([part.actions for part in episode.parts]),
        rewards=np.concatenate([part.rewards for part in episode.parts]),
        success=np.concatenate([part.success for part in episode.parts]),
        terminated=episode.parts[-1].terminated,
        observations=stack(episode.observations) if record else {},
        chunk_steps=np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64),
        values={name: np.array([values[name] for values in episode.values]) for name in names},
        video=episode.video,
    )
