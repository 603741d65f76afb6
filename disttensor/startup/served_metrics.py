"""A session whose figures are served for Prometheus (`dtrun --metrics 127.0.0.1:9400`, DISTTENSOR_METRICS)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ..runtime.host.addresses import own_address
from ..runtime.host.precedence import METRICS
from ..session.session import Session

_log = logging.getLogger("disttensor")


def serve_metrics(session: Session, environment: Mapping[str, str]) -> None:
    """Serves the figures of a session until its end, where the environment names an address. Where they can't be served
    the job runs without."""
    address = environment.get(METRICS, "")
    if not address:
        return
    try:
        host, port = own_address(address)
        from ..seeing.metrics import collector  # few sessions need it
        from ..seeing.metrics_server import MetricsServer

        asked = collector()
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry()
        registry.register(asked)
        server = session.part(MetricsServer)
        server.open(host, port, make_wsgi_app(registry))
    except (ImportError, OSError, RuntimeError, ValueError) as e:
        _log.warning("no metrics are served at %s=%s: %s", METRICS, address, e)
        return
    session.changes.callback(server.close)
