"""A server takes new weights while it goes on answering: aiodist run -n 2 examples/refresh_weights.py

Rank 0 makes the weights, the other ranks serve with them.
"""

import asyncio

import numpy as np

import aiodist

SHAPES = [(1024, 1024), (1024,), (1024, 256)]
VERSIONS = 3


async def train(world: aiodist.Group) -> None:
    for version in range(1, VERSIONS + 1):
        await asyncio.sleep(0.3)  # a training step
        await world.broadcast_many([np.full(shape, version, np.float32) for shape in SHAPES])


class Server:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weights = [np.zeros(shape, np.float32) for shape in SHAPES]
        self.spare = [np.zeros(shape, np.float32) for shape in SHAPES]  # where the next ones arrive
        self.answers = 0

    async def answer(self) -> None:
        while True:
            await asyncio.sleep(0.001)  # until a request comes
            versions = {float(array.max()) for array in self.weights}
            assert len(versions) == 1, "old and new weights in one answer"
            self.answers += 1

    async def refresh(self, world: aiodist.Group) -> None:
        for _ in range(VERSIONS):
            await world.broadcast_many(None, out=self.spare, timeout=3600)  # training may take longer than the usual 300 s
            self.weights, self.spare = self.spare, self.weights
            print(f"rank {self.rank}: version {self.weights[0][0, 0]:.0f} after {self.answers} answers")


async def main() -> None:
    async with aiodist.init() as world:
        if world.rank == 0:
            await train(world)
            return
        server = Server(world.rank)
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(server.answer())
            await server.refresh(world)
            answering.cancel()


asyncio.run(main())
