"""DQC on OGBench's cube-double from state: targets over 25 steps, and critics of 5 actions that choose and act.

Everything that is not said here is that of `qc_cube_double`, so that the two can be compared; the data is the same. The
horizons, the quantile and the expectile are those of the DQC paper (arXiv 2512.10926) for its larger cube tasks, as is
the minimum of two critics. Its networks are twice as wide, its batches 16 times as large, and its discount is 0.999.
"""

import dataclasses

from acrlpd.agents.backups.decoupled import Decoupled
from acrlpd.config.presets import q_chunking

_QC = q_chunking.make_preset("qc", "cube-double")

CONFIG = dataclasses.replace(
    _QC,
    name="dqc_cube_double",
    model=dataclasses.replace(_QC.model, action_horizon=25),
    critic=dataclasses.replace(_QC.critic, q_aggregation="min"),
    backup=Decoupled(loss="quantile", kappa=0.93, distillation_kappa=0.8, hidden_dims=(512, 512, 512, 512)),
    qchunking=dataclasses.replace(_QC.qchunking, horizon_length=25, critic_action_horizon=5),
)
