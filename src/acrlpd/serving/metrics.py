"""What a server counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class ServerMetrics:
    """The metrics of one server, in a registry of their own, because a process may have several servers."""

    def __init__(self) -> None:
        disable_created_metrics()  # or every counter would bring a second metric with the time of its creation
        own = self._registry = CollectorRegistry()
        self.requests = Counter("acrlpd_requests", "Requests by result.", ["result"], registry=own)
        self.refused_connections = Counter(
            "acrlpd_refused_connections", "Refused connections.", ["reason"], registry=own
        )
        self.closed_connections = Counter(
            "acrlpd_closed_connections", "Connections of clients that the server ended.", ["reason"], registry=own
        )
        self.reloads = Counter("acrlpd_reloads", "Newer checkpoints loaded while serving.", ["result"], registry=own)
        self.follow_restarts = Counter(
            "acrlpd_follow_restarts", "Times that following the run ended by an error.", registry=own
        )
        self.following = Gauge("acrlpd_following", "1 while --follow looks for newer checkpoints, or 0.", registry=own)
        self.clients = Gauge("acrlpd_clients", "Connected clients.", registry=own)
        self.waiting = Gauge("acrlpd_waiting_requests", "Requests that wait for the device.", registry=own)
        self.step = Gauge("acrlpd_checkpoint_step", "Training step of the served checkpoint, or -1.", registry=own)
        self.request_seconds = Histogram(
            "acrlpd_request_seconds", "From a request's arrival to its reply.", registry=own, buckets=_SECONDS
        )
        self.infer_seconds = Histogram(
            "acrlpd_infer_seconds", "One batch on the device.", registry=own, buckets=_SECONDS
        )
        self.batch_size = Histogram("acrlpd_batch_size", "Requests per batch.", registry=own, buckets=_BATCH_SIZES)
        # A counter appears with its first event; monitoring needs the 0 before it.
        for counter, values in (
            (self.requests, ("ok", "bad_request", "busy", "error", "timeout")),
            (self.refused_connections, ("unauthorized", "full", "address_full", "handshakes")),
            (self.closed_connections, ("idle", "flood")),
            (self.reloads, ("ok", "error")),
        ):
            for value in values:
                counter.labels(value)

    def text(self) -> str:
        """The page for /metrics."""
        return generate_latest(self._registry).decode()
