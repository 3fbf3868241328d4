"""Which engine class runs which settings. The one place that knows every scheduler by name; it loads those that are
wanted, because a run knows one or two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from twin.engine.core import EngineParts
from twin.engine.protocol import Engine
from twin.engine.settings import EngineSettings, SglangSettings
from twin.engine.steplog import Row
from twin.engine.vllm import VllmEngine
from twin.perf.protocol import LatencyModel

if TYPE_CHECKING:
    from twin.engine.ranks import Rank


def build_engine(
    settings: EngineSettings,
    latency: LatencyModel,
    *,
    worker_id: int = 0,
    record: Callable[[Row], None] | None = None,
    kv_events: bool = False,
    leap_past_evictions: bool = True,
) -> Engine:
    """The engine of one worker, with `latency` for the steps of one rank; the keywords are those of `EngineParts`."""
    parts = EngineParts(
        latency=latency,
        worker_id=worker_id,
        record=record,
        kv_events=kv_events,
        leap_past_evictions=leap_past_evictions,
    )
    kind = _kind(settings)
    if settings.ranks == 1:
        return kind(settings, parts)
    if settings.tiers:
        from twin.engine.tiered_ranks import TieredRankedEngine as Ranks
    else:
        from twin.engine.ranks import RankedEngine as Ranks  # type: ignore[assignment]
    return Ranks(
        lambda rows: kind(settings, replace(parts, record=rows)),
        settings.ranks,
        interval=settings.prefill_interval,
        balance_wait=settings.balance_wait,
        record=record,
    )


def _kind(settings: EngineSettings) -> Callable[..., Rank]:
    if settings.tiers:
        return _tiered_kind(settings)
    if type(settings) is not EngineSettings:
        return _other_kind(settings)
    if settings.speculation is not None:
        from twin.engine.speculative import SpeculativeEngine

        return SpeculativeEngine
    if settings.host is not None and settings.ranks == 1:
        from twin.engine.offload import OffloadEngine

        return OffloadEngine
    if settings.max_loras is not None:
        from twin.engine.adapters import AdapterEngine

        return AdapterEngine
    return VllmEngine


def _tiered_kind(settings: EngineSettings) -> Callable[..., Rank]:
    """Of an engine with a block manager below its pool."""
    is_plain = settings.speculation is None
    if type(settings) is EngineSettings and is_plain and settings.max_loras is None:
        from twin.engine.tiered import TieredEngine

        return TieredEngine
    if isinstance(settings, SglangSettings):
        from twin.engine import sglang_tiered

        return sglang_tiered.TieredSglangEngine if is_plain else sglang_tiered.TieredSpeculativeSglangEngine
    from twin.engine import tiered_kinds as kinds

    if type(settings) is EngineSettings:
        return kinds.TieredAdapterEngine if is_plain else kinds.TieredSpeculativeEngine
    return kinds.TieredTrtllmEngine if is_plain else kinds.TieredSpeculativeTrtllmEngine


def _other_kind(settings: EngineSettings) -> Callable[..., Rank]:
    """Of an engine whose settings are more than those of vLLM."""
    if isinstance(settings, SglangSettings):
        if settings.speculation is not None:
            from twin.engine.sglang_speculative import SpeculativeSglangEngine

            return SpeculativeSglangEngine
        from twin.engine.sglang import SglangEngine

        return SglangEngine
    from twin.engine.speculative import SpeculativeTrtllmEngine
    from twin.engine.trtllm import TrtllmEngine

    return TrtllmEngine if settings.speculation is None else SpeculativeTrtllmEngine
