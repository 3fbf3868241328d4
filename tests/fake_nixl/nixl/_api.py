"""The calls of NIXL that the helper makes, over plain system calls. FAKE_NIXL is a JSON table of what goes wrong:

`gate`: transfers stay in progress until this path exists; `state`: how they end then; `refusals`: how often a handle
cannot be released at first; `die`: the process ends at the first transfer; `no_backend`: none can be made.
"""

import ctypes
import json
import os
from pathlib import Path

WRONG = json.loads(os.environ.get("FAKE_NIXL", "{}"))


class Backend(Exception):
    """As nixlBackendError."""


def nixl_agent_config(enable_prog_thread, backends):
    assert enable_prog_thread
    assert backends == []


class Handle:
    def __init__(self, op, local, remote):
        self.op, self.local, self.remote = op, local, remote
        self.posted = False
        self.refusals = WRONG.get("refusals", 0)


class nixl_agent:  # noqa: N801
    def __init__(self, name, config):
        self.name = name
        self.objects = {}
        self.registered = 0
        self.handles = 0

    def get_plugin_list(self):
        return ["POSIX", "OBJ", "GDS"]

    def get_plugin_mem_types(self, name):
        return {"POSIX": ["DRAM_SEG", "FILE_SEG"], "OBJ": ["DRAM_SEG", "OBJ_SEG"]}.get(name, [])

    def create_backend(self, name, params):
        if WRONG.get("no_backend"):
            raise Backend("NIXL_ERR_BACKEND")
        if name == "OBJ":
            assert (params["access_key"], params["secret_key"]) == ("mine", "secret")
            self.folder = Path(params["bucket"])

    def register_memory(self, rows, kind, backends):
        if kind == "OBJ":
            self.objects |= {number: self.folder / key for _, _, number, key in rows}
        self.registered += 1
        return rows

    def deregister_memory(self, rows, backends):
        assert not self.handles, "a handle outlived its registration"
        self.registered -= 1

    def get_xfer_descs(self, rows, kind):
        return kind, rows

    def initialize_xfer(self, op, local, remote, peer, note, backends):
        assert peer == self.name
        self.handles += 1
        return Handle(op, local[1], remote)

    def transfer(self, handle):
        if WRONG.get("die"):
            os.kill(os.getpid(), 9)
        handle.posted = True
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle):
        assert handle.posted
        if "gate" in WRONG and not os.path.exists(WRONG["gate"]):
            return "PROC"
        if WRONG.get("state") == "raise":
            raise Backend("NIXL_ERR_REMOTE_DISCONNECT")
        if "state" not in WRONG:
            self._move(handle)
        return WRONG.get("state", "DONE")

    def release_xfer_handle(self, handle):
        if handle.refusals:
            handle.refusals -= 1
            raise Backend("NIXL_ERR_IN_PROG")
        self.handles -= 1

    def query_memory(self, rows, backend, mem_type):
        return [{} if (self.folder / key).exists() else None for _, _, _, key in rows]

    def _move(self, handle):
        kind, rows = handle.remote
        for (address, nbytes, _), (offset, _, where) in zip(handle.local, rows, strict=True):
            memory = (ctypes.c_char * nbytes).from_address(address)
            fd = where if kind == "FILE" else os.open(self.objects[where], os.O_RDWR | os.O_CREAT)
            if handle.op == "READ":
                os.preadv(fd, [memory], offset)
            else:
                os.pwrite(fd, memory, offset)
