"""The host as a device: events that stand for futures, and its one stream."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiodist
from aiodist.devices.base import Device, Event
from aiodist.devices.cpu import CpuDevice


async def test_the_event_of_a_future_is_its_completion() -> None:
    async with aiodist.local_world(2, timeout=30) as (first, second):
        future = first.all_reduce(np.arange(3.0))
        event: Event = future.event
        assert not event.done()
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(event.wait, 0.05)
        await second.all_reduce(np.arange(3.0))
        await asyncio.to_thread(event.wait, 20)
        assert event.done()
        np.testing.assert_array_equal(await future, 2 * np.arange(3.0))


async def test_the_stream_of_the_host_is_ordered_after_an_event_by_waiting() -> None:
    device: Device = CpuDevice()
    assert device.name == "cpu"
    async with aiodist.local_world(2, timeout=30) as (first, second):
        future = first.broadcast(np.arange(100_000))
        second.broadcast(None)
        await asyncio.to_thread(device.current_stream().wait_event, future.event)
        assert future.done()


async def test_the_event_of_a_failed_call_raises_its_error() -> None:
    async with aiodist.local_world(2, timeout=30) as (first, second):
        future = first.barrier()
        second.abort("enough")
        with pytest.raises(aiodist.CommunicationError, match="enough"):
            await asyncio.to_thread(future.event.wait, 20)
