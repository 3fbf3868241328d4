"""The few calls to a Kubernetes API server that scaling needs, by the official client, each in a thread of its own.

Refusals that may pass (429, 5xx, no answer) are tried again, ever later; others come back as `Refused`. The client
itself tries nothing again: how long to wait is decided here, on the world's clock.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from executors.clock import Clock
from executors.connectors.kubernetes_objects import Scaled, patch
from executors.connectors.protocol import ConnectorError, pause
from policies.errors import CapabilityError, ConfigError

T = TypeVar("T")

CALL_S: Final = 10.0
"""How long one call may take."""
TRIES: Final = 6
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0


class Refused(ConnectorError):
    """The API server said no. `status`: of HTTP; None where it did not answer."""

    def __init__(self, text: str, status: int | None, retry_s: float | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_s = retry_s

    @property
    def passes(self) -> bool:
        """Whether the same may be granted later."""
        return self.status is None or self.status == 429 or self.status >= 500


class KubernetesApi:
    """`kubeconfig` and `context` say which cluster (None: the one that this process runs in, or the usual file).

    Raises CapabilityError without the client, ConfigError where no cluster is configured. `retried` counts calls that
    were made again.
    """

    def __init__(self, clock: Clock, kubeconfig: str | None = None, context: str | None = None) -> None:
        try:
            client: Any = importlib.import_module("kubernetes.client")
            config: Any = importlib.import_module("kubernetes.config")
        except ImportError as error:
            raise CapabilityError(
                "planner.connector = kubernetes needs the official client: pip install 'dynatwin[kubernetes]'"
            ) from error
        self._clock = clock
        configuration = client.Configuration()
        try:
            if kubeconfig is None and context is None:
                config.load_config(client_configuration=configuration)
            else:
                config.load_kube_config(kubeconfig, context, client_configuration=configuration)
        except config.ConfigException as error:
            raise ConfigError(
                f"no Kubernetes cluster is configured ({error}); run inside one, or set planner.kubernetes.kubeconfig"
            ) from error
        configuration.retries = False
        self._exception = client.ApiException
        self._client = client.ApiClient(configuration)
        self._objects = client.CustomObjectsApi(self._client)
        self._core = client.CoreV1Api(self._client)
        self.retried = 0

    async def scale(self, scaled: Scaled) -> Mapping[str, Any]:
        """The scale subresource of an object."""
        at = _address(scaled)
        return await self._call(
            f"get {scaled}/scale",
            lambda: self._objects.get_namespaced_custom_object_scale(**at, _request_timeout=CALL_S),
        )

    async def write(self, scaled: Scaled, replicas: int, *, dry_run: bool) -> Mapping[str, Any]:
        """Patch how many replicas there are to be; the scale subresource after it."""
        more = {"dry_run": "All"} if dry_run else {}
        return await self._call(
            f"patch {scaled}/scale",
            lambda: self._objects.patch_namespaced_custom_object_scale(
                **_address(scaled),
                body=patch(replicas),
                field_manager="dynatwin-planner",
                _content_type="application/merge-patch+json",
                _request_timeout=CALL_S,
                **more,
            ),
        )

    async def object(self, scaled: Scaled) -> Mapping[str, Any]:
        """The object itself."""
        at = _address(scaled)
        return await self._call(
            f"get {scaled}", lambda: self._objects.get_namespaced_custom_object(**at, _request_timeout=CALL_S)
        )

    async def autoscalers(self, namespace: str) -> Sequence[Mapping[str, Any]]:
        """The HorizontalPodAutoscalers of a namespace; none where the cluster does not know of such."""
        try:
            listed = await self._call(
                f"list horizontalpodautoscalers in {namespace}",
                lambda: self._objects.list_namespaced_custom_object(
                    "autoscaling", "v2", namespace, "horizontalpodautoscalers", _request_timeout=CALL_S
                ),
            )
        except Refused as refused:
            if refused.status == 404:
                return ()
            raise
        items: Sequence[Mapping[str, Any]] = listed["items"]
        return items

    async def pods_wait_for(self, namespace: str, selector: str) -> Sequence[str]:
        """Why pods that are not ready are not, each reason once."""
        listed = await self._call(
            f"list pods in {namespace}",
            lambda: self._core.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=CALL_S),
        )
        return list(dict.fromkeys(reason for pod in listed.items for reason in _reasons(pod)))

    async def close(self) -> None:
        close = getattr(self._client, "close", None)
        if close is not None:
            await asyncio.to_thread(close)

    async def _call(self, what: str, call: Callable[[], T]) -> T:
        wait_s = FIRST_RETRY_S
        for left in reversed(range(TRIES)):
            try:
                return await asyncio.to_thread(self._once, what, call)
            except Refused as refused:
                if not refused.passes or not left:
                    raise
                self.retried += 1
                await pause(self._clock, wait_s if refused.retry_s is None else max(wait_s, refused.retry_s))
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)
        raise AssertionError

    def _once(self, what: str, call: Callable[[], T]) -> T:
        from urllib3.exceptions import HTTPError

        try:
            return call()
        except self._exception as error:
            status = int(error.status or 0) or None
            said = _message(error.body) or error.reason
            raise Refused(f"{what}: {status} {said}", status, _retry_s(error.headers)) from error
        except HTTPError as error:
            raise Refused(f"{what}: no answer ({type(error).__name__})", None) from error


def _address(scaled: Scaled) -> dict[str, str]:
    one = scaled.resource
    return {
        "group": one.group,
        "version": one.version,
        "namespace": scaled.namespace,
        "plural": one.plural,
        "name": scaled.name,
    }


def _message(body: object) -> str:
    """What the API server says of itself, of its Status object."""
    try:
        return str(json.loads(body)["message"])  # type: ignore[arg-type]
    except (TypeError, ValueError, KeyError):
        return ""


def _retry_s(headers: Any) -> float | None:
    try:
        return float(headers.get("Retry-After"))
    except (AttributeError, TypeError, ValueError):
        return None


def _reasons(pod: Any) -> list[str]:
    """Why a pod is not ready: what its containers wait for, else its condition."""
    status = pod.status
    waiting = [one.state.waiting for one in status.container_statuses or () if one.state and one.state.waiting]
    if waiting:
        return [str(one.reason) for one in waiting if one.reason]
    false = [one for one in status.conditions or () if one.status == "False" and one.reason]
    named = [one for one in false if one.type == "PodScheduled"] or [one for one in false if one.type == "Ready"]
    return [f"{one.reason}: {one.message}" if one.message else str(one.reason) for one in named]
