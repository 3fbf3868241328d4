"""A Kubernetes API server for tests: the few paths that scaling uses, answering in the form that the API documents.

Objects are those of `tests/data/kubernetes`. Their controller moves one step whenever an object is read, so a test says
how slow it is without a clock. `refuse` makes the next calls fail; every call is kept in `calls`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

DATA = Path(__file__).parent / "data" / "kubernetes"
CODES = {403: "Forbidden", 404: "NotFound", 409: "Conflict", 429: "TooManyRequests", 503: "ServiceUnavailable"}


def recorded(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


@dataclass
class Call:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    content_type: str


@dataclass
class ApiServer:
    """`objects` by their path; `steps`: reads until the controller has seen a change, has made the replicas, and they
    are ready; `stuck`: these replicas never get ready."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 3
    stuck: bool = False
    autoscalers: Any = field(default_factory=lambda: {**recorded("autoscalers"), "items": []})
    refuse: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By method and last part of the path: the statuses of the next calls."""
    between: Any = None
    """Called before a write that is refused for a conflict: what somebody else did."""
    calls: list[Call] = field(default_factory=list)
    url: str = ""

    def add(self, name: str) -> dict[str, Any]:
        one = recorded(name)
        plural = one["kind"].lower() + "s"
        path = f"/apis/{one['apiVersion']}/namespaces/{one['metadata']['namespace']}/{plural}/{one['metadata']['name']}"
        self.objects[path] = one
        return one

    def patches(self) -> list[tuple[str, Any]]:
        """What was really written, in order."""
        return [
            (call.path.split("/")[-2], call.body)
            for call in self.calls
            if call.method == "PATCH" and "dryRun" not in call.query
        ]

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        call = Call(
            request.method, request.path, dict(request.query), json.loads(body) if body else None, request.content_type
        )
        self.calls.append(call)
        refusals = self.refuse.get((call.method, call.path.rsplit("/", 1)[1]), [])
        if refusals:
            status = refusals.pop(0)
            if status != 200:
                if status == 409 and self.between is not None:
                    self.between()
                return self._status(status, call)
        if call.path.endswith("/horizontalpodautoscalers"):
            return web.json_response(self.autoscalers)
        if call.path.endswith("/pods"):
            return web.json_response(recorded("pods"))
        path = call.path.removesuffix("/scale")
        if path not in self.objects:
            return self._status(404, call)
        one = self.objects[path]
        if call.path == path:
            self._control(one)
            return web.json_response(one)
        if call.method == "PATCH":
            if call.content_type != "application/merge-patch+json":
                return self._status(415, call)
            one = copy.deepcopy(one) if call.query.get("dryRun") == "All" else one
            self.set(one, call.body["spec"]["replicas"])
        return web.json_response(self._scale(one))

    def set(self, one: dict[str, Any], replicas: int) -> None:
        """Somebody sets the replicas of an object."""
        if one["spec"]["replicas"] != replicas:
            one["spec"]["replicas"] = replicas
            one["metadata"]["generation"] += 1
            one["x-steps"] = self.steps
        one["metadata"]["resourceVersion"] = str(int(one["metadata"]["resourceVersion"]) + 1)

    def _control(self, one: dict[str, Any]) -> None:
        left = one.get("x-steps", 0)
        if not left:
            return
        one["x-steps"] = left = left - 1
        wanted, status = one["spec"]["replicas"], one["status"]
        if left <= 1:
            if one["kind"] == "Deployment":
                status["observedGeneration"] = one["metadata"]["generation"]
            status["replicas"] = wanted
        if left == 0 and not self.stuck:
            status["readyReplicas"] = wanted
            if not wanted:
                del status["readyReplicas"], status["replicas"]

    @staticmethod
    def _scale(one: dict[str, Any]) -> dict[str, Any]:
        scale = recorded("scale")
        for key in ("name", "namespace", "uid", "resourceVersion"):
            scale["metadata"][key] = one["metadata"][key]
        replicas = one["spec"]["replicas"]
        scale["spec"] = {"replicas": replicas} if replicas else {}
        scale["status"]["replicas"] = one["status"].get("replicas", 0)
        return scale

    @staticmethod
    def _status(status: int, call: Call) -> web.Response:
        reason = CODES.get(status, "Failure")
        message = f"{call.method} {call.path} is refused by the test"
        plain = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
                 "reason": reason, "code": status}  # fmt: skip
        headers = {"Retry-After": "7"} if status == 429 else {}
        return web.json_response(plain, status=status, headers=headers)

    def kubeconfig(self, folder: Path) -> str:
        """A file that leads to it."""
        plain = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "planner", "user": {"token": "none"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "planner"}}],
        }  # fmt: skip
        path = folder / "kubeconfig.json"
        path.write_text(json.dumps(plain), encoding="utf-8")
        return str(path)


@asynccontextmanager
async def serving(api: ApiServer) -> AsyncIterator[ApiServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    async with TestServer(app) as server:
        api.url = str(server.make_url("")).rstrip("/")
        yield api
