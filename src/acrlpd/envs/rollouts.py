"""Acting in environments by action chunks: one policy call for all environments, then a chunk in each."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from acrlpd.envs.env import Columns
from acrlpd.envs.errors import EnvError
from acrlpd.envs.pool import EnvFailure, EnvPool
from acrlpd.envs.rollout import Executed, Rollout, Start, execute_chunk, stack, start_episode

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


@dataclasses.dataclass
class _Episode:
    """An episode under way in a slot."""

    seed: int
    film: bool
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

    `replan_steps` of every chunk are executed before the policy is asked again. The policy always sees as
    many observations as there are environments, so it compiles once. With `record` every step's
    observation is kept (and rendered), without only what the policy sees. The first `films` episodes are
    filmed. Everything follows from the seeds, the policy and the number of environments.

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
        # (seed, whether to film it, attempts before this one)
        self._seeds = ((int(seed), i < films, 0) for i, seed in enumerate(seeds))
        self._again: list[tuple[int, bool, int]] = []
        self._attempts: dict[int, int] = {}  # slot -> attempts before the one under way
        self._calls = 0
        self._failures_in_a_row = 0

    def play(self) -> Iterator[Rollout]:
        active: dict[int, _Episode] = {}
        while True:
            self._start(active)
            if not active:
                return
            finished = self._advance(active)
            yield from finished

    def _start(self, active: dict[int, _Episode]) -> None:
        """Fills idle slots; a start that fails is tried again like any other failure."""
        while True:
            starting: dict[int, tuple[int, bool, int]] = {}
            for slot in range(self._envs.num_envs):
                if slot not in active and (planned := self._next_seed()) is not None:
                    starting[slot] = planned
            if not starting:
                return
            calls = {slot: (start_episode, seed, film) for slot, (seed, film, _) in starting.items()}
            for slot, result in self._envs.run(calls).items():
                seed, film, attempts = starting[slot]
                if isinstance(result, EnvFailure):
                    self._failed(result, seed, film, attempts)
                    continue
                assert isinstance(result, Start)
                self._attempts[slot] = attempts
                active[slot] = _Episode(seed, film, result.prompt, [result.observation], result.video)

    def _advance(self, active: dict[int, _Episode]) -> list[Rollout]:
        """One chunk in every active slot."""
        chunks = self._ask(active)
        calls = {
            slot: (execute_chunk, chunks.actions[slot, : self._replan_steps], self._record, episode.film)
            for slot, episode in active.items()
        }
        finished = []
        for slot, result in self._envs.run(calls).items():
            episode = active[slot]
            if isinstance(result, EnvFailure):
                del active[slot]
                self._failed(result, episode.seed, episode.film, self._attempts[slot])
                continue
            self._failures_in_a_row = 0
            episode.parts.append(result)
            episode.video += result.video
            episode.values.append({name: float(value[slot]) for name, value in chunks.values.items()})
            kept = episode.observations if self._record else []
            episode.observations = kept + result.observations
            if result.done:
                finished.append(_finish(active.pop(slot), self._record))
        return finished

    def _ask(self, active: Mapping[int, _Episode]) -> Chunks:
        """One policy call for all slots; an idle slot repeats an active one, so that shapes never change."""
        any_episode = next(iter(active.values()))
        episodes = [active.get(slot, any_episode) for slot in range(self._envs.num_envs)]
        seed = int(np.random.SeedSequence([self._policy_seed, self._calls]).generate_state(1)[0])
        self._calls += 1
        chunks = self._policy(stack([e.observations[-1] for e in episodes]), [e.prompt for e in episodes], seed)
        expected = (self._envs.num_envs, self._envs.spec.action_dim)
        found = chunks.actions.shape
        if len(found) != 3 or (found[0], found[2]) != expected or found[1] < self._replan_steps:
            raise EnvError(
                f"the policy must give chunks [{expected[0]}, {self._replan_steps} or more, {expected[1]}] for "
                f"environment {self._envs.name!r}; found {list(found)}"
            )
        if not np.isfinite(chunks.actions[list(active)]).all():
            raise EnvError("the policy gives actions that are not finite: its weights may have diverged")
        return chunks

    def _next_seed(self) -> tuple[int, bool, int] | None:
        return self._again.pop(0) if self._again else next(self._seeds, None)

    def _failed(self, failure: EnvFailure, seed: int, film: bool, attempts: int) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            raise EnvError(
                f"environment {self._envs.name!r} failed {_MAX_FAILURES_IN_A_ROW} times in a row; the last "
                f"time: {failure.reason}"
            )
        if attempts + 1 < _ATTEMPTS:
            self._again.append((seed, film, attempts + 1))
        else:
            logger.warning("%s: the episode with seed %d is left out", self._envs.name, seed)


def _finish(episode: _Episode, record: bool) -> Rollout:
    lengths = [len(part.rewards) for part in episode.parts]
    names = episode.values[0]
    return Rollout(
        seed=episode.seed,
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
