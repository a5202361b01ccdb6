"""Run it alone (a world of one), or on four ranks: aiodist run -n 4 examples/hello.py"""

import asyncio

import numpy as np

import aiodist


async def main() -> None:
    async with aiodist.init() as world:
        x = np.full(4, world.rank, np.float32)
        total = await world.all_reduce(x)  # an array like x, the same bits on every rank
        future = world.all_reduce(x, op="max")  # starts now; a TensorFuture
        ...  # compute
        largest = await future
        print(f"rank {world.rank} of {world.size}: sum {total[0]}, largest {largest[0]}")


asyncio.run(main())
