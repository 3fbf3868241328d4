"""The calls of NIXL, in the helper process that `executors.nixl` starts: one agent, one registered pool, its transfers.

Memory, files and their registrations live here from start to end and outlive every handle. A handle is let go before
its transfer counts as over: NIXL refuses to release one whose bytes may still move, and is asked again later.
Never imported by dynatwin's own process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

FILE_BACKENDS: Final = ("GDS_MT", "GDS", "POSIX")
"""Which one moves files, where several were made: the first."""


class Flight:
    """A transfer that was posted. `seconds` until NIXL said how it ended, `error` what it said (None: done)."""

    def __init__(self, request_id: int, handle: Any, held: Sequence[tuple[Any, str]]) -> None:
        self.request_id = request_id
        self.handle = handle
        self.held = held
        self.started_s = time.perf_counter()
        self.seconds: float | None = None
        self.error: str | None = None


class Agent:
    """`backends` are made with their parameters; the pool is registered with each that can reach host memory."""

    def __init__(self, name: str, pool_fd: int, pool_bytes: int, backends: Mapping[str, Mapping[str, str]]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=[]))
        self.backends = tuple(backends)
        self.file_backend = next((backend for backend in FILE_BACKENDS if backend in backends), None)
        for backend, params in backends.items():
            self._nixl.create_backend(backend, dict(params))
        self._pool = mmap.mmap(pool_fd, pool_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._pool))
        self._bytes = pool_bytes
        memory = [(self._base, pool_bytes, 0, "kv")]
        self._registered = [
            (self._nixl.register_memory(memory, "DRAM", backends=[backend]), backend) for backend in self.backends
        ]
        self._files: list[tuple[int, int]] = []
        self._peers: dict[str, tuple[int, int]] = {}
        self._objects = 0

    # ------------------------------------------------------------ what there is

    def plugins(self) -> dict[str, list[str]]:
        """Every plug-in and the memory it reaches; nothing for one that cannot be loaded here."""
        return {name: list(self._nixl.get_plugin_mem_types(name)) for name in self._nixl.get_plugin_list()}

    def add_file(self, path: str, nbytes: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, nbytes)
        backend = self._files_by()
        self._registered.append(
            (self._nixl.register_memory([(0, nbytes, fd, path)], "FILE", backends=[backend]), backend)
        )
        self._files.append((fd, nbytes))
        return len(self._files) - 1

    def card(self) -> tuple[bytes, int, int]:
        """What another agent needs to read and write our pool: metadata, where it begins, how long it is."""
        return self._nixl.get_agent_metadata(), self._base, self._bytes

    def meet(self, metadata: bytes, base: int, nbytes: int) -> str:
        """Take up another agent's card; its name."""
        told = self._nixl.add_remote_agent(metadata)
        name = told.decode() if isinstance(told, bytes) else str(told)
        self._nixl.make_connection(name)
        self._peers[name] = (base, nbytes)
        return name

    def forget(self, peer: str) -> None:
        """That agent is gone."""
        del self._peers[peer]
        self._nixl.remove_remote_agent(peer)

    def exist(self, keys: Sequence[str]) -> list[bool]:
        found = self._nixl.query_memory([(0, 1, 0, key) for key in keys], "OBJ", mem_type="OBJ")
        return [one is not None for one in found]

    def notes(self) -> list[tuple[str, bytes]]:
        """What other agents sent with their transfers since the last call."""
        return [(str(peer), note) for peer, notes in self._nixl.get_new_notifs().items() for note in notes]

    # ------------------------------------------------------------ transfers

    def post(self, request_id: int, op: str, kind: str, moves: Sequence[Sequence[Any]], note: str) -> Flight:
        """Begin a transfer; each of `moves` is (place in the pool, file or key or peer, place there, bytes)."""
        for at, _, _, nbytes in moves:
            if at < 0 or nbytes < 1 or at + nbytes > self._bytes:
                raise ValueError(f"{nbytes} bytes at {at} are not within a pool of {self._bytes}")
        local = self._nixl.get_xfer_descs([(self._base + at, nbytes, 0) for at, _, _, nbytes in moves], "DRAM")
        remote, peer, backend, held = getattr(self, f"_{kind}")(moves)
        try:
            handle = self._nixl.initialize_xfer(op, local, remote, peer, note.encode(), backends=[backend])
        except BaseException:
            self._deregister(held)
            raise
        flight = Flight(request_id, handle, held)
        self._see(flight, self._nixl.transfer)
        return flight

    def over(self, flight: Flight) -> bool:
        """Whether nothing touches the memory of this transfer any more; it is then released."""
        if flight.seconds is None:
            self._see(flight, self._nixl.check_xfer_state)
        return flight.seconds is not None and self._let_go(flight)

    def close(self) -> None:
        """Let go of everything, in the order that NIXL asks for."""
        for peer in list(self._peers):
            self.forget(peer)
        self._deregister(reversed(self._registered))
        for fd, _ in self._files:
            os.close(fd)

    # ------------------------------------------------------------ how each kind is described

    def _file(self, moves: Sequence[Sequence[Any]]) -> tuple[Any, str, str, list[tuple[Any, str]]]:
        for _, file, offset, nbytes in moves:
            if offset < 0 or offset + nbytes > self._files[file][1]:
                raise ValueError(f"{nbytes} bytes at {offset} are not within a file of {self._files[file][1]}")
        places = [(offset, nbytes, self._files[file][0]) for _, file, offset, nbytes in moves]
        return self._nixl.get_xfer_descs(places, "FILE"), self._nixl.name, self._files_by(), []

    def _object(self, moves: Sequence[Sequence[Any]]) -> tuple[Any, str, str, list[tuple[Any, str]]]:
        first = self._objects
        self._objects += len(moves)
        named = [(0, nbytes, first + n, key) for n, (_, key, _, nbytes) in enumerate(moves)]
        held = [(self._nixl.register_memory(named, "OBJ", backends=["OBJ"]), "OBJ")]
        places = [(0, nbytes, number) for _, nbytes, number, _ in named]
        return self._nixl.get_xfer_descs(places, "OBJ"), self._nixl.name, "OBJ", held

    def _peer(self, moves: Sequence[Sequence[Any]]) -> tuple[Any, str, str, list[tuple[Any, str]]]:
        (peer,) = {peer for _, peer, _, _ in moves}
        base, length = self._peers[peer]
        for _, _, offset, nbytes in moves:
            if offset < 0 or offset + nbytes > length:
                raise ValueError(f"{nbytes} bytes at {offset} are not within the pool of {peer}, {length}")
        places = [(base + offset, nbytes, 0) for _, _, offset, nbytes in moves]
        return self._nixl.get_xfer_descs(places, "DRAM"), peer, "UCX", []

    def _files_by(self) -> str:
        if self.file_backend is None:
            raise ValueError(f"files need one of {', '.join(FILE_BACKENDS)}; made were {', '.join(self.backends)}")
        return self.file_backend

    def _see(self, flight: Flight, ask: Callable[[Any], str]) -> None:
        """Note how it ended, if it did. After an error too, bytes may move until the handle can be released."""
        try:
            state = ask(flight.handle)
        except Exception as error:
            state = f"{type(error).__name__}: {error}"
        if state != "PROC":
            flight.seconds = time.perf_counter() - flight.started_s
            flight.error = None if state == "DONE" else state

    def _let_go(self, flight: Flight) -> bool:
        try:
            self._nixl.release_xfer_handle(flight.handle)
        except Exception:  # it still moves: the handle and its registrations stay
            return False
        self._deregister(flight.held)
        return True

    def _deregister(self, held: Any) -> None:
        for registration, backend in held:
            self._nixl.deregister_memory(registration, backends=[backend])
