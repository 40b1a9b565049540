"""What every policy family tells the rest of the project about itself.

The data layer, the checks, the plan, the server and the export ask these fields and methods. Code outside of `models`
never asks for the class of a policy.
"""

import abc
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from acrlpd.choice import Choice, kind_name
from acrlpd.findings import Finding, error
from acrlpd.models.observation import Observation

if TYPE_CHECKING:
    from acrlpd.models.policy import FlowPolicy

# Where openpi's weights are released.
RELEASED_WEIGHTS = "gs://openpi-assets/checkpoints/"


@dataclasses.dataclass(frozen=True)
class WorkingMemory:
    """Bytes that an update needs for a while, beside the state of the agent. The plan adds them up."""

    kept: float  # per sample: activations that are kept for the backward pass
    context: float  # per sample: what `encode` returns, without features
    candidate: float  # per sample and candidate: one denoising step
    features: float = 0.0  # per sample: the tokens that critics read
    layer: float = 0.0  # per sample: the largest layer, while the layer is differentiated
    encoding: float = 0.0  # per sample: the largest layer of `encode`
    weight_copies: int = 0  # weights that are held a second time in the compute dtype
    gathered_weights: int = 0  # weights that are whole for a moment although FSDP splits them


@dataclasses.dataclass(frozen=True)
class ActionEncoder:
    """How a policy that writes actions as tokens gets the tokens of logged chunks."""

    encode: Callable[[np.ndarray], list[list[int]]]  # normalised chunks [n, T, a] to ids of the language model
    first_id: int  # the lowest id that stands for actions; text has the ids below
    max_len: int  # the largest number of tokens that a sample has for its chunk, with the text around them


class PolicyConfig(Choice, abc.ABC):
    """A policy as plain data: there is no network until `create` makes the network.

    A new family needs the fields and `create`. Everything else has a default, which is right for a policy that reads
    states alone, trains all of its parameters and is unknown to openpi.
    """

    package = "acrlpd.models.families"
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # for type checkers: every family is a dataclass

    # Whether stock openpi has this family: openpi's weights can start a run, and openpi can serve a checkpoint.
    in_openpi: ClassVar[bool] = False
    # Whether openpi has a PyTorch model of this family.
    in_openpi_pytorch: ClassVar[bool] = False
    # Whether states and actions of the robot are padded to the width of the network.
    pads_actions: ClassVar[bool] = False
    # Whether the policy can say how probable its chunks are (`sample_with_log_prob`).
    has_density: ClassVar[bool] = False
    # Whether chunks are drawn as tokens. Then a chunk is no smooth function of its noise and has no gradient, and the
    # policy can be cloned from logged chunks alone, whose tokens the data layer has made (`create_action_encoder`).
    samples_tokens: ClassVar[bool] = False

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
    def feature_dim(self) -> int:
        """Width of the tokens that the critics get; 0: the policy has no tokens for critics."""
        return 0

    @property
    def use_quantile_norm(self) -> bool:
        """Whether states and actions are normalised by quantiles unless the config says otherwise."""
        return False

    @property
    def candidates_are_equal(self) -> bool:
        """Whether the policy gives the same chunk for any noise, so that there is nothing to choose among."""
        return False

    # -- networks and files

    @abc.abstractmethod
    def create(self, rng: jax.Array) -> "FlowPolicy":
        """A freshly initialised policy; under `jax.eval_shape` or `jit` with shardings nothing is copied."""

    def create_action_encoder(self) -> ActionEncoder | None:
        """How logged chunks become the tokens that the policy learns from; None: the policy learns from the chunks."""
        return None

    def asset_files(self) -> dict[str, bytes]:
        """Files beside the weights without which the policy cannot act, by their path below assets/ of a checkpoint."""
        return {}

    def with_assets(self, directory: Path) -> "PolicyConfig":
        """This policy with the files that lie in the assets of its checkpoint in place of those that it names."""
        return self

    def without_files(self) -> "PolicyConfig":
        """A policy of the same cost that needs no file, for the plan."""
        return self

    def get_freeze_filter(self, *, freeze_pi0_backbone: bool = False) -> nnx.filterlib.Filter:
        """Selects the parameters that do not train."""
        if freeze_pi0_backbone:
            raise ValueError(f"freeze_pi0_backbone needs a pi0 model; the {kind_name(self)} policy has no backbone")
        return nnx.Nothing()

    def merge_adapters(self, params: nnx.State) -> "tuple[PolicyConfig, nnx.State]":
        """The same policy without LoRA adapters: its config, and parameters into which the adapters are added."""
        raise ValueError(f"there are no adapters to merge: the {kind_name(self)} policy has no LoRA variant")

    # -- checks

    def check(self, *, freeze_pi0_backbone: bool, weights: str | None) -> Iterator[Finding]:
        """What is wrong with this policy in a run that starts from `weights` (None: from random weights)."""
        if freeze_pi0_backbone:
            yield error(f"the {kind_name(self)} policy has no backbone to freeze; turn freeze_pi0_backbone off")
        if weights is not None and weights.startswith(RELEASED_WEIGHTS):
            yield error(
                f"weight_loader: openpi's weights {weights} do not fit the {kind_name(self)} policy; name a checkpoint "
                "of a run that trained such a policy"
            )

    # -- the plan

    def working_memory(self, *, freeze_pi0_backbone: bool) -> WorkingMemory:
        """What an update needs beside the state of the agent.

        The default is traced and cautious: each candidate counts as much as all activations of a training pass. A
        family of large networks should say something more exact.
        """
        rng = jax.eval_shape(lambda: jax.random.key(0))
        graphdef, params = nnx.split(nnx.eval_shape(lambda: self.create(jax.random.key(0))))

        def kept(params: nnx.State, *inputs: Any) -> Any:
            return jax.vjp(lambda params: nnx.merge(graphdef, params).compute_loss(*inputs), params)[1]

        def num_bytes(tree: Any) -> int:
            return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

        # A batch of any size keeps the parameters, too; the difference between two batches is what a sample adds.
        one, two = (num_bytes(jax.eval_shape(kept, params, rng, *self.inputs_spec(size))) for size in (1, 2))
        observation, _ = self.inputs_spec()
        context = jax.eval_shape(lambda params, seen: nnx.merge(graphdef, params).encode(seen), params, observation)
        return WorkingMemory(kept=two - one, context=num_bytes(context), candidate=two - one)

    def layout_changes(self) -> Iterator[Mapping[str, Any]]:
        """Settings, by dotted name, that need less memory and compute the same updates."""
        return iter(())

    def lighter_changes(self, *, freeze_pi0_backbone: bool) -> Iterator[Mapping[str, Any]]:
        """Settings, by dotted name, that need less memory because fewer parameters train; the mildest first."""
        return iter(())

    # -- openpi

    def openpi_call(self) -> str:
        """The expression that makes this model in a TrainConfig of openpi; for families that openpi has."""
        raise ValueError(f"openpi has no {kind_name(self)} policy")

    def openpi_differences(self) -> Iterator[str]:
        """Sentences about what `openpi_call` cannot say, because stock openpi has no setting for it."""
        return iter(())

    # -- examples of inputs

    def fake_obs(self, batch_size: int = 1, *, labelled_prompts: bool = False) -> Observation:
        """An observation of ones with float images, for shape checks and compile-time warm-up."""
        prompt, labelled = (batch_size, self.prompt_len), (batch_size, 2, self.prompt_len)
        return Observation(
            images={key: jnp.ones((batch_size, *self.image_resolution, 3), jnp.float32) for key in self.image_keys},
            image_masks={key: jnp.ones(batch_size, jnp.bool_) for key in self.image_keys},
            state=jnp.ones((batch_size, self.state_dim), jnp.float32),
            tokenized_prompt=jnp.ones(prompt, jnp.int32) if self.prompt_len else None,
            tokenized_prompt_mask=jnp.ones(prompt, jnp.bool_) if self.prompt_len else None,
            labelled_prompt=jnp.ones(labelled, jnp.int32) if labelled_prompts else None,
            labelled_prompt_mask=jnp.ones(labelled, jnp.bool_) if labelled_prompts else None,
        )

    def fake_act(self, batch_size: int = 1) -> jax.Array:
        """Actions of ones, to go with `fake_obs`."""
        return jnp.ones((batch_size, self.action_horizon, self.action_dim), jnp.float32)

    def inputs_spec(self, batch_size: int = 1, *, labelled_prompts: bool = False) -> tuple[Observation, jax.Array]:
        """Shapes and dtypes of an (observation, actions) pair."""
        return jax.eval_shape(
            lambda: (self.fake_obs(batch_size, labelled_prompts=labelled_prompts), self.fake_act(batch_size))
        )


def named_params(pattern: str) -> nnx.filterlib.Predicate:
    """An nnx filter for parameters whose '/'-joined path matches the whole pattern."""
    compiled = re.compile(pattern)
    return lambda path, _: compiled.fullmatch("/".join(map(str, path))) is not None
