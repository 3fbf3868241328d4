"""The helper process of `executors.nixl`: answers messages on a socket, and looks after all transfers from one loop.

It runs in the environment that has NIXL and imports nothing else that is not of the standard library. It ends when the
other side goes, by os._exit: a process that made a UCX agent crashes in a bundled library when the interpreter ends.
"""

from __future__ import annotations

import base64
import os
import select
import socket
import sys
import traceback
from typing import Any, Final

from executors.framing import Message, Unpacker, pack
from executors.nixl_ops import Agent, Flight

SHORTEST_S, LONGEST_S = 50e-6, 2e-3
"""How long to wait between two looks at what is under way: doubled from the first to the second."""
NOTES_S: Final = 5e-3
"""How often to look for notes of other agents, where there are any."""


class Helper:
    """One connection and its agent, which the first message makes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unpacker = Unpacker()
        self._agent: Agent | None = None
        self._flights: list[Flight] = []
        self._meetings = False

    def serve(self) -> None:
        """Until the other side is gone, or asks to stop."""
        wait_s = SHORTEST_S
        while True:
            readable, _, _ = select.select([self._connection], [], [], self._patience(wait_s))
            if readable:
                wait_s = SHORTEST_S
                more = self._connection.recv(1 << 16)
                if not more or not all(self._handle(message) for message in self._unpacker.feed(more)):
                    return
            wait_s = SHORTEST_S if self._look() else min(2 * wait_s, LONGEST_S)

    def _patience(self, wait_s: float) -> float | None:
        if self._flights:
            return wait_s
        return NOTES_S if self._meetings else None

    def _handle(self, message: Message) -> bool:
        """Whether to go on."""
        if message["do"] == "stop":
            if self._agent is not None and not self._flights:
                self._agent.close()
            self._tell({"id": message["id"]})
            return False
        try:
            answer = self._do(message)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        if answer is not None:
            self._tell({"id": message["id"], **answer})
        return True

    def _do(self, message: Message) -> dict[str, Any] | None:
        """The answer; None where it comes later."""
        if message["do"] == "start":
            self._agent = Agent(message["name"], message["pool_fd"], message["pool_bytes"], _with_keys(message))
            return {"files": self._agent.file_backend, "plugins": self._agent.plugins()}
        agent = self._agent
        assert agent is not None, "the first message is start"
        match message["do"]:
            case "file":
                return {"file": agent.add_file(message["path"], message["bytes"])}
            case "card":
                metadata, base, nbytes = agent.card()
                self._meetings = True
                return {"metadata": base64.b64encode(metadata).decode(), "base": base, "bytes": nbytes}
            case "meet":
                self._meetings = True
                metadata = base64.b64decode(message["metadata"])
                return {"peer": agent.meet(metadata, message["base"], message["bytes"])}
            case "forget":
                agent.forget(message["peer"])
                return {}
            case "exist":
                return {"there": agent.exist(message["keys"])}
            case "move":
                flight = agent.post(
                    message["id"], message["op"], message["kind"], message["moves"], message.get("note", "")
                )
                self._flights.append(flight)
                return None
            case other:
                raise ValueError(f"unknown message {other!r}")

    def _look(self) -> bool:
        """See who is over and tell it; whether anybody was."""
        agent = self._agent
        if agent is None:
            return False
        over = [flight for flight in self._flights if agent.over(flight)]
        for flight in over:
            self._flights.remove(flight)
            told: dict[str, Any] = {"id": flight.request_id, "seconds": flight.seconds}
            self._tell(told if flight.error is None else {**told, "error": flight.error})
        if self._meetings:
            for peer, note in agent.notes():
                self._tell({"note": note.decode(errors="replace"), "from": peer})
        return bool(over)

    def _tell(self, message: dict[str, Any]) -> None:
        self._connection.sendall(pack(message))


def _with_keys(message: Message) -> dict[str, dict[str, str]]:
    """Parameters of backends; the keys of an object store come from our environment, never over the socket."""
    backends = {name: dict(params) for name, params in message["backends"].items()}
    if "OBJ" in backends:
        variables = {"access_key": "AWS_ACCESS_KEY_ID", "secret_key": "AWS_SECRET_ACCESS_KEY"}
        keys = {param: os.environ[name] for param, name in variables.items() if name in os.environ}
        backends["OBJ"] = {**keys, **backends["OBJ"]}
    return backends


def main(arguments: list[str]) -> None:
    """`arguments`: the number of an inherited socket."""
    status = 1
    try:
        Helper(socket.socket(fileno=int(arguments[0]))).serve()
        status = 0
    except ConnectionError:
        status = 0  # the other side is gone
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
