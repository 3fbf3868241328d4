"""From the configuration to the policies that decide, for either world: who routes, who migrates, who fences.

Nothing here knows how orders are carried out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.cluster.controller import Policy
from policies.errors import CapabilityError
from policies.resilience.backoff import Backoff
from policies.resilience.breaker import Breaker, BreakerSettings
from policies.resilience.health import Canaries, CanarySettings
from policies.resilience.migration import Migration, MigrationSettings
from policies.router.base import Router
from policies.router.build import MODES, Maker, build
from policies.router.disaggregation import Disaggregated, DisaggregationSettings, leg_settings
from policies.router.queued import Queued
from policies.router.settings import RouterSettings
from twin.config import Config, ResilienceConfig
from twin.routing import kinds_of_faults, router_settings

if TYPE_CHECKING:
    from policies.router.replicas import Peered


def build_policy(config: Config, block_size: int, *, explain: bool = False, number: int | None = None) -> Policy:
    """The routing policy of the configuration, from a plug-in where no mode of ours has that name. `number`: which of
    several routers it is, whose others are in processes of their own (None: there are no others)."""
    settings = router_settings(config, block_size, explain=explain)
    if number is not None:
        from policies.router.replicas import Replica

        (router,) = _peered(config, settings, 1)
        return Replica(router, number, sync=True, batch_s=config.replicas.sync_batch_s)
    if config.replicas.count > 1:
        return _fleet(config, settings)
    return _one_router(config, settings)


def _one_router(config: Config, settings: RouterSettings) -> Policy:
    """One router of the run, which may be restarted where its scenario does that."""
    if kinds_of_faults(config) & {"router_restart", "index_restart"}:
        from policies.router.restart import Restartable

        return Restartable(lambda: _plain_router(config, settings))
    return _plain_router(config, settings)


def _plain_router(config: Config, settings: RouterSettings) -> Policy:
    if config.is_disaggregated:
        return build_legs(config, settings, _plugins(settings.mode))
    return build(settings, _plugins(settings.mode))


def _fleet(config: Config, settings: RouterSettings) -> Policy:
    """Several routers of one mode, each with its own books."""
    from policies.router.fleet import Fleet, ReplicaSettings

    table = config.replicas
    return Fleet(
        _peered(config, settings, table.count),
        ReplicaSettings(
            count=table.count,
            spread=table.spread,  # type: ignore[arg-type]
            seed=config.seed,
            sync=table.syncs,
            batch_s=table.sync_batch_s,
            kv_lag_s=table.kv_event_lag_s,
        ),
    )


def _peered(config: Config, settings: RouterSettings, count: int) -> list[Peered]:
    """Routers that take in what others have sent."""
    routers = [_one_router(config, settings) for _ in range(count)]
    if not all(hasattr(router, "peer_sent") for router in routers):
        raise CapabilityError(
            f"router.mode = {settings.mode}: it cannot be one of several routers, only a mode that is a Router can"
        )
    return routers  # type: ignore[return-value]  # each has what a peer needs


def _plugins(mode: str) -> dict[str, Maker]:
    if mode in MODES:
        return {}
    from twin import plugins

    return {name: plugins.load("dynatwin.routers", name) for name in plugins.names("dynatwin.routers") if name == mode}


def build_legs(config: Config, settings: RouterSettings, plugins: dict[str, Maker]) -> Policy:
    """The policy that places both legs, each with a mode of its own."""
    table = config.disaggregation
    prefill, decode = (build(leg, plugins) for leg in leg_settings(settings))
    if not (isinstance(prefill, Router | Queued) and isinstance(decode, Router)):
        raise CapabilityError(f"router.mode = {settings.mode}: it cannot place legs, only a mode that is a Router can")
    return Disaggregated(
        prefill,
        decode,
        DisaggregationSettings(
            order="decode_first" if config.is_destination_first else "prefill_first",
            conditional=table.conditional.replace("-", "_"),  # type: ignore[arg-type]
            busy_tokens=table.prefill_busy_tokens,
            decode_busy_share=table.decode_busy_share,
        ),
    )


def migration(config: Config) -> Migration:
    """What becomes of requests whose worker is lost."""
    table = config.resilience
    return Migration(
        MigrationSettings(
            limit=table.migration_limit,
            max_seq_len=table.migration_max_seq_len,
            backoff=Backoff(seed=config.seed) if table.retry_backoff else None,
        )
    )


def guards(table: ResilienceConfig) -> tuple[Canaries | Breaker, ...]:
    """The policies that fence workers, as they are configured."""
    found: list[Canaries | Breaker] = []
    if table.canary_idle_s:
        found.append(Canaries(CanarySettings(idle_s=table.canary_idle_s, timeout_s=table.canary_timeout_s)))
    if table.breaker_failures:
        found.append(
            Breaker(
                BreakerSettings(
                    failures=table.breaker_failures,
                    share=table.breaker_share,
                    requests=table.breaker_requests,
                    window_s=table.breaker_window_s,
                    open_s=table.breaker_open_s,
                )
            )
        )
    return tuple(found)
