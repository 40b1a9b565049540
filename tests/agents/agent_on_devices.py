"""Run by test_agent_devices in a process with 8 virtual devices: the same update on 1, 2 and 8 of them."""

import jax
import numpy as np
from agent_helpers import assert_trees_close, make_batch, make_config
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from acrlpd.config.create_agent import create_agent


def main() -> None:
    assert jax.device_count() == 8
    config = make_config(improvement="awr", accumulation=2)
    batch = make_batch(config, 16)
    results = {}
    for count in (1, 2, 8):
        mesh = Mesh(np.asarray(jax.devices()[:count]), ("fsdp",))
        replicated = NamedSharding(mesh, PartitionSpec())
        over_batch = NamedSharding(mesh, PartitionSpec("fsdp"))

        def place(leaf, count=count, mesh=mesh):
            """One axis split over the devices, as FSDP would; the agent's code does not know."""
            axis = next((i for i, size in enumerate(leaf.shape) if size >= 8 and size % count == 0), None)
            spec = ["fsdp" if i == axis else None for i in range(leaf.ndim)]
            return NamedSharding(mesh, PartitionSpec(*spec))

        def create(key):
            return create_agent(config, key)

        shardings = jax.tree.map(place, jax.eval_shape(create, jax.random.key(0)))
        agent = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
        step = jax.jit(
            lambda agent, batch, rng: agent.train_step(batch, rng),
            in_shardings=(shardings, over_batch, replicated),
            out_shardings=(shardings, replicated),
            donate_argnums=0,
        )
        split = [leaf for leaf in jax.tree.leaves(agent) if not leaf.is_fully_replicated]
        assert count == 1 or len(split) > 10
        for i in range(3):
            agent, info = step(agent, batch, jax.random.key(i))
        assert step._cache_size() == 1
        assert jax.tree.map(lambda x: x.sharding, agent) == shardings
        results[count] = jax.device_get((agent.policy_params, agent.critics, agent.ema_params, info))
    for count in (2, 8):
        assert_trees_close(results[count], results[1], rtol=2e-4, atol=2e-5)
    print("equal on 1, 2 and 8 devices")


if __name__ == "__main__":
    main()
