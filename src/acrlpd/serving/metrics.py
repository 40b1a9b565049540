"""What the server counts, in Prometheus' text format."""

import bisect
from collections.abc import Mapping, Sequence

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """Cumulative counts below fixed bounds, as Prometheus wants them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        total, lines = 0, []
        for bound, count in zip([*self._bounds, "+Inf"], self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.9g}", f"{name}_count {total}"]


class ServerMetrics:
    """Counters of one server; everything happens in its event loop, so nothing is locked."""

    def __init__(self) -> None:
        self.requests = {"ok": 0, "bad_request": 0, "error": 0, "timeout": 0}
        self.refused_connections = {"unauthorized": 0, "full": 0}
        self.reloads = {"ok": 0, "error": 0}
        self.request_seconds = Histogram(_SECONDS)
        self.infer_seconds = Histogram(_SECONDS)
        self.batch_size = Histogram(_BATCH_SIZES)

    def text(self, *, clients: int, waiting: int, step: int | None) -> str:
        """The page for /metrics, with the gauges that only the server knows."""
        lines = [
            *_counter("acrlpd_requests_total", "Requests by result.", "result", self.requests),
            *_counter("acrlpd_refused_connections_total", "Connections refused.", "reason", self.refused_connections),
            *_counter("acrlpd_reloads_total", "Newer checkpoints loaded while serving.", "result", self.reloads),
            *_gauge("acrlpd_clients", "Connected clients.", clients),
            *_gauge("acrlpd_waiting_requests", "Requests that wait for the device.", waiting),
            *_gauge("acrlpd_checkpoint_step", "Training step of the served checkpoint.", -1 if step is None else step),
        ]
        for name, summary, histogram in (
            ("acrlpd_request_seconds", "From a request's arrival to its reply.", self.request_seconds),
            ("acrlpd_infer_seconds", "One batch on the device.", self.infer_seconds),
            ("acrlpd_batch_size", "Requests per batch.", self.batch_size),
        ):
            lines += [f"# HELP {name} {summary}", f"# TYPE {name} histogram", *histogram.lines(name)]
        return "\n".join(lines) + "\n"


def _counter(name: str, summary: str, label: str, values: Mapping[str, int]) -> list[str]:
    head = [f"# HELP {name} {summary}", f"# TYPE {name} counter"]
    return head + [f'{name}{{{label}="{key}"}} {value}' for key, value in values.items()]


def _gauge(name: str, summary: str, value: int) -> list[str]:
    return [f"# HELP {name} {summary}", f"# TYPE {name} gauge", f"{name} {value}"]
