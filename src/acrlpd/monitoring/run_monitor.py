"""Everything that looks at a run while it trains, behind one object that the trainer calls."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import jax

from acrlpd.agents import Agent
from acrlpd.batch import Feed
from acrlpd.config import RLTrainConfig
from acrlpd.monitoring.alerts import Alert, Alerts
from acrlpd.monitoring.anomalies import AnomalyDetector
from acrlpd.monitoring.debug_mode import DebugMode
from acrlpd.monitoring.profiling import StepProfiler
from acrlpd.monitoring.writers import Writers
from acrlpd.runs.record import ANOMALIES_FILE
from acrlpd.units import format_bytes

MEMORY = "memory/"
# The sizes of this process in pages, its resident memory in the second place.
_STATM = pathlib.Path("/proc/self/statm")


class RunMonitor:
    """Writers, anomalies, alerts, debug mode and profiling of one run.

    The monitor never changes what is computed, and its failures are reported but never stop the run. Per
    call it only compares a few numbers; the rest happens once per line of metrics. Every process has a
    monitor, because debug mode computes on all devices, but only the primary process writes.
    """

    def __init__(
        self,
        rl_config: RLTrainConfig,
        directory: pathlib.Path,
        *,
        is_primary: bool,
        profile_steps: tuple[int, int] | None = None,
    ) -> None:
        self.anomalies = AnomalyDetector(rl_config, directory / ANOMALIES_FILE if is_primary else None)
        self._writers = Writers(rl_config, directory, enabled=is_primary)
        self._alerts: Alerts | None = None
        if is_primary and rl_config.logging.alerts.has_receiver:
            self._alerts = Alerts(rl_config, directory)
        self._alerts_wandb = rl_config.logging.alerts.wandb
        self._after_step = -1  # the step from which this process goes on
        self._debug: DebugMode | None = None
        if rl_config.logging.debug:
            self._debug = DebugMode(directory if is_primary else None, rl_config.training.log_frequency)
        # Whether debug mode or a profile looks at single updates, so that a call of the train step may make only one.
        self.looks_at_updates = rl_config.logging.debug or profile_steps is not None
        self._profiler: StepProfiler | None = None
        if profile_steps is not None and is_primary:
            self._profiler = StepProfiler(profile_steps, directory)

    def before_update(self, step: int, agent: Agent, feed: Feed, rng: jax.Array) -> None:
        """`step` is the step that the first update of the call will make."""
        self._writers.open(self._after_step)
        if self._debug is not None:
            self._debug.before_update(step, agent, feed, rng)

    def after_update(self, step: int, result: Any, train_steps: jax.stages.Compiled) -> None:
        """The call whose last update makes `step` has been started; `result` is (part of) its result."""
        if self._profiler is not None:
            self._profiler.after_update(step, result, train_steps)

    def on_line(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Judges a line of metrics that is about to be written; returns the metrics to add to the line."""
        memory = device_memory()
        held = {"device_gib": memory.in_use, "device_peak_gib": memory.peak, "host_gib": memory.host}
        added = {f"{MEMORY}{name}": value / 2**30 for name, value in held.items() if value is not None}
        lasting = set(self.anomalies.open)
        added |= self.anomalies.check(line)
        for kind, anomaly in self.anomalies.open.items():
            if kind not in lasting:
                text = f"step {anomaly.step:,}: {anomaly.message}. {anomaly.advice}"
                self._tell(Alert(kind, anomaly.severity, anomaly.step, text))
        if self._debug is not None:
            added |= self._debug.on_line(int(line["step"]))
        self._writers.write({**line, **added})
        return added

    def on_event(self, line: Mapping[str, Any]) -> None:
        """Takes the line of an evaluation or of collected episodes, which may come before the first update."""
        self._writers.open(self._after_step)
        self._writers.write(line)

    def on_end(self, kind: Literal["finished", "stopped", "failed"], step: int, text: str) -> None:
        """Tells how the run ended; called before `close`."""
        self._tell(Alert(kind, "error" if kind == "failed" else "info", step, text))

    def _tell(self, alert: Alert) -> None:
        """Sends an alert to whom the config names, unless the same was told lately."""
        if self._alerts is None or not self._alerts.is_new(alert):
            return
        if self._alerts_wandb:
            self._writers.alert(self._alerts.title(alert), alert.text, alert.severity)
        self._alerts.send(alert)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on as if the run had not been interrupted."""
        return {"anomalies": self.anomalies.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Goes on after `step`; `state` is None at the start of a run."""
        self._after_step = step
        self.anomalies.load_state_dict(None if state is None else state["anomalies"], step)

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
        if self._alerts is not None:
            self._alerts.close()
        self._writers.close()


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the local device that holds most, and of this process.

    None where nobody reports them: CPUs do not as devices, and macOS does not for the process.
    """

    in_use: int | None
    peak: int | None
    limit: int | None
    host: int | None  # resident memory of this process

    def __str__(self) -> str:
        host = "host memory not known" if self.host is None else f"host {format_bytes(self.host)}"
        if self.in_use is None or self.peak is None:
            return f"device memory not reported by this backend, {host}"
        limit = "" if self.limit is None else f" of {format_bytes(self.limit)}"
        return f"device {format_bytes(self.in_use)}{limit}, peak {format_bytes(self.peak)}, {host}"


def device_memory() -> DeviceMemory:
    """What this process and its fullest device hold now."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    fullest: Mapping[str, int] = max(stats, key=lambda s: s.get("bytes_in_use", 0))
    pages = int(_STATM.read_text().split()[1]) if _STATM.exists() else None
    return DeviceMemory(
        in_use=fullest.get("bytes_in_use"),
        peak=fullest.get("peak_bytes_in_use"),
        limit=fullest.get("bytes_limit"),
        host=None if pages is None else pages * os.sysconf("SC_PAGE_SIZE"),
    )
