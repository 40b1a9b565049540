"""What every policy family tells the rest of the project about itself.

Whoever prepares data, checks a config, plans memory, serves or exports asks these fields and methods. Nobody outside
of `models` asks of which class a policy is.
"""

import abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from acrlpd.choice import Choice
from acrlpd.findings import Finding

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from acrlpd.models.observation import Observation
    from acrlpd.models.policy import FlowPolicy


class PolicyConfig(Choice, abc.ABC):
    """A policy as plain data: cheap to import, no network until one is made."""

    package = "acrlpd.models.families"

    # Whether stock openpi has this family: its weights can start a run, and its checkpoints serve one.
    in_openpi: ClassVar[bool] = False
    # Whether states and actions of the robot are padded to the width of the network.
    pads_actions: ClassVar[bool] = False

    # -- what the network predicts
    action_dim: int  # width of actions, padding included
    action_horizon: int  # steps in one action chunk
    dtype: str  # of matrix products

    # -- what the network reads
    image_keys: tuple[str, ...] = ()  # slots of the cameras
    image_resolution: tuple[int, int] = (0, 0)  # height and width of every image
    vocab_size: int = 0  # tokens that the network knows
    # Whether the state is written into the prompt.
    discrete_state_input: bool | None = False

    @property
    def state_dim(self) -> int:
        """Width of the state that the network reads, padding included."""
        return self.action_dim

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt; 0: the network reads no prompt."""
        return 0

    @property
    def use_quantile_norm(self) -> bool:
        """Whether states and actions are normalised by quantiles unless the config says otherwise."""
        return False

    @abc.abstractmethod
    def create(self, rng: "jax.Array") -> "FlowPolicy":
        """A freshly initialised policy; under `jax.eval_shape` or `jit` with shardings nothing is copied."""

    @abc.abstractmethod
    def get_freeze_filter(self, *, freeze_pi0_backbone: bool = False) -> "nnx.filterlib.Filter":
        """Selects the parameters that do not train."""

    def check(self, *, freeze_pi0_backbone: bool, weights: str | None) -> Iterator[Finding]:
        """What is wrong with this policy in a run that starts from `weights` (None: from random ones)."""
        return iter(())

    def fake_obs(self, batch_size: int = 1) -> "Observation":
        """An observation of ones with float images, for shape checks and compile-time warm-up."""
        import jax.numpy as jnp

        from acrlpd.models.observation import Observation

        prompt = (batch_size, self.prompt_len)
        return Observation(
            images={key: jnp.ones((batch_size, *self.image_resolution, 3), jnp.float32) for key in self.image_keys},
            image_masks={key: jnp.ones(batch_size, jnp.bool_) for key in self.image_keys},
            state=jnp.ones((batch_size, self.state_dim), jnp.float32),
            tokenized_prompt=jnp.ones(prompt, jnp.int32) if self.prompt_len else None,
            tokenized_prompt_mask=jnp.ones(prompt, jnp.bool_) if self.prompt_len else None,
        )

    def fake_act(self, batch_size: int = 1) -> "jax.Array":
        """Actions of ones, to go with `fake_obs`."""
        import jax.numpy as jnp

        return jnp.ones((batch_size, self.action_horizon, self.action_dim), jnp.float32)

    def inputs_spec(self, batch_size: int = 1) -> "tuple[Observation, jax.Array]":
        """Shapes and dtypes of an (observation, actions) pair."""
        import jax

        return jax.eval_shape(lambda: (self.fake_obs(batch_size), self.fake_act(batch_size)))
