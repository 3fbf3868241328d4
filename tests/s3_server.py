"""A throw-away S3 server on loopback with an empty bucket, out of the environment of the engines (`moto[server]`)."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from executors.ports import LOOPBACK, PortAllocator, PortNeed

BUCKET = "kvbucket"
LIMIT_S = 120


@contextmanager
def s3_server(python: Path, log: Path, keys: Mapping[str, str]) -> Iterator[str]:
    """Its address."""
    with closing(PortAllocator()) as allocator, log.open("wb") as output:
        port = allocator.take("s3", [PortNeed(name="http")])["http"]
        command = [str(python), "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **keys})
        address = f"http://{LOOPBACK}:{port}"
        try:
            while not _made(f"{address}/{BUCKET}"):
                assert server.poll() is None, log.read_text()
            yield address
        finally:
            server.terminate()
            server.wait(LIMIT_S)


def _made(bucket: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"), timeout=LIMIT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(address: str, method: str = "GET") -> str:
    """What the server answers."""
    with urllib.request.urlopen(urllib.request.Request(address, method=method), timeout=LIMIT_S) as answer:
        return str(answer.read().decode())
