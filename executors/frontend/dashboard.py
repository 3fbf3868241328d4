"""The dashboard: one page of own files, and what it draws as JSON. It loads nothing from any other host."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from executors.frontend.glance import predicted, shadow
from executors.frontend.live import Second, percentile_ms
from executors.frontend.operations import status, workers
from executors.frontend.services import Services
from executors.frontend.shadow import told

_STATIC: Final = Path(__file__).with_name("static")
_PAGE: Final = {
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
}
_DECISIONS: Final = 12


def dashboard(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/dashboard")
    async def page() -> Response:
        return FileResponse(_STATIC / "dashboard.html", headers=_PAGE)

    @router.get("/dashboard/data")
    async def data() -> Response:
        return Response(json.dumps(glance(services), default=str), media_type="application/json")

    @router.get("/dashboard/dashboard.js")
    async def script() -> Response:
        return FileResponse(_STATIC / "dashboard.js", headers=_PAGE)

    @router.get("/dashboard/dashboard.css")
    async def style() -> Response:
        return FileResponse(_STATIC / "dashboard.css", headers=_PAGE)

    return router


def glance(services: Services) -> dict[str, object]:
    """Everything the page draws. Times of series are seconds before now, values as their names say."""
    now = services.now()
    seconds = services.live.seconds(now)
    return {
        **status(services),
        "open_requests": services.open.count,
        "worker_list": workers(services),
        "decisions": [dict(one) for one in services.backend.decisions(_DECISIONS)],
        "measured": {name: _series(seconds, now, name) for name in _SERIES},
        "predicted": dict(predicted(services.backend)),
        "shadow": told(shadow(services.backend)),
        "busy_thresholds": dict(services.backend.busy_thresholds()),
    }


_SERIES: Final[Mapping[str, Callable[[Second], float | None]]] = {
    "ttft_ms_p50": lambda one: percentile_ms(one.ttft, 0.5),
    "ttft_ms_p95": lambda one: percentile_ms(one.ttft, 0.95),
    "itl_ms_p50": lambda one: percentile_ms(one.itl, 0.5),
    "itl_ms_p95": lambda one: percentile_ms(one.itl, 0.95),
    "tokens_per_s": lambda one: one.tokens,
    "requests_per_s": lambda one: one.ended,
    "failed_per_s": lambda one: one.failed,
}


def _series(seconds: list[Second], now: float, name: str) -> list[tuple[float, object]]:
    return [(round(one.at_s - now, 1), value) for one in seconds if (value := _SERIES[name](one)) is not None]
