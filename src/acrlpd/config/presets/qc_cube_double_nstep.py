"""Q-chunking's n-step baseline: 5-step returns, but critics and the robot know single actions only.

This is `qc_cube_double` with critics that see the first action of a chunk and a policy that is asked again after
every step. Without chunks, n-step returns under data of another policy are biased, and exploration has no direction.
"""

import dataclasses

from acrlpd.config.presets import qc_cube_double
from acrlpd.execution.open_loop import OpenLoop

_QC = qc_cube_double.CONFIG

CONFIG = dataclasses.replace(
    _QC,
    name="qc_cube_double_nstep",
    qchunking=dataclasses.replace(_QC.qchunking, critic_action_horizon=1),
    env=dataclasses.replace(_QC.env, execution=OpenLoop(steps=1)),
)
