"""RLPD's setting from state: single actions, one-step targets, half of each batch from the dataset.

This is `qc_cube_double` with chunks of one step. The policy is the same cloned flow, improved by the best of 32
candidates. A gain of `qc_cube_double` over this preset is a gain of the chunks.
"""

import dataclasses

from acrlpd.config.presets import qc_cube_double

_QC = qc_cube_double.CONFIG

CONFIG = dataclasses.replace(
    _QC,
    name="qc_cube_double_rlpd",
    model=dataclasses.replace(_QC.model, action_horizon=1),
    qchunking=dataclasses.replace(_QC.qchunking, horizon_length=1),
)
