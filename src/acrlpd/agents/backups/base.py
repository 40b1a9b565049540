"""What a backup is: where the value of the next observation comes from, which ends the critics' target.

A backup is one file: a frozen dataclass whose fields are its options. `docs/extending.md` writes one from scratch.
"""

import abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from acrlpd.agents.critics.base import CriticConfig, ObservationReader
from acrlpd.agents.hyperparams import ACRLPDHyperparams, QChunkingConfig
from acrlpd.agents.networks import Draws, Networks
from acrlpd.batch import Batch
from acrlpd.choice import Choice, kind_name
from acrlpd.findings import Finding, error
from acrlpd.models.families.base import PolicyConfig

if TYPE_CHECKING:
    from acrlpd.agents.algorithm import Algorithm
    from acrlpd.agents.improvements.base import View


@flax.struct.dataclass
class NextCandidates:
    """What is known of the N candidates at the next observation."""

    values: jax.Array  # [b, N] under the online critics
    # [b] spread of what the critics see of the candidates: root mean variance over action dims and steps, or over the
    # numbers of the noise where critics judge noise.
    diversity: jax.Array


@flax.struct.dataclass
class Targets:
    """What the next observation contributes; no gradient ever reaches it."""

    value: jax.Array  # [b] y of the TD loss
    candidates: NextCandidates | None = None  # None where `Backup.has_candidates` is False


class Backup(Choice, abc.ABC):
    """One way to bootstrap. Used where the critics learn.

    `targets` comes first, and nothing of it is differentiated. A backup with networks of its own says in `losses` what
    the networks learn from.
    """

    package = "acrlpd.agents.backups"

    # Whether `Targets.candidates` is known. The learned temperature learns from the candidates.
    has_candidates: ClassVar[bool] = False

    @abc.abstractmethod
    def targets(
        self, algorithm: "Algorithm", networks: Networks, batch: Batch, draws: Draws, subset_rng: jax.Array
    ) -> Targets:
        """The targets of the critics. `networks` carry no gradient; `subset_rng` draws the members for REDQ."""

    def create_networks(
        self,
        *,
        critic: CriticConfig,
        qchunking: QChunkingConfig,
        reader: ObservationReader,
        state_dim: int,
        rngs: nnx.Rngs,
    ) -> nnx.Module | None:
        """The backup's own networks, which learn from `losses` alone. They are `networks.backup` in an update.

        `reader` reads observations as the critics do, and belongs to these networks alone. The networks are trained
        with the critics' optimizer and learning rate. Acting does not need them, so exports leave them out.
        """
        return None

    def losses(self, view: "View", targets: Targets, subset_rng: jax.Array) -> jax.Array | None:
        """The loss of each sample for the backup's own networks [b]; it counts where the TD loss counts."""
        return None

    def critic_targets(self, view: "View", targets: Targets) -> jax.Array:
        """What the critics are fitted to [b]: y, unless networks of the backup stand between y and the critics."""
        return targets.value

    def advantage(self, view: "View") -> jax.Array:
        """Q(s, c) - mean over the candidates of Q(s, .), for the logged chunks c [b]."""
        # One call of the critics for the logged chunk and all candidates: [b, 1 + N].
        q = view.values(jnp.concatenate([jnp.asarray(view.batch.actions)[:, None], view.sampled], axis=1))
        return q[:, 0] - jnp.mean(q[:, 1:], axis=1)

    def error_weights(self, error: jax.Array) -> jax.Array:
        """How much errors of the critics [b, E], positive where a critic is too low, count in the critics' loss."""
        return jnp.ones_like(error)

    def check(
        self, hyperparams: ACRLPDHyperparams, *, model: PolicyConfig, qchunking: QChunkingConfig
    ) -> Iterator[Finding]:
        """Errors and warnings about this backup in a run with these other sections."""
        if hyperparams.learnable_temperature and not self.has_candidates:
            yield error(
                f"backup {kind_name(self)} has no candidates at the next observation, from which the learned "
                "temperature would learn: set acrlpd.learnable_temperature false, or choose backup best_of_n"
            )


def td_target(batch: Batch, next_value: jax.Array, discount: float) -> jax.Array:
    """y [b] = sum_i gamma^i r_i + gamma^H mask V(s'); no bootstrap past a true terminal."""
    horizon = batch.rewards.shape[1]
    powers = discount ** jnp.arange(horizon, dtype=jnp.float32)
    chunk_return = jnp.sum(batch.rewards * powers, axis=1)
    return chunk_return + discount**horizon * batch.masks[:, -1] * next_value
