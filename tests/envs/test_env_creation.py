"""From a config to its environments: the cameras that are rendered, and what does not fit the policy."""

import dataclasses

import pytest
from toy_agent import NORM_STATS, toy_config, toy_pi0_config

from acrlpd.data.sources.source import Feature
from acrlpd.envs import EnvError, make_env
from acrlpd.envs.create import EnvPools, check_environment, create_env_pool, policy_cameras


def test_an_environment_that_does_not_fit_is_refused() -> None:
    config = toy_config()
    spec = make_env("toy").spec
    check_environment(config, NORM_STATS, spec)
    renamed = dataclasses.replace(
        config, data=dataclasses.replace(config.data, repack=dataclasses.replace(config.data.repack, state=("qpos",)))
    )
    with pytest.raises(EnvError, match=r"data\.repack names 'qpos', which environment 'toy' does not give"):
        check_environment(renamed, NORM_STATS, spec)
    wide = dataclasses.replace(spec, action_dim=3)
    with pytest.raises(EnvError, match=r"3 action dims, the config's qchunking\.action_dim is 2"):
        check_environment(config, NORM_STATS, wide)
    narrow = dataclasses.replace(spec, features=spec.features | {"observation.state": Feature("float32", (1,))})
    with pytest.raises(EnvError, match=r"a state of 1 dims .* the policy's norm statistics have 3"):
        check_environment(config, NORM_STATS, narrow)


def test_only_the_cameras_of_the_policy_are_rendered() -> None:
    assert policy_cameras(toy_config()) == ()
    assert policy_cameras(toy_pi0_config()) == ("observation.images.side",)
    with create_env_pool(toy_config(), num_workers=0) as envs:
        assert envs.spec.cameras == ()
    with create_env_pool(toy_pi0_config(), num_workers=0) as envs:
        assert envs.spec.cameras == ("observation.images.side",)


def test_runs_one_after_another_share_environments() -> None:
    """A baseline needs the environments of its run; a policy with cameras needs others."""
    run = toy_config()
    baseline = dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, best_of_n=1))
    with EnvPools() as pools:
        envs = pools.get(run, num_runs=1)
        assert pools.get(baseline, num_runs=1) is envs
        assert pools.get(toy_pi0_config(), num_runs=1) is not envs
