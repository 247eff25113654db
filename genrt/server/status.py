"""The state of a server: the status page, its JSON, and counters for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from genrt.lm import AsyncLM
from genrt.runtime.statistics import NO_COUNTERS, Statistics
from genrt.server.bodies import json_bytes
from genrt.server.routes import JSON

PAGE = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}
"""Headers of the page, which loads only its own parts."""

PARTS = {
    "/": ("status.html", "text/html"),
    "/status.js": ("status.js", "text/javascript"),
    "/status.css": ("status.css", "text/css"),
}


def status_routes(
    lm: AsyncLM, model: str, running: Mapping[int, dict[str, Any]], serving: Callable[[], int]
) -> list[Route]:
    """Return the routes.

    Args:
        model: the name that clients call it by.
        running: the inferences in progress.
        serving: returns how many requests are being served.
    """
    began = time.monotonic()

    async def status(_: Request) -> Response:
        found = {
            "model": model,
            "adapters": list(lm.adapters),
            "uptime_seconds": time.monotonic() - began,
            "serving": serving(),
            "statistics": asdict(lm.statistics()),
            "inferences": [*running.values()],
        }
        return Response(json_bytes(found), media_type=JSON, headers={"cache-control": "no-store"})

    async def counters(_: Request) -> Response:
        text = b"".join([*_process_lines(), *_counter_lines(lm.statistics())])
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def part(request: Request) -> Response:
        name, kind = PARTS[request.scope["path"]]
        content = resources.files("genrt.server").joinpath(name).read_bytes()
        return Response(content, media_type=kind, headers=PAGE)

    found = {"/v1/status": status, "/metrics": counters, **dict.fromkeys(PARTS, part)}
    return [Route(path, each, methods=["GET"]) for path, each in found.items()]


def _process_lines() -> list[bytes]:
    """Return the counters of other libraries in this process, such as vLLM's front end."""
    try:
        from prometheus_client import generate_latest
    except ImportError:
        return []
    return [generate_latest()]


def _counter_lines(statistics: Statistics) -> list[bytes]:
    """Return a runtime's counters in the format of Prometheus."""
    lines: list[bytes] = []
    for part, gauges in NO_COUNTERS.items():
        for name, value in asdict(getattr(statistics, part)).items():
            full = f"genrt_{part}_{name}" + ("" if name in gauges else "_total")
            kind = "gauge" if name in gauges else "counter"
            lines.append(f"# TYPE {full} {kind}\n{full} {value}\n".encode())
    replicas = statistics.replicas
    for full, kind, values in (
        ("genrt_replica_in_flight", "gauge", [each.in_flight for each in replicas]),
        ("genrt_replica_restarts_total", "counter", [each.restarts for each in replicas]),
    ):
        told = [f'{full}{{replica="{number}"}} {value}\n' for number, value in enumerate(values)]
        lines += [line.encode() for line in (f"# TYPE {full} {kind}\n", *told) if told]
    return lines
