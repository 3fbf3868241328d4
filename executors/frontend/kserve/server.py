"""KServe v2 over gRPC: the same requests, limits and answers as over HTTP, in the protocol's own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from typing import Any, Final

import grpc

from executors.frontend.account import Account
from executors.frontend.body import left
from executors.frontend.errors import NOT_FOUND, ApiError, invalid
from executors.frontend.exchange import admit, inside, rules, running
from executors.frontend.kserve.infer import INPUTS, OUTPUTS, read_infer, response
from executors.frontend.kserve.messages import message
from executors.frontend.run import Done, Run, Text
from executors.frontend.services import Call, Services, new_request_id
from policies.errors import ConfigError

_SERVICE: Final = "inference.GRPCInferenceService"
_STREAMS: Final = 1000
_STOP_S: Final = 1.0
_CODES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    529: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class KserveServer:
    """One gRPC listener."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=_STREAMS,
            options=[
                ("grpc.max_receive_message_length", services.settings.limits.body_bytes),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError where it cannot be had."""
        try:
            bound = self._add(f"{host}:{port}")
        except RuntimeError:
            raise ConfigError(f"{host}:{port} cannot be listened on; take another kserve_port") from None
        await self._server.start()
        return bound

    async def stop(self) -> None:
        await self._server.stop(_STOP_S)

    def _add(self, address: str) -> int:
        tls = self._services.settings.tls
        if tls is None:
            return int(self._server.add_insecure_port(address))
        ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
        pair = (tls.key.read_bytes(), tls.cert.read_bytes())
        credentials = grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)
        return int(self._server.add_secure_port(address, credentials))

    def _handlers(self) -> Any:
        unary = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        made = {
            name: grpc.unary_unary_rpc_method_handler(
                method, message(f"{name}Request").FromString, lambda answer: answer.SerializeToString()
            )
            for name, method in unary.items()
        }
        made["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, message("ModelInferRequest").FromString, lambda answer: answer.SerializeToString()
        )
        return grpc.method_handlers_generic_handler(_SERVICE, made)

    # --- what is there ------------------------------------------------------------------------------------------

    async def _server_live(self, request: Any, context: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _server_ready(self, request: Any, context: Any) -> Any:
        return message("ServerReadyResponse")(ready=self._services.ready)

    async def _server_metadata(self, request: Any, context: Any) -> Any:
        return message("ServerMetadataResponse")(name="dynatwin", version=version("dynatwin"), extensions=[])

    async def _model_ready(self, request: Any, context: Any) -> Any:
        return message("ModelReadyResponse")(ready=request.name in self._services.names())

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        if self._services.base(request.name) is None:
            await _abort(context, ApiError(NOT_FOUND, f"the model {request.name[:128]!r} does not exist here"))
        made = message("ModelMetadataResponse")(name=request.name, versions=["1"], platform="dynatwin")
        for tensors, described in ((made.inputs, INPUTS), (made.outputs, OUTPUTS)):
            for name, kind, shape in described:
                tensors.append(message("TensorMetadata")(name=name, datatype=kind, shape=shape))
        return made

    # --- inference ----------------------------------------------------------------------------------------------

    async def _infer(self, request: Any, context: Any) -> Any:
        texts: list[str] = []
        try:
            async for run, event in self._events(request, context, may_stream=False):
                if isinstance(event, Done):
                    return response(request, "".join(texts), event, run)
                texts.append(event.text)
        except ApiError as error:
            await _abort(context, error)

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Requests of one stream are answered side by side; what fails of one leaves the others alone."""
        answers: asyncio.Queue[Any] = asyncio.Queue(self._services.settings.limits.queued_chunks)
        tasks: set[asyncio.Task[None]] = set()

        async def take() -> None:
            async for request in requests:
                task = asyncio.create_task(self._answer(request, context, answers))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(tasks)
            await answers.put(None)

        taking = asyncio.create_task(take())
        try:
            while (answer := await answers.get()) is not None:
                yield answer
        finally:
            open_tasks = [taking, *tasks]
            for task in open_tasks:
                task.cancel()
            await asyncio.gather(*open_tasks, return_exceptions=True)

    async def _answer(self, request: Any, context: Any, answers: asyncio.Queue[Any]) -> None:
        whole: list[str] = []
        try:
            async for run, event in self._events(request, context, may_stream=True):
                if isinstance(event, Done):
                    told = response(request, "".join(whole), event, run)
                elif run.wanted.stream:
                    told = response(request, event.text)
                else:
                    whole.append(event.text)
                    continue
                await answers.put(message("ModelStreamInferResponse")(infer_response=told))
        except ApiError as error:
            failed = message("ModelInferResponse")(model_name=request.model_name, id=request.id)
            await answers.put(message("ModelStreamInferResponse")(error_message=error.message, infer_response=failed))

    async def _events(self, request: Any, context: Any, *, may_stream: bool) -> AsyncIterator[tuple[Run, Text | Done]]:
        """The events of one request. Raises ApiError; a cancelled or late RPC cancels the request."""
        services = self._services
        call = _call(services, context)
        account = Account(services, call, "kserve")
        try:
            with services.open:
                call.principal = services.keys.who(call.headers.get("authorization"), call.headers.get("x-api-key"))
                services.stopping.check()
                admit(services)
                services.rate.request(call.principal)
                wanted = read_infer(request, rules(services, call))
                if wanted.stream and not may_stream:
                    raise invalid("streaming", "only ModelStreamInfer streams")
                async with running(services, call, account, wanted) as run:
                    while run.open:
                        event = await run.next_event()
                        if event is not None:
                            yield run, event
        except ApiError as error:
            account.fail(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            account.fail(left())
            raise
        except Exception:
            fault = inside(call)
            account.fail(fault)
            raise fault from None
        finally:
            account.close()


def _call(services: Services, context: Any) -> Call:
    headers = {str(name): str(value) for name, value in context.invocation_metadata() or ()}
    nobody = services.keys.anonymous
    return Call(new_request_id(headers.get("x-request-id")), services.now(), "openai", nobody, headers)


async def _abort(context: Any, error: ApiError) -> None:
    await context.abort(_CODES.get(error.kind.status, grpc.StatusCode.INTERNAL), error.message)
