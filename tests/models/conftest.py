"""One golden batch for all model tests."""

import numpy as np
import pytest
from model_goldens import load_golden

from acrlpd.models.observation import Observation
from acrlpd.models.paligemma_config import IMAGE_KEYS


@pytest.fixture(scope="session")
def batch() -> dict[str, np.ndarray]:
    return load_golden("batch")


@pytest.fixture(scope="session")
def observation(batch) -> Observation:
    return Observation(
        images={key: batch[f"image/{key}"] for key in IMAGE_KEYS},
        image_masks={key: batch[f"image_mask/{key}"] for key in IMAGE_KEYS},
        state=batch["state"],
        tokenized_prompt=batch["tokenized_prompt"],
        tokenized_prompt_mask=batch["tokenized_prompt_mask"],
    )
