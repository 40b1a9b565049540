"""LeRobotDataset on the files of data_reading.py: run by that script with an interpreter that has lerobot.

Prints samples per CPU second. A sample is what one training window needs, as in data_reading.py.
"""

import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

HORIZON = 50


def main(root: str, samples: int) -> None:
    fps = 50
    cameras = [f"observation.images.{name}" for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")]
    deltas = {camera: [0.0, HORIZON / fps] for camera in cameras}
    deltas["action"] = [t / fps for t in range(HORIZON)]
    dataset = LeRobotDataset("local/benchmark", root=root, delta_timestamps=deltas)
    rows = np.random.default_rng(1).integers(0, len(dataset), samples)
    for row in rows[:8]:
        dataset[int(row)]
    start = time.process_time()
    for row in rows:
        dataset[int(row)]
    print(samples / (time.process_time() - start))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
