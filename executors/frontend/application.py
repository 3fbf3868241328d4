"""The FastAPI application: which path is answered by what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from executors.frontend import errors
from executors.frontend.body import Receive, Send, read_json
from executors.frontend.dashboard import dashboard
from executors.frontend.encode import encode
from executors.frontend.errors import INTERNAL, METHOD, NOT_FOUND, ApiError
from executors.frontend.exchange import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api, Exchange, rules
from executors.frontend.gate import App, Gate, Scope, family_of
from executors.frontend.operations import models, operations
from executors.frontend.requests.anthropic import read_count
from executors.frontend.services import CALL, Services

_TICK_S: Final = 0.25
_NOT_OFFERED: Final = (
    "/v1/embeddings", "/v1/images", "/v1/audio", "/v1/rerank", "/v1/videos", "/v1/realtime",
)  # fmt: skip


def application(services: Services, *, admin: bool = True, admin_only: bool = False) -> App:
    """Everything of one listener; `admin` and `admin_only` as in `Gate`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=_lifespan(services), redirect_slashes=False)
    for path, api in _apis(services).items():
        app.router.routes.append(Route(path, _Endpoint(services, api), methods=["POST"]))
    if services.settings.anthropic:
        app.add_api_route("/v1/messages/count_tokens", _counter(services), methods=["POST"])
    app.include_router(models(services))
    app.include_router(operations(services))
    app.include_router(dashboard(services))
    app.add_exception_handler(ApiError, _told(services))
    app.add_exception_handler(HTTPException, _told(services))
    app.add_exception_handler(Exception, _told(services))
    if services.settings.access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(services.settings.access.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return Gate(app, services, admin=admin, admin_only=admin_only)


def _apis(services: Services) -> dict[str, Api]:
    apis = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS, "/v1/responses": RESPONSES}
    return {**apis, "/v1/messages": MESSAGES} if services.settings.anthropic else apis


class _Endpoint:
    """An ASGI application of one path: an `Exchange` for each request."""

    def __init__(self, services: Services, api: Api) -> None:
        self._services = services
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self._services, self._api)(scope, receive, send)


def _counter(services: Services) -> Callable[[Request], Awaitable[Response]]:
    async def count_tokens(request: Request) -> Response:
        call = request.scope[CALL]
        services.stopping.check()
        services.rate.request(call.principal)
        document = await read_json(services, call.headers, request.receive)
        wanted = read_count(document, rules(services, call))
        (encoded,) = await encode(services, services.model(wanted.model), wanted)
        return JSONResponse({"input_tokens": len(encoded.token_ids)})

    return count_tokens


def _told(services: Services) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Errors outside of an exchange: of small paths, and of the framework."""

    async def tell(request: Request, error: Exception) -> Response:
        api = error if isinstance(error, ApiError) else _of_framework(request.url.path, error)
        family = family_of(request.url.path)
        told = {name.decode(): value.decode() for name, value in errors.headers(api, services.settings)}
        if isinstance(error, HTTPException):
            told.update(error.headers or {})
        return JSONResponse(errors.body(api, family), errors.status(api, services.settings), headers=told)

    return tell


def _of_framework(path: str, error: Exception) -> ApiError:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404 and path.startswith(_NOT_OFFERED):
        return ApiError(NOT_FOUND, f"{path[:128]}: not supported by this server", code="not_found")
    if status == 404:
        return ApiError(NOT_FOUND, f"{path[:128]}: there is no such path", code="not_found")
    if status == 405:
        return ApiError(METHOD, f"{path[:128]}: not with this method")
    return ApiError(INTERNAL, "the request failed inside the server")


def _lifespan(services: Services) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        beat = asyncio.create_task(_beat(services))
        try:
            yield
        finally:
            beat.cancel()
            with suppress(asyncio.CancelledError):
                await beat

    return lifespan


async def _beat(services: Services) -> None:
    """Measures how late the loop wakes up."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _TICK_S
        await asyncio.sleep(_TICK_S)
        services.metrics.loop_delay.observe(max(0.0, loop.time() - due_s))
