"""How a run ends reaches the receiver of its alerts: a failure, and the end of the run that goes on from it."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
from training_helpers import state_config, train_here


def test_a_failure_and_the_end_are_told(tmp_path: pathlib.Path) -> None:
    told = tmp_path / "told"
    config = state_config(
        tmp_path,
        offline_steps=2,
        save_frequency=1,
        eval_frequency=2,
        data__validation_share=0.0,
        logging__alerts__command=["tee", "-a", str(told)],
    )

    def broken(agent: Any, step: int) -> Mapping[str, float]:
        raise RuntimeError("the simulator is gone\nand more")

    with pytest.raises(RuntimeError):
        train_here(config, broken)
    train_here(config, lambda agent, step: {"success_rate": 0.5}, resume=True)
    failed, finished = map(json.loads, told.read_text().splitlines())
    assert (failed["kind"], failed["severity"], failed["step"]) == ("failed", "error", 2)
    assert failed["text"].endswith("RuntimeError: the simulator is gone")
    assert (finished["kind"], finished["severity"]) == ("finished", "info")
    assert ": finished at step 2" in finished["text"]
