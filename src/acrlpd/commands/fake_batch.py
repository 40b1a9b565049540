"""Random data in the shapes of a config, to try a train step without a dataset."""

import numpy as np

from acrlpd.batch import Batch
from acrlpd.config.train_config import RLTrainConfig
from acrlpd.models.observation import Observation


def fake_batch(config: RLTrainConfig, seed: int = 0) -> Batch:
    """A batch as the data layer makes them: uint8 images, numpy arrays."""
    rng = np.random.default_rng(seed)
    b, t, h = config.batch_size, config.model.action_horizon, config.qchunking.horizon_length
    spec = config.model.inputs_spec(b)[0]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def observation() -> Observation:
        prompt = spec.tokenized_prompt
        return Observation(
            images={k: rng.integers(0, 256, v.shape, dtype=np.uint8) for k, v in spec.images.items()},
            image_masks={k: np.ones(b, np.bool_) for k in spec.images},
            state=normal(*spec.state.shape),
            tokenized_prompt=None if prompt is None else rng.integers(0, 256, prompt.shape, dtype=np.int32),
            tokenized_prompt_mask=None if prompt is None else np.ones(prompt.shape, np.bool_),
        )

    ones = np.ones
    return Batch(
        observations=observation(),
        next_observations=observation(),
        actions=normal(b, t, config.model.action_dim),
        valid=ones((b, t), np.float32),
        rewards=normal(b, h),
        masks=ones((b, h), np.float32),
        terminals=np.zeros((b, h), np.float32),
        next_terminal=np.zeros(b, np.float32),
        sequence_mask=ones(b, np.float32),
        episode_id=np.zeros(b, np.int32),
        step_id=np.arange(b, dtype=np.int32),
    )
