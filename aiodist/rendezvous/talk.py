"""A member's requests and their answers, over as many connections to the server as it takes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

import aiohttp
import msgspec

from aiodist.errors import RendezvousError
from aiodist.rendezvous.link import Trust, open_link
from aiodist.rendezvous.messages import (
    Add,
    Answer,
    Barrier,
    Cancel,
    Compare,
    Delete,
    Done,
    Formed,
    Gather,
    Get,
    Join,
    Leave,
    List,
    MalformedMessageError,
    Notices,
    Number,
    Progress,
    Refused,
    Request,
    Resume,
    Roster,
    Seen,
    Set,
    Value,
    Values,
    Welcome,
    decode_answer,
    encode,
)
from aiodist.rendezvous.pulse import Heart
from aiodist.rendezvous.sockets import Address, numeric_host

__all__ = ["Asked", "Talk"]

Asked: TypeAlias = Add | Barrier | Compare | Delete | Gather | Get | Join | Leave | List | Set

_GRACE_S: Final = 5.0
_CLOSE_S: Final = 2.0
_DOWN_S: Final = 30.0
"""So long a lost connection is waited for; what is asked while it has been lost for longer than that waits `_GRACE_S`."""
_TRY_S: Final = 5.0
_PAUSES_S: Final = (0.05, 2.0)
_STEADY_S: Final = 1.0
_UNSEEN: Final = 16
_UNSEEN_NBYTES: Final = 1 << 16


@dataclass(slots=True)
class _Open:
    """A request that was not answered yet, since when."""

    request: Asked
    answer: asyncio.Future[Answer]
    since: float
    down: float | None


class Talk:
    """Requests of one member, each answered once, though connections break and servers start again.

    A connection that is lost is opened again, at growing and random intervals, until the talk is closed or the server does not know
    the member any more. Requests that were not answered are then sent again under their numbers, by which the server knows them.

    Args:
        address: The server's.
        job: The member's job.
        member: Its id.
        token: The server's bearer token.
        trust: What the server is checked by where it speaks TLS.
        timeout: Seconds that the first connection may take, and what has no other timeout.
        hear: Called with what comes unasked.
        progress: Called every second, while there is a connection, for what heartbeats tell.
    """

    def __init__(
        self,
        address: Address,
        job: str,
        member: str,
        token: str | None,
        trust: Trust,
        timeout: float,
        hear: Callable[[Notices | Roster], None],
        progress: Callable[[], Sequence[Progress]] | None,
    ) -> None:
        self.welcome: Welcome | None = None
        self.local_address = ""
        """This side's of the latest connection, as a number; empty before the first."""
        self.ended: str | None = None
        """Why there are no answers any more."""
        self._address = address
        self._job = job
        self._member = member
        self._token = token
        self._trust = trust
        self._timeout = timeout
        self._hear = hear
        self._heart = Heart(progress)
        self._task: asyncio.Task[None] | None = None
        self._outbox: asyncio.Queue[Request | None] = asyncio.Queue()
        self._open: dict[int, _Open] = {}
        self._numbers = 0
        self._generation = 0
        """Of the world whose member this is, 0 for none."""
        self._resume = 0
        """The number of the last request to take the place up again."""
        self._up = False
        self._changed_at = 0.0
        """When the connection was made or lost last."""
        self._timer: asyncio.TimerHandle | None = None
        self._cause = "it ended"
        self._unseen: list[int] = []
        self._unseen_nbytes = 0

    def number(self) -> int:
        """Return a number for a request."""
        self._numbers += 1
        return self._numbers

    async def connect(self) -> None:
        """Connect to the server.

        Raises:
            RendezvousError: nobody answered in time, what answered is no rendezvous, or it refused us; the text names the address.
        """
        if self._task is not None:
            raise RuntimeError("the client was connected before; make another one")
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready), name=f"aiodist rendezvous {self._job}")
        try:
            await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if ready.done():
            return
        if self._task.cancelled():
            raise RendezvousError(f"the client was closed before the rendezvous at {self._address} answered")
        self._task.result()

    async def aclose(self) -> None:
        """End the connection, within 2 s."""
        if self.ended is None:
            self.ended = "the client was closed"
        if self._task is None:
            return
        if not self._up:
            self._task.cancel()
        self._outbox.put_nowait(None)
        await asyncio.wait((self._task,), timeout=_CLOSE_S)
        self._task.cancel()
        await asyncio.wait((self._task,), timeout=_CLOSE_S)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()  # Whoever connected was told, or was cancelled.

    async def ask(self, request: Asked, wait: float = 0.0, *, down: float | None = None) -> Answer:
        """Send a request and wait for its answer.

        The server is the judge of ``wait``, this side allows it some time more. While there is no connection nobody judges: then the
        request may take ``wait`` seconds in all, if the connection is not lost for more than `_DOWN_S`; or ``down`` seconds, however
        long it is lost.

        Raises:
            RendezvousError: there was no answer; whether the request was carried out is open.
        """
        if self.ended is not None or self.welcome is None:
            raise RendezvousError(self.ended or f"the client is not connected to the rendezvous at {self._address}")
        loop = asyncio.get_running_loop()
        one = _Open(request, loop.create_future(), loop.time(), down)
        self._open[request.id] = one
        self._outbox.put_nowait(request)
        try:
            await self._settle(one, wait)
            return one.answer.result()
        except BaseException:
            if not one.answer.done():
                self._outbox.put_nowait(Cancel(request.id))
            raise
        finally:
            del self._open[request.id]

    async def _settle(self, one: _Open, wait: float) -> None:
        """Wait for an answer while there is hope for one."""
        loop = asyncio.get_running_loop()
        while not one.answer.done():
            now = loop.time()
            judged = max(one.since + wait, self._changed_at) + _GRACE_S
            alone = one.since + ((wait or self._timeout) if one.down is None else one.down)
            if not self._up and one.down is None:
                alone = min(alone, max(self._changed_at + _DOWN_S, one.since + _GRACE_S))
            if now >= (judged if self._up else alone):
                raise RendezvousError(self._silence(now - one.since))
            await asyncio.wait((one.answer,), timeout=min(end for end in (judged, alone) if end > now) - now)

    def _give_up(self) -> None:
        """The connection has been lost for too long."""
        now = asyncio.get_running_loop().time()
        for one in self._open.values():
            if one.down is None and now >= one.since + _GRACE_S and not one.answer.done():
                one.answer.set_exception(RendezvousError(self._silence(now - one.since)))

    def _silence(self, waited: float) -> str:
        if self._up:
            return f"the rendezvous at {self._address} gave no answer within {waited:.3g} s"
        ago = asyncio.get_running_loop().time() - self._changed_at
        return f"the connection to the rendezvous at {self._address} was lost {ago:.3g} s ago and is not back: {self._cause}"

    # -- the connection's task ---------------------------------------------------------------------------------------------------

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Own the connection, from the first try to the end."""
        loop = asyncio.get_running_loop()
        within, pause = self._timeout, _PAUSES_S[0]
        try:
            while self.ended is None:
                began = loop.time()
                try:
                    async with open_link(self._address, self._token, within, self._trust) as (ws, welcome):
                        began = loop.time()
                        self.welcome = welcome
                        self.local_address = numeric_host(ws.get_extra_info("sockname"))
                        if not ready.done():
                            ready.set_result(None)
                        await self._converse(ws)
                except RendezvousError as error:
                    if not ready.done():
                        raise
                    self._cause = str(error)
                within, pause = _TRY_S, _PAUSES_S[0] if loop.time() - began > _STEADY_S else min(2 * pause, _PAUSES_S[1])
                if self.ended is None:
                    await asyncio.sleep(pause * random.random())
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._end("the client was closed")

    async def _converse(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        """Send and read until the connection ends."""
        self._begin()
        reader = asyncio.create_task(self._read(ws))
        outbox = self._outbox
        reader.add_done_callback(lambda _: outbox.put_nowait(None))
        beats = asyncio.create_task(self._heart.run(outbox.put_nowait))  # behind what takes the place up again
        try:
            with suppress(ConnectionError):  # The reader sees it too.
                while (request := await outbox.get()) is not None:
                    await ws.send_bytes(encode(request))
        finally:
            self._turn(up=False)
            self._cause = "it ended"
            reader.cancel()
            beats.cancel()
            await asyncio.wait((reader, beats))

    def _begin(self) -> None:
        """Over a new connection: take up the place, and send again what was not answered."""
        now = asyncio.get_running_loop().time()
        self._turn(up=True)
        self._outbox = asyncio.Queue()
        self._unseen, self._unseen_nbytes = [], 0
        unanswered = {number: one for number, one in self._open.items() if not one.answer.done()}
        if self._generation:
            self._resume = self.number()
            self._outbox.put_nowait(Resume(self._resume, self._job, self._member, self._generation, list(unanswered)))
        for one in unanswered.values():
            again = one.request
            if isinstance(again, Join | Get | Barrier | Gather):
                again = msgspec.structs.replace(again, spent=min(max(0.0, now - one.since), 1e9))
            self._outbox.put_nowait(again)

    def _turn(self, *, up: bool) -> None:
        loop = asyncio.get_running_loop()
        self._up = up
        self._changed_at = loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if up else loop.call_later(_DOWN_S, self._give_up)

    def _end(self, why: str) -> None:
        self.ended = self.ended or why
        for one in self._open.values():
            if not one.answer.done():
                one.answer.set_exception(RendezvousError(self.ended))

    async def _read(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        async for frame in ws:
            if frame.type is not aiohttp.WSMsgType.BINARY:
                continue
            try:
                answer = decode_answer(frame.data)
            except MalformedMessageError as error:
                self._end(f"the rendezvous at {self._address} sent what is no answer: {error}")
                return
            self._take(answer, len(frame.data))
            if self.ended is not None:
                return

    def _take(self, answer: Answer, nbytes: int) -> None:
        match answer:
            case Notices() | Roster():
                self._hear(answer)
            case Refused(id=0):
                self._end(f"the rendezvous at {self._address} ended the connection: {answer.text}")
            case Refused(id=self._resume):
                self._unknown(answer)
            case Welcome() | Done(id=self._resume):
                pass
            case _:
                self._answered(answer, nbytes)

    def _answered(self, answer: Answer, nbytes: int) -> None:
        assert not isinstance(answer, Welcome | Roster | Notices)  # _take() looked
        one = self._open.get(answer.id)
        if one is not None and not one.answer.done():
            one.answer.set_result(answer)
            if isinstance(answer, Formed):
                self._generation = answer.generation
                self._outbox.put_nowait(self._heart.beat())  # Those before it were no member's: this one starts the server's watch.
            elif isinstance(one.request, Leave):
                self._generation = 0
        if isinstance(answer, Done | Number | Value | Values):
            self._unseen.append(answer.id)
            self._unseen_nbytes += nbytes
            if len(self._unseen) >= _UNSEEN or self._unseen_nbytes >= _UNSEEN_NBYTES:
                self._outbox.put_nowait(Seen(self._unseen))
                self._unseen, self._unseen_nbytes = [], 0

    def _unknown(self, refusal: Refused) -> None:
        """The server does not give the place back: this member asks for nothing more."""
        for one in self._open.values():
            if isinstance(one.request, Leave) and not one.answer.done():
                one.answer.set_result(Done(one.request.id))  # It had left.
        self._end(f"the rendezvous at {self._address} does not take this member up again: {refusal.text}")
