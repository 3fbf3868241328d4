"""What operators and load balancers ask: alive, ready, healthy, metrics, limits, decisions, models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from executors.frontend.body import read_json
from executors.frontend.errors import NOT_FOUND, ApiError, invalid
from executors.frontend.openapi.document import document
from executors.frontend.services import CALL, Services
from executors.frontend.stopping import Phase
from policies.errors import ConfigError

_MOST_DECISIONS = 1000


def operations(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/live")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @router.get("/ready")
    async def ready() -> Response:
        return JSONResponse({"ready": services.ready, "missing": missing(services)}, 200 if services.ready else 503)

    @router.get("/health")
    async def health() -> Response:
        return JSONResponse(status(services), 200 if services.ready else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(services.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(document(services.settings, list(services.backend.busy_thresholds())))

    @router.get("/busy_threshold")
    async def busy_threshold() -> Response:
        return JSONResponse(dict(services.backend.busy_thresholds()))

    @router.post("/busy_threshold")
    async def set_busy_threshold(request: Request) -> Response:
        document = await read_json(services, request.scope[CALL].headers, request.receive)
        try:
            services.backend.set_busy_thresholds(_limits(document))
        except ConfigError as error:
            raise invalid("busy_threshold", str(error)) from None
        return JSONResponse(dict(services.backend.busy_thresholds()))

    if services.settings.debug:
        _debug(router, services)
    return router


def _debug(router: APIRouter, services: Services) -> None:
    @router.get("/debug/decisions")
    async def decisions(request: Request) -> Response:
        text = request.query_params.get("n", "20")
        if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= _MOST_DECISIONS:
            raise invalid("n", f"must be 1 to {_MOST_DECISIONS}")
        told = {"decisions": [dict(one) for one in services.backend.decisions(int(text))]}
        return Response(json.dumps(told, default=str), media_type="application/json")

    @router.get("/debug/state")
    async def state() -> Response:
        return JSONResponse({**status(services), "open_requests": services.open.count, "workers": workers(services)})


def missing(services: Services) -> list[str]:
    """Why this server is not ready, in words; empty where it is."""
    serving = services.backend.serving()
    told = list(serving.missing)
    if services.stopping.leaving or serving.draining:
        told.append("this server is shutting down")
    if not told and not services.ready:
        told.append("no model is ready")
    return told


def status(services: Services) -> dict[str, object]:
    """The document of /health."""
    stopping = services.stopping.phase
    word = "ready" if services.ready else "draining" if stopping >= Phase.LEAVING else "not_ready"
    listed = services.backend.workers()
    return {
        "status": word,
        "models": services.names(),
        "missing": missing(services),
        "workers": {"total": len(listed), "ready": sum(worker.state == "ready" for worker in listed)},
        "phase": stopping.name.lower(),
    }


def workers(services: Services) -> list[dict[str, object]]:
    return [
        {
            "id": worker.worker_id,
            "name": worker.name,
            "role": worker.role,
            "state": worker.state,
            "in_flight": worker.in_flight,
            "running": worker.running,
            "waiting": worker.waiting,
            "kv_share": worker.kv_share,
            "cached_blocks": worker.cached_blocks,
        }
        for worker in services.backend.workers()
    ]


def models(services: Services) -> APIRouter:
    """What can be asked for. Names may have slashes."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(services, name) for name in services.names()]})

    @router.get("/v1/models/{name:path}/ready")
    async def model_ready(name: str) -> Response:
        base = services.base(name)
        if base is None:
            raise _no_model(name)
        serving = services.backend.serving()
        is_ready = base in serving.ready and not services.stopping.leaving
        told = {"model": name, "ready": is_ready, "missing": list(serving.missing)}
        return JSONResponse(told, 200 if is_ready else 503)

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name not in services.names():
            raise _no_model(name)
        return JSONResponse(_model(services, name))

    return router


def _model(services: Services, name: str) -> dict[str, object]:
    base = services.base(name)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "dynatwin",
        "root": base,
        "max_model_len": services.backend.serving().context_tokens,
    }


def _no_model(name: str) -> ApiError:
    return ApiError(NOT_FOUND, f"the model {name[:128]!r} does not exist here", param="model", code="model_not_found")


def _limits(document: Mapping[str, object]) -> dict[str, float | None]:
    made: dict[str, float | None] = {}
    for name, value in document.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise invalid(name, "must be a number from 0, or null for no limit")
        made[name] = None if value is None else float(value)
    if not made:
        raise invalid("busy_threshold", "names no limit")
    return made
