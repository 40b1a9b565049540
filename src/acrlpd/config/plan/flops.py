"""Floating-point operations of one sample, counted in the traced update itself.

A matrix product of m x k by k x n counts 2 m k n, and so does a convolution. Norms, activations and softmax are left
out: they are memory traffic, not arithmetic. The update is traced with shapes alone, which takes a few seconds for
full-size models. Named scopes and JAX's own marks say what a product is for.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from acrlpd.batch import Batch, Returns
from acrlpd.config.create_agent import create_agent
from acrlpd.config.run import FSDPConfig, TrainingConfig
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.policy import DENOISE, ENCODE

# Scopes of the agent.
_CRITIC = "critic"
_SAMPLING = "sampling"
# Marks that JAX leaves: computed again in the backward pass, and part of a differentiated function.
_RECOMPUTED = "rematted_computation"
_DIFFERENTIATED = "jvp"


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """One sample's share of one update."""

    forward: float  # of the policy's own loss, once
    candidate: float  # one more candidate for one observation
    backward: float  # what is differentiated, its forward pass included
    recompute: float  # rematerialisation
    no_gradient: float  # prefixes without gradient: of the next observation, and of weights under accumulation
    candidates: float  # all candidates, at the observation and at the next one
    critics: float
    num_products: int  # matrix products of a whole update, however large

    @property
    def train(self) -> float:
        """Forward and backward of the policy as if everything were trained and nothing recomputed."""
        return 3 * self.forward

    @property
    def dense(self) -> float:
        """Large matrix products."""
        return self.backward + self.recompute + self.no_gradient

    @property
    def total(self) -> float:
        return self.dense + self.candidates + self.critics


def step_flops(config: RLTrainConfig) -> StepFlops:
    """One sample's share of an update, in the mean of the updates of policy and critics and those of critics alone."""
    # One cached trace serves runs of any length and layout.
    training = TrainingConfig(gradient_accumulation_steps=config.training.gradient_accumulation_steps)
    model = config.model.without_files()
    return _trace_flops(dataclasses.replace(config, model=model, training=training, fsdp=FSDPConfig()))


@functools.lru_cache(maxsize=32)
def _trace_flops(config: RLTrainConfig) -> StepFlops:
    key = jax.eval_shape(lambda: jax.random.key(0))
    agent = jax.eval_shape(lambda key: create_agent(config, key), key)
    parts: dict[str, float] = collections.defaultdict(float)
    num_products = 0.0
    every = config.acrlpd.critic_updates_per_policy_update
    for updates_policy, share in ((True, 1 / every), (False, 1 - 1 / every)):
        if share == 0:
            continue
        update = functools.partial(_update, update_policy=updates_policy)
        for product in find_products(update, agent, batch_spec(config), key):
            parts[_part(product.scopes)] += share * product.total_flops / config.batch_size
            num_products += share * product.times

    observation, actions = config.model.inputs_spec()

    def sample_two(agent: Any, key: jax.Array, observation: Any) -> jax.Array:
        return agent.policy().sample_candidates(key, observation, 2, num_steps=config.acrlpd.sampling_steps)

    loss = count_flops(lambda agent, *args: agent.policy().compute_loss(*args), agent, key, observation, actions)
    two = count_flops(sample_two, agent, key, observation)
    return StepFlops(
        forward=loss.total(),
        candidate=sum(flops for scopes, flops in two.items() if DENOISE in _words(scopes)) / 2,
        num_products=round(num_products),
        **{name: parts[name] for name in ("backward", "recompute", "no_gradient", "candidates", "critics")},
    )


def _update(agent: Any, batch: Batch, key: jax.Array, *, update_policy: bool) -> Any:
    return agent.train_step(batch, key, update_policy=update_policy)


def _part(scopes: str) -> str:
    """The part of `StepFlops` that a product belongs to, by the scopes around it."""
    words = _words(scopes)
    innermost = [word for word in words if word in (_CRITIC, ENCODE, DENOISE)][-1:]
    if innermost == [_CRITIC]:
        return "critics"
    if innermost == [DENOISE] and _SAMPLING in words:
        return "candidates"
    if _RECOMPUTED in words:
        return "recompute"
    return "backward" if _DIFFERENTIATED in words else "no_gradient"


def _words(scopes: str) -> list[str]:
    return re.findall(r"\w+", scopes)


def batch_spec(config: RLTrainConfig) -> Batch:
    """Shapes and dtypes of the batches of a run; images are uint8, as they travel to the device."""
    model, size, chunk = config.model, config.batch_size, config.qchunking.horizon_length
    observation, actions = model.inputs_spec(size, labelled_prompts=config.labels_prompts)

    def spec(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((size, *shape), dtype)

    images = {key: spec(*model.image_resolution, 3, dtype=jnp.uint8) for key in model.image_keys}
    observation = dataclasses.replace(observation, images=images)
    return Batch(
        observations=observation,
        next_observations=observation,
        actions=actions,
        valid=spec(model.action_horizon),
        rewards=spec(chunk),
        masks=spec(chunk),
        terminals=spec(chunk),
        next_terminal=spec(),
        sequence_mask=spec(),
        leads_to_success=spec(),
        importance=spec(),
        task_id=spec(dtype=jnp.int32),
        episode_id=spec(dtype=jnp.int32),
        step_id=spec(dtype=jnp.int32),
        noise=None if config.noise_dim is None else spec(config.noise_dim),
        returns=Returns(*[spec() for _ in dataclasses.fields(Returns)]) if config.labels_prompts else None,
    )


# -- counting


class Product(NamedTuple):
    """A matrix product or a convolution of a program."""

    scopes: str
    flops: int
    times: int  # how often the program computes it

    @property
    def total_flops(self) -> int:
        return self.times * self.flops


def count_flops(function: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """Scopes -> operations of all matrix products in these scopes."""
    counts: collections.Counter[str] = collections.Counter()
    for product in find_products(function, *args):
        counts[product.scopes] += product.total_flops
    return counts


def find_products(function: Callable[..., Any], *args: Any) -> list[Product]:
    """The matrix products of a function. Products that no result needs are left out."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return list(_products(used, "", 1))


def _products(jaxpr: Any, scopes: str, times: int) -> Iterator[Product]:
    for equation in jaxpr.eqns:
        inside = f"{scopes}/{equation.source_info.name_stack}"
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            lhs = equation.invars[0].aval.shape
            output = equation.outvars[0].aval.shape
            flops = 2 * math.prod(output) * math.prod(lhs[axis] for axis in contracted)
            yield Product(inside, flops, times)
        elif name == "conv_general_dilated":
            yield Product(inside, _convolution_flops(equation), times)
        elif name.startswith("dot_product_attention"):
            yield Product(inside, _attention_flops(equation), times)
        elif name == "cond":
            branches = [list(_products(branch.jaxpr, inside, times)) for branch in params["branches"]]
            yield from max(branches, key=lambda branch: sum(product.total_flops for product in branch))
        else:
            repeated = times * params["length"] if name == "scan" else times
            for inner in jaxprs_in_params(params):
                yield from _products(inner, inside, repeated)


def _convolution_flops(equation: Any) -> int:
    """Every number of the output is a product with a kernel of one output channel, without the zeros of a dilation."""
    kernel, output = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
    out_channels = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    zeros = math.prod(equation.params["lhs_dilation"])
    return 2 * math.prod(output) * math.prod(kernel) // out_channels // zeros


def _attention_flops(equation: Any) -> int:
    """cuDNN's fused attention: two products of queries [b, t, heads, h] and keys [b, s, ...], four in its gradient."""
    (b, t, heads, head_dim), (_, s, *_) = (x.aval.shape for x in equation.invars[:2])
    products = 4 if "bwd" in equation.primitive.name else 2
    return 2 * products * b * t * s * heads * head_dim
