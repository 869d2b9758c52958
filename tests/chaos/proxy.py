"""TCP proxies between the fleet's processes and their servers, each of which can be told to fail.

A link is one process's way to one server: answers get lost after the server has done what was
asked, everything is slow, or the way is half open: neither side hears anything of the other, and
nobody says so. All of it ends when the link is told; a connection of which bytes were lost is
reset, as no TCP connection goes on with a gap in it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

READ_BYTES = 65_536
Address = Path | tuple[str, int]  # of a server: a Unix socket, or host and port


class Link:
    """One way to one server. Its faults are plain values, which any thread may set."""

    def __init__(self, name: str, server: Address, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.port = 0
        self.delay_s = 0.0  # of each piece, in each direction
        self.loses_answers = 0.0  # the share of answers that are lost, each with its connection
        self.chance = random.Random(name)
        self._server = server
        self._loop = loop
        self._half_open = False
        self._open: set[asyncio.StreamWriter] = set()
        self._gapped: set[asyncio.StreamWriter] = set()  # those that lost bytes while half open

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._reset, self._open)

    def half_open(self) -> None:
        """Swallow everything in both directions, until `whole`."""
        self._half_open = True

    def whole(self) -> None:
        """Carry everything again; what lost bytes meanwhile is reset."""
        self._half_open = False
        self.delay_s = self.loses_answers = 0.0
        self._loop.call_soon_threadsafe(self._reset, self._gapped)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        try:
            there_reader, there_writer = await self._connect()
        except OSError:
            _abort(writer)
            return
        both = {writer, there_writer}
        self._open |= both

        async def carry(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool
        ) -> None:
            while piece := await reader.read(READ_BYTES):
                if self._half_open:
                    self._gapped |= both
                    continue
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if answers and self.chance.random() < self.loses_answers:
                    return
                writer.write(piece)
                await writer.drain()

        to_server = asyncio.ensure_future(carry(reader, there_writer, answers=False))
        to_client = asyncio.ensure_future(carry(there_reader, writer, answers=True))
        try:
            await asyncio.wait({to_server, to_client}, return_when=asyncio.FIRST_COMPLETED)
            while self._half_open:  # nobody is told that the other side has gone
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass  # the proxy closes; asyncio's server takes its own handler's end for an error
        finally:
            for task in (to_server, to_client):
                task.cancel()
            await asyncio.gather(to_server, to_client, return_exceptions=True)
            self._open -= both
            self._gapped -= both
            for end in both:
                _abort(end)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._server, Path):
            return await asyncio.open_unix_connection(self._server)
        return await asyncio.open_connection(*self._server)

    def _reset(self, which: set[asyncio.StreamWriter]) -> None:
        for writer in tuple(which):
            _abort(writer)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset: whoever waits for an answer learns at once that none
    comes.
    """
    with suppress(OSError):
        connection = writer.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


class Proxies:
    """All links, carried by one event loop in a thread of its own."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="chaos-proxies", daemon=True
        )
        self._thread.start()

    def open(self, name: str, server: Address) -> Link:
        """Open a link on a free port of this machine."""
        link = Link(name, server, self._loop)

        async def listen() -> None:
            listening = await asyncio.start_server(link.serve, "127.0.0.1", 0, backlog=256)
            self._servers.append(listening)
            link.port = listening.sockets[0].getsockname()[1]

        self._run(listen)
        self.links[name] = link
        return link

    def close(self) -> None:
        """Close everything, and end the thread."""

        async def close() -> None:
            for server in self._servers:
                server.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self._run(close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, act: Callable[[], Awaitable[None]]) -> None:
        async def awaited() -> None:
            await act()

        asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()
