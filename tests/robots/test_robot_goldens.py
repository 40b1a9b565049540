"""The inputs and outputs of every robot against what openpi itself computed."""

import numpy as np
import pytest
from transform_goldens import assert_close, inputs, transform_goldens

from acrlpd.robots.aloha import Aloha
from acrlpd.robots.droid import Droid
from acrlpd.robots.libero import Libero


@pytest.fixture(scope="module")
def golden():
    return transform_goldens()


@pytest.mark.parametrize("adapt", [True, False])
def test_aloha_inputs(golden, adapt):
    name = f"aloha_inputs_adapt{adapt}"
    data = inputs(golden, f"{name}/in", separator="/")
    transform = Aloha(adapt_to_pi=adapt).inputs
    assert_close(transform(data), inputs(golden, f"{name}/out", separator="/"))
    data |= {key: data[key].astype(np.float32) for key in ("state", "actions")}
    from_float32 = {key: transform(data)[key] for key in ("state", "actions")}
    assert_close(from_float32, inputs(golden, f"{name}/out_from_float32"))


@pytest.mark.parametrize("adapt", [True, False])
def test_aloha_outputs(golden, adapt):
    name = f"aloha_outputs_adapt{adapt}"
    found = Aloha(adapt_to_pi=adapt).outputs(inputs(golden, f"{name}/in"), action_dim=14)
    assert_close(found, inputs(golden, f"{name}/out"))


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_droid_inputs(golden, model):
    found = Droid().inputs(inputs(golden, "droid_inputs/in"))
    assert_close(found, inputs(golden, f"droid_inputs_{model}/out", separator="/"))


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_libero_inputs(golden, model):
    found = Libero().inputs(inputs(golden, "libero_inputs/in"))
    assert_close(found, inputs(golden, f"libero_inputs_{model}/out", separator="/"))


@pytest.mark.parametrize(("name", "robot"), [("droid", Droid()), ("libero", Libero())])
def test_outputs_are_cut_to_the_robot(golden, name, robot):
    found = robot.outputs(inputs(golden, f"{name}_outputs/in"), action_dim=robot.action_dim)
    assert_close(found, inputs(golden, f"{name}_outputs/out"))
