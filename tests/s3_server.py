"""A throw-away S3 server on loopback with an empty bucket, out of the environment of the engines (`moto[server]`)."""

from __future__ import annotations

import os
import re
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


def objects(address: str) -> list[str]:
    """Names of what is in the bucket."""
    with urllib.request.urlopen(f"{address}/{BUCKET}?list-type=2", timeout=LIMIT_S) as answer:
        return re.findall("<Key>(.*?)</Key>", answer.read().decode())


def empty(python: Path, address: str, keys: Mapping[str, str]) -> None:
    """Delete all that is in the bucket."""
    code = f"""
import boto3
bucket = boto3.resource("s3", endpoint_url={address!r}, region_name="us-east-1").Bucket({BUCKET!r})
bucket.objects.all().delete()
"""
    subprocess.run([str(python), "-c", code], env={**os.environ, **keys}, check=True, timeout=LIMIT_S)
    assert objects(address) == []
