"""How fast blocks of KV move on this host: plain system calls, and NIXL where there is an environment with it.

Each way is used `--repeats` times for all blocks at once, and the fastest is printed. Files are read and written
through the page cache. Objects are measured only against an S3 server that is up (`--s3 ADDRESS/BUCKET`, keys from the
usual variables).

    python benchmarks/kv_moves.py --nixl "$DYNATWIN_NIXL_PYTHON"
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from executors.nixl import NixlAgent, NixlSettings
from executors.plain_mover import PlainMover
from executors.pool import HostPool
from executors.transfers import FileMove, Mover, Moves, ObjectMove, Op, PeerMove, TransferDone

LIMIT_S = 300.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--mib", type=float, default=1.0, help="of one block")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where the file goes; default: a temporary folder")
    parser.add_argument("--nixl", type=Path, help="interpreter of the environment with NIXL")
    parser.add_argument("--s3", help="http://host:port/bucket")
    return parser.parse_args()


async def measure(name: str, mover: Mover, moves: Moves, repeats: int) -> None:
    """Print the best rate of each direction in GB/s."""
    rates = []
    for op in (Op.WRITE, Op.READ):
        ends = [await mover.move(op, moves).end(LIMIT_S) for _ in range(repeats)]
        failed = next((end for end in ends if not isinstance(end, TransferDone)), None)
        if failed is not None:
            raise SystemExit(f"{name}: {failed}")
        rates.append(max(end.bytes / end.seconds for end in ends) / 1e9)
    print(f"{name:<8} write {rates[0]:7.3f} GB/s  read {rates[1]:7.3f} GB/s")


@asynccontextmanager
async def nixl(args: argparse.Namespace, pool: HostPool, name: str, folder: Path) -> AsyncIterator[NixlAgent]:
    backends: dict[str, dict[str, str]] = {"UCX": {}, "POSIX": {}}
    if args.s3:
        address, _, bucket = args.s3.rpartition("/")
        backends["OBJ"] = {
            "endpoint_override": address, "bucket": bucket, "scheme": address.partition(":")[0],
            "region": "us-east-1", "use_virtual_addressing": "false",
        }  # fmt: skip
    agent = await NixlAgent.start(NixlSettings(python=args.nixl, name=name, backends=backends), pool, folder / name)
    try:
        yield agent
    finally:
        await agent.close()


async def run(args: argparse.Namespace, folder: Path) -> None:
    nbytes = int(args.mib * (1 << 20))
    pool, other = HostPool(args.blocks, nbytes), HostPool(args.blocks, nbytes)
    places = range(0, args.blocks * nbytes, nbytes)

    async def to_file(name: str, mover: Mover) -> None:
        file = await mover.add_file(folder / f"{name}.kv", args.blocks * nbytes)
        await measure(name, mover, [FileMove(at, file, at, nbytes) for at in places], args.repeats)

    plain = PlainMover(pool)
    await to_file("plain", plain)
    await plain.close()
    if args.nixl:
        async with AsyncExitStack() as stack:
            one, two = [await stack.enter_async_context(nixl(args, memory, name, folder))
                        for memory, name in ((pool, "one"), (other, "two"))]  # fmt: skip
            await to_file("POSIX", one)
            peer = await one.meet(await two.card())
            await measure("UCX", one, [PeerMove(at, peer, at, nbytes) for at in places], args.repeats)
            if args.s3:
                await measure("OBJ", one, [ObjectMove(at, f"kv-{at}", nbytes) for at in places], args.repeats)


def main() -> None:
    args = parse()
    with TemporaryDirectory(dir=args.folder) as folder:
        asyncio.run(run(args, Path(folder)))


if __name__ == "__main__":
    main()
