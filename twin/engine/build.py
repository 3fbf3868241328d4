"""Which engine class runs which settings. The one place that knows every scheduler by name."""

from __future__ import annotations

from collections.abc import Callable

from twin.engine.adapters import AdapterEngine
from twin.engine.offload import OffloadEngine
from twin.engine.protocol import Engine
from twin.engine.ranks import RankedEngine
from twin.engine.settings import EngineSettings
from twin.engine.sglang import SglangEngine, SglangSettings
from twin.engine.speculative import SpeculativeEngine, SpeculativeTrtllmEngine
from twin.engine.steplog import Row
from twin.engine.trtllm import TrtllmEngine, TrtllmSettings
from twin.engine.vllm import VllmEngine
from twin.perf.protocol import LatencyModel


def build_engine(
    settings: EngineSettings,
    latency: LatencyModel,
    *,
    worker_id: int = 0,
    record: Callable[[Row], None] | None = None,
    kv_events: bool = False,
    leap_past_evictions: bool = True,
) -> Engine:
    """The engine of one worker, with `latency` for the steps of one rank; the keywords are those of `VllmEngine`."""

    if isinstance(settings, SglangSettings):
        return SglangEngine(
            settings,
            latency,
            worker_id=worker_id,
            record=record,
            kv_events=kv_events,
            leap_past_evictions=leap_past_evictions,
        )

    def one(record: Callable[[Row], None] | None) -> VllmEngine:
        return _kind(settings)(
            settings,
            latency,
            worker_id=worker_id,
            record=record,
            kv_events=kv_events,
            leap_past_evictions=leap_past_evictions,
        )

    if settings.ranks == 1:
        return one(record)
    return RankedEngine(one, settings.ranks, interval=settings.prefill_interval, record=record)


def _kind(settings: EngineSettings) -> Callable[..., VllmEngine]:
    if isinstance(settings, TrtllmSettings):
        return TrtllmEngine if settings.speculation is None else SpeculativeTrtllmEngine
    if settings.host is not None and settings.ranks == 1 and settings.speculation is None:
        return OffloadEngine
    if settings.max_loras is not None and settings.speculation is None:
        return AdapterEngine
    return VllmEngine if settings.speculation is None else SpeculativeEngine
