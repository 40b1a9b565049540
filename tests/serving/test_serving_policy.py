"""Observations in, action chunks out: openpi's numbers, the agent's choices, and clear refusals."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from serving_helpers import pi0_observation
from small_checkpoints import GOLDENS, make_agent, pi0_config, serve, served_model, state_config
from toy_agent import NORM_STATS

from acrlpd.agents import Agent, Algorithm
from acrlpd.choice import find_kind, kind_names
from acrlpd.config import DataConfig, QChunkingConfig, RepackConfig, get_config
from acrlpd.data.pipeline.norm_stats import NormStats, load_norm_stats
from acrlpd.models.families.pi0 import Pi0Config
from acrlpd.policies.acting_model import ActingModel, choose_actions
from acrlpd.robots.aloha import Aloha
from acrlpd.robots.base import Robot
from acrlpd.serving.requests import RequestError, create_observation_spec
from acrlpd.serving.serving_policy import ServingPolicy

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def agent() -> Agent:
    return make_agent(pi0_config())


@pytest.fixture(scope="module")
def policy(agent: Agent) -> ServingPolicy:
    policy = serve(
        served_model(agent), pi0_config(), NORM_STATS, best_of_n=6, num_steps=(2, 1), max_batch_size=2, step=7
    )
    policy.warm_up()
    return policy


def infer(policy: ServingPolicy, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    return policy.infer([policy.prepare(message) for message in messages])  # type: ignore[return-value]


def test_actions_equal_openpis_policy() -> None:
    """A whole `Policy.infer` of openpi: transforms, bfloat16 weights, 10 steps, ALOHA's units."""
    golden = np.load(GOLDENS / "policy_aloha_sim_pi0.npz")
    params = np.load(GOLDENS / "params_pi0.npz")
    model = Pi0Config(
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        siglip_variant="mu/14",
        vocab_size=512,
        action_horizon=10,
        max_token_len=32,
    )
    data = DataConfig(
        robot=Aloha(adapt_to_pi=True),
        default_prompt="Transfer cube",
        tokenizer="byte",
        repack=RepackConfig(base_0_rgb="observation.images.top"),
    )
    config = state_config(model=model, data=data, qchunking=QChunkingConfig(horizon_length=10, action_dim=14))
    graphdef, state = nnx.split(nnx.eval_shape(lambda: model.create(jax.random.key(0))))
    leaves = [
        (path, leaf.replace(jax.numpy.asarray(params["/".join(path)], jax.numpy.bfloat16)))
        for path, leaf in nnx.to_flat_state(state)
    ]
    algorithm = Algorithm(config.acrlpd, config.qchunking)
    policy = serve(
        ActingModel(nnx.from_flat_state(leaves), None, graphdef, algorithm),
        config,
        load_norm_stats(GOLDENS / "norm_stats_example"),
        best_of_n=1,
        num_steps=(10,),
    )
    message = {"state": golden["obs/state"], "images": {"cam_high": golden["obs/images/cam_high"]}}
    [reply] = policy.infer([dataclasses.replace(policy.prepare(message), noise=golden["noise"][None])])
    assert not isinstance(reply, RequestError)
    assert reply["actions"].dtype == np.float64
    # Within what openpi's own sampled actions move between versions of jax in bfloat16.
    np.testing.assert_allclose(reply["actions"], golden["actions"], atol=0.02)


def test_padded_statistics_are_those_of_the_robot(agent: Agent) -> None:
    """Released statistics are as wide as the model; training takes them, so does the server."""
    config = pi0_config()

    def padded(stats: NormStats) -> NormStats:
        widths = (0, config.model.action_dim - stats.dim)
        values = (stats.mean, stats.std, stats.q01, stats.q99)
        return NormStats(*(None if x is None else np.pad(x, widths) for x in values))  # type: ignore[arg-type]

    padded_stats = {key: padded(stats) for key, stats in NORM_STATS.items()}
    plain, wide = (
        serve(served_model(agent), config, stats, best_of_n=1, num_steps=(1,)) for stats in (NORM_STATS, padded_stats)
    )
    message = pi0_observation() | {"seed": 3}
    [expected], [found] = infer(plain, message), infer(wide, message)
    np.testing.assert_array_equal(found["actions"], expected["actions"])
    with pytest.raises(RequestError, match=r"state must be 3 to 8 numbers; found shape \[2\]"):
        wide.prepare(pi0_observation(state=np.zeros(2)))


def test_the_choice_is_the_agents(agent: Agent, policy: ServingPolicy) -> None:
    """The same noise through the networks of the agent, whose moving average is served."""
    request = policy.prepare(pi0_observation(return_candidates=True))
    observation = jax.tree.map(lambda x: x[None], request.observation)
    noise = jax.random.normal(jax.random.key(3), (1, *request.noise.shape))
    num_steps = agent.algorithm.acrlpd.sampling_steps

    @jax.jit
    def candidates_and_values(agent, observation):
        networks = agent.replace(policy_params=agent.ema_params).networks()
        observation = networks.policy.preprocess(None, observation, train=False)
        context = networks.encode(observation)
        candidates = networks.policy.denoise(context, noise, num_steps=num_steps)
        return candidates, agent.algorithm.values(networks, context, observation, candidates)

    candidates, values = candidates_and_values(agent, observation)
    best = int(np.argmax(values[0]))
    found = choose_actions(policy.policy.model, observation, noise, np.array([6]), num_steps=num_steps)
    np.testing.assert_allclose(found.candidates, candidates, atol=1e-5)
    np.testing.assert_allclose(found.q_values, values, atol=1e-5)
    assert found.index.tolist() == [best]
    np.testing.assert_allclose(found.actions[0], candidates[0, best], atol=1e-5)


def test_the_reply_tells_the_choice(policy: ServingPolicy) -> None:
    [reply] = infer(policy, pi0_observation(seed=5, best_of_n=5, return_candidates=True))
    chosen = reply["best_of_n"]
    assert chosen["n"] == len(chosen["q_values"]) == len(reply["candidates"]) == 5
    assert chosen["q_value"] == max(chosen["q_values"]) == chosen["q_values"][chosen["index"]]
    assert chosen["q_std"] == pytest.approx(np.std(chosen["q_values"]), rel=1e-5)
    np.testing.assert_array_equal(reply["actions"], reply["candidates"][chosen["index"]])
    assert reply["actions"].shape == (4, 2) and reply["checkpoint_step"] == 7
    assert reply["policy_timing"]["infer_ms"] > 0


def test_fewer_candidates_are_the_first_of_many(policy: ServingPolicy) -> None:
    many, few = infer(
        policy,
        pi0_observation(seed=1) | {"seed": 5},
        pi0_observation(seed=1) | {"seed": 5, "best_of_n": 2},
    )
    np.testing.assert_allclose(few["best_of_n"]["q_values"], many["best_of_n"]["q_values"][:2], atol=1e-5)


def test_a_seed_repeats_and_the_batch_does_not_matter(policy: ServingPolicy) -> None:
    message = pi0_observation(seed=1) | {"seed": 11}
    [alone] = infer(policy, message)
    together = infer(policy, pi0_observation(seed=2), message)[1]
    np.testing.assert_allclose(together["actions"], alone["actions"], atol=1e-5)
    [first], [second] = infer(policy, pi0_observation(seed=1)), infer(policy, pi0_observation(seed=1))
    assert not np.array_equal(first["actions"], second["actions"])


def test_options_never_compile(policy: ServingPolicy) -> None:
    compiled = choose_actions._cache_size()
    for n in (1, 2, 6):
        for steps in (2, 1):
            for size in (1, 2):
                infer(policy, *[pi0_observation(best_of_n=n, num_steps=steps)] * size)
    assert choose_actions._cache_size() == compiled


def without(observation: dict[str, Any], *path: str) -> dict[str, Any]:
    copy = {key: dict(value) if isinstance(value, dict) else value for key, value in observation.items()}
    node = copy
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return copy


IMAGE = np.zeros((8, 8, 3), np.uint8)
DARK = pi0_observation(seed=1, images={"base_0_rgb": IMAGE})
BAD = {
    "not a dict": (["x"], "a request must be a dict"),
    "no state": (without(pi0_observation(), "state"), "lacks 'state'; the observation has: images, prompt"),
    "no camera": (
        without(pi0_observation(), "images", "base_0_rgb"),
        "lacks 'images/base_0_rgb' or 'images/observation.images.top'; images has: nothing",
    ),
    "no images": (without(pi0_observation(), "images"), "lacks 'images/base_0_rgb'"),
    "images is no dict": (pi0_observation(images=3), "lacks 'images/base_0_rgb'"),
    "unknown camera": (pi0_observation(images={"base_0_rgb": IMAGE, "x": IMAGE}), "found also \\['x'\\]"),
    "camera twice": (
        pi0_observation(images={"base_0_rgb": IMAGE, "observation.images.top": IMAGE}),
        "one camera came twice, as 'base_0_rgb' and as 'observation.images.top'",
    ),
    "state dims": (pi0_observation(state=np.zeros(5)), "state must be 3 numbers; found shape \\[5\\]"),
    "state shape": (pi0_observation(state=np.zeros((1, 3))), "state must be 3 numbers"),
    "state text": (pi0_observation(state="abc"), "state must be numbers: an array or a flat list; found str"),
    "state texts": (pi0_observation(state=["a", 2.0, "c"]), "a flat list; found a list of float and str"),
    "state nothing": (pi0_observation(state=[None, 1, 2]), "a flat list; found a list of NoneType and int"),
    "state bool": (pi0_observation(state=[True, 1, 2]), "a flat list; found a list of bool and int"),
    "state bools": (pi0_observation(state=np.zeros(3, bool)), "state must be numbers; found an array of bool"),
    "state ragged": (pi0_observation(state=[[1], [2, 3]]), "a flat list; found a list of list"),
    "state nested": (pi0_observation(state=[[1, 2, 3]]), "a flat list; found a list of list"),
    "state NaN": (pi0_observation(state=np.array([0, np.nan, 0])), "state has NaN"),
    "image NaN": (pi0_observation(images={"base_0_rgb": np.full((8, 8, 3), np.nan)}), "has NaN"),
    "image range": (pi0_observation(images={"base_0_rgb": np.full((8, 8, 3), 200.0)}), "must lie in \\[0, 1\\]"),
    "image shape": (pi0_observation(images={"base_0_rgb": IMAGE[0]}), "must be \\[3, h, w\\] or \\[h, w, 3\\]"),
    "image empty": (pi0_observation(images={"base_0_rgb": IMAGE[:0]}), "must have sides of 1"),
    "image dtype": (pi0_observation(images={"base_0_rgb": IMAGE.astype(np.int32)}), "must be uint8"),
    "image text": (pi0_observation(images={"base_0_rgb": "x"}), "must be an array"),
    "prompt long": (pi0_observation(prompt="a" * 15), "prompt is too long: the policy reads 16 tokens"),
    "prompt huge": (pi0_observation(prompt="a" * 100_000), "prompt is too long: 100000 characters"),
    "prompt number": (pi0_observation(prompt=3), "prompt must be text"),
    "prompt bytes": (pi0_observation(prompt=b"go"), "prompt must be text; found bytes"),
    "prompt none": (pi0_observation(prompt=None), "there is no prompt"),
    "best_of_n 0": (pi0_observation(best_of_n=0), "best_of_n must be from 1 to 6"),
    "best_of_n 7": (pi0_observation(best_of_n=7), "best_of_n must be from 1 to 6"),
    "best_of_n text": (pi0_observation(best_of_n="4"), "best_of_n must be an integer"),
    "num_steps": (pi0_observation(num_steps=10), "num_steps must be one of .*2, 1"),
    "seed": (pi0_observation() | {"seed": -1}, "seed must be from 0"),
    "candidates": (pi0_observation(return_candidates=1), "return_candidates must be true or false"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused(policy: ServingPolicy, name: str) -> None:
    message, reason = BAD[name]
    with pytest.raises(RequestError, match=reason):
        policy.prepare(message)


def test_what_is_just_right_is_not_refused(policy: ServingPolicy) -> None:
    longest = pi0_observation(prompt="a" * 14)  # with its two ends 16 tokens
    chw = pi0_observation(images={"base_0_rgb": np.zeros((3, 8, 8), np.float32)}, state=[1, 2.5, np.float32(3)])
    default_prompt = without(pi0_observation(), "prompt")
    big_endian = pi0_observation(images={"base_0_rgb": np.zeros((8, 8, 3), ">f4")}, state=np.arange(3).astype(">f8"))
    messages = (longest, chw, default_prompt, big_endian, pi0_observation(unknown=[["a"], None]))
    replies = [infer(policy, message)[0] for message in messages]
    assert all(reply["actions"].shape == (4, 2) for reply in replies)


def test_the_datasets_name_of_a_camera_means_the_same_camera(policy: ServingPolicy) -> None:
    message = pi0_observation(seed=1) | {"seed": 3}
    renamed = message | {"images": {"observation.images.top": message["images"]["base_0_rgb"]}}
    own, datasets, black = infer(policy, message)[0], infer(policy, renamed)[0], infer(policy, DARK | {"seed": 3})[0]
    np.testing.assert_array_equal(datasets["actions"], own["actions"])
    assert np.abs(black["actions"] - own["actions"]).max() > 1e-3  # the policy does look at the image


@pytest.mark.parametrize("robot", ["droid", "libero"])
def test_images_beside_the_state_have_the_datasets_names_too(robot: str) -> None:
    config = get_config(robot)
    spec = create_observation_spec(config, None)
    states = {key: np.zeros(dims[0]) for key, dims in spec.states.items()}
    sent = states | dict.fromkeys(config.data.repack.cameras.values(), IMAGE) | {"prompt": np.str_("go")}
    images = set(config.data.robot.cameras.values())
    assert spec.check(sent).keys() == {*states, *images, "prompt"}
    assert not images & sent.keys()


@pytest.mark.parametrize(
    ("preset", "needs_prompt"), [("aloha", True), ("aloha_sim", False), ("droid", True), ("libero", True)]
)
def test_clients_are_told_the_keys_that_they_need(preset: str, needs_prompt: bool) -> None:
    spec = create_observation_spec(get_config(preset), None)

    def observation(keys: list[str]) -> dict[str, Any]:
        states = {key: np.zeros(dims[0]) for key, dims in spec.states.items() if key in keys and dims is not None}
        images = {key.removeprefix("images/"): IMAGE for key in keys if "image" in key}
        prompt = {"prompt": "go"} if "prompt" in keys else {}
        return states | prompt | ({"images": images} if preset.startswith("aloha") else images)

    told = spec.required_keys
    assert ("prompt" in told) == needs_prompt
    spec.check(observation(told))
    for key in told:
        with pytest.raises(RequestError, match=f"lacks '{key}'|there is no prompt"):
            spec.check(observation([other for other in told if other != key]))


@pytest.mark.parametrize("name", kind_names(Robot))
def test_the_docs_have_the_keys_of_every_robot(name: str) -> None:
    [row] = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{name}` | `")]
    _, _, states, images, _ = row.split("|")
    robot = find_kind(Robot, name)()
    expected = {key: dims and str(dims) for key, dims in robot.state_dims.items()}
    assert {key: dims or None for key, dims in re.findall(r"`([^`]+)`(?: (\d+))?", states)} == expected
    cameras = ["/".join(robot.image_path(slot)) for slot in robot.cameras]
    assert re.findall(r"`([^`]+)`", images) == cameras + [f"images/{camera}" for camera in robot.ignored_cameras]


def test_a_robots_own_name_of_a_camera_is_never_read_as_the_datasets() -> None:
    """A dataset may call its first camera as the robot calls the second one."""
    config = get_config("debug")
    repack = RepackConfig(base_0_rgb="left_wrist_0_rgb", left_wrist_0_rgb="front")
    swapped = dataclasses.replace(config, data=dataclasses.replace(config.data, repack=repack))
    spec = create_observation_spec(swapped, None)
    assert spec.dataset_cameras == {"front": "left_wrist_0_rgb"}


@pytest.mark.parametrize(("part", "what"), [("params", "actions"), ("critics", "critics' values")])
def test_actions_and_choices_that_are_not_finite_are_not_sent(policy: ServingPolicy, part: str, what: str) -> None:
    broken = jax.tree.map(lambda x: x * np.nan, getattr(policy.policy.model, part))
    model = policy.policy.model.replace(**{part: broken})
    sick = dataclasses.replace(policy, policy=dataclasses.replace(policy.policy, model=model))
    [reply] = sick.infer([sick.prepare(pi0_observation())])
    assert isinstance(reply, RequestError)
    assert f"{what} are not finite" in str(reply)


def test_without_critics_there_is_no_choice(policy: ServingPolicy) -> None:
    model = policy.policy.model.replace(critics=None)
    with pytest.raises(ValueError, match="best_of_n=6 needs critics"):
        serve(model, pi0_config(), NORM_STATS, best_of_n=6, num_steps=(2,))
    plain = serve(model, pi0_config(), NORM_STATS, best_of_n=1, num_steps=(2,))
    [reply] = infer(plain, pi0_observation())
    assert reply["best_of_n"] == {"n": 1, "index": 0}
    with pytest.raises(RequestError, match="no critics to choose by"):
        plain.prepare(pi0_observation(best_of_n=2))


@pytest.mark.parametrize("preset", ["aloha", "aloha_fold", "aloha_pi05", "aloha_sim", "droid"])
def test_clients_are_told_where_the_arms_start(preset: str, policy: ServingPolicy) -> None:
    """The pose of openpi's own ALOHA configs; a client that is told none uses its own."""
    openpi = get_config(preset).openpi_compatibility
    config = dataclasses.replace(policy.policy.rl_config, openpi_compatibility=openpi)
    served = dataclasses.replace(policy, policy=dataclasses.replace(policy.policy, rl_config=config))
    metadata = served.metadata()
    is_openpis = openpi.config_name in ("pi0_aloha", "pi05_aloha")
    assert metadata.get("reset_pose") == ([0, -1.5, 1.5, 0, 0, 0] if is_openpis else None)
    assert ("reset_pose" in metadata) == is_openpis
