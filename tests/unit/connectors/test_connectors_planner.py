"""The planner itself in a live world with a connector: it orders, waits for the end of what it ordered, and goes on."""

from __future__ import annotations

from pathlib import Path

from connector_builders import Scaled, scaled

from executors.connectors.settings import ConnectorSettings, VirtualSettings
from executors.connectors.virtual_store import VirtualDecision, complete, open_store, read_decision
from policies.cluster.ids import Role
from policies.cluster.scaling import ScaleDone
from policies.cluster.traffic import ForwardPass, PassLoad
from policies.planner.planner import Planner
from policies.planner.settings import PlannerSettings, PoolSettings

POOL = PoolSettings(role=Role.DECODE, group="decode", max_kv_tokens=1000)


def test_a_planner_only_observes_until_its_decision_is_so(tmp_path: Path) -> None:
    """KV twice as full as it can be: one worker more a tick, if nothing stood against it."""

    async def main(world: Scaled) -> None:
        store = open_store(str(tmp_path))
        await world.connect(ConnectorSettings(connector="virtual", virtual=VirtualSettings(store=str(tmp_path))))
        await world.come("decode")
        counter = 0

        async def ticks(n: int, past: VirtualDecision | None) -> VirtualDecision | None:
            """The decision after n ticks, or as soon as it is another one than that which is past."""
            nonlocal counter
            for _ in range(n):
                if (await read_decision(store))[0] != past:
                    break
                counter += 1
                for worker_id in world.world.fleet.workers:
                    load = PassLoad(num_decode_requests=10, sum_decode_kv_tokens=2000)
                    world.world.post(
                        ForwardPass(
                            at_s=world.clock.now(),
                            worker_id=worker_id,
                            counter=counter,
                            wall_time_s=0.01,
                            scheduled=load,
                        )
                    )
                await world.clock.step()
            await world.clock.waiting()
            return (await read_decision(store))[0]

        one = VirtualDecision(decision_id=1, num_prefill=0, num_decode=2)
        assert await ticks(100, None) == one
        assert await ticks(12, one) == one, "load is as high, and nothing is ordered"
        await world.come("decode")
        await complete(store, 1)
        two = await ticks(100, one)
        assert [type(end) for end in world.ends()] == [ScaleDone]
        assert two == VirtualDecision(decision_id=2, num_prefill=0, num_decode=3)

    settings = PlannerSettings(pools=(POOL,), mode="decode", confirm=True)
    scaled(main, [Planner(settings)])
