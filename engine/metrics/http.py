"""What vLLM's page tells of HTTP: requests, how long they took, and their sizes, by path.

Names, labels and buckets are those of prometheus-fastapi-instrumentator, with which vLLM counts them. The
paths that only watch the server (:data:`UNCOUNTED`) are left out, as vLLM does.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
FEW_SECONDS = (0.1, 0.5, 1)
MANY_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60),
)


class HttpMetrics:
    """The families of the HTTP layer, in the registry of the page."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests_total", "Requests by method, status and path.",
            ("method", "status", "handler"), registry=registry,
        )  # fmt: skip
        self._received = Summary(
            "http_request_size_bytes", "Length of requests' bodies.", ("handler",), registry=registry
        )
        self._sent = Summary(
            "http_response_size_bytes", "Length of answers as their head says; 0 for streams.",
            ("handler",), registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "http_request_duration_highr_seconds", "Seconds to the end of the answer, of all paths.",
            buckets=MANY_SECONDS, registry=registry,
        )  # fmt: skip
        self._by_path = Histogram(
            "http_request_duration_seconds", "Seconds to the end of the answer, by path.",
            ("method", "handler"), buckets=FEW_SECONDS, registry=registry,
        )  # fmt: skip

    def record(
        self, method: str, path: str, status: int, seconds: float, received: int = 0, sent: int = 0
    ) -> None:
        """Add one exchange. ``path``: as it is routed, "none" for one that is not. Sizes in bytes."""
        self._requests.labels(method, f"{status // 100}xx", path).inc()
        self._received.labels(path).observe(received)
        self._sent.labels(path).observe(sent)
        self._seconds.observe(seconds)
        self._by_path.labels(method, path).observe(seconds)
