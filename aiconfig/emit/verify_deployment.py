#!/usr/bin/env python3
"""Measures a running deployment with the bench.sh beside this file, and compares with predicted.json beside it.

Written as it is among the files of a deployment; it needs Python 3.9 and the client that bench.sh names, nothing else.
    verify.py [URL]     exit 0: all within the band; 3: something is not; 2: nothing could be measured
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
USUAL_URL = "http://127.0.0.1:8000"
HEALTH_TIMEOUT_S = 30


class NotMeasured(Exception):
    """Why there is nothing to compare."""


def main(url: str) -> int:
    """Measure and compare; the exit code."""
    try:
        predicted = json.loads((HERE / "predicted.json").read_text(encoding="utf-8"))
        return compare(predicted, measure(url, predicted["save"]))
    except (NotMeasured, OSError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2


def measure(url: str, save: list[str]) -> dict[str, Any]:
    """What the client measured at the address. `save` are its words before the file that it is to write."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=HEALTH_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise NotMeasured(f"nothing healthy at {url}/health ({error}); start the deployment first") from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        done = subprocess.run(["bash", HERE / "bench.sh", url, *save, path], check=False)
        if done.returncode:
            raise NotMeasured(f"bench.sh ended with {done.returncode}")
        if not path.exists():
            raise NotMeasured("bench.sh wrote no figures")
        return told(path.read_text(encoding="utf-8"))


def told(text: str) -> dict[str, Any]:
    """The client's figures: its file is one JSON document, or has a line for each run, of which the last counts."""
    lines = [line for line in text.splitlines() if line.strip()]
    whole = lines[-1] if len(lines) > 1 and lines[-1].startswith("{") else text
    try:
        figures = json.loads(whole)
    except ValueError:
        figures = None
    if not isinstance(figures, dict):
        raise NotMeasured("the client's file is no JSON object")
    return figures


def compare(predicted: dict[str, Any], measured: dict[str, Any]) -> int:
    """Print each figure beside its prediction; 0 if all that were measured are within their bands, else 3. A measured
    time may have the path outside the engine in it, which the prediction has not.

    Raises NotMeasured if requests failed (the others then met less load than was predicted) or nothing was measured.
    """
    finished, sent = measured.get("completed", predicted["requests"]), predicted["requests"]
    if finished < sent:
        raise NotMeasured(f"{sent - finished} of {sent} requests failed; see bench.sh's own output")
    compared = missed = 0
    print(f"{'':28}{'predicted':>12}{'measured':>12}{'error':>9}{'band':>8}")
    for row in predicted["figures"]:
        value = measured.get(row["key"])
        if not isinstance(value, (int, float)) or value <= 0:
            print(f"{row['name']:28}{row['value']:12.4g}{'not told':>12}")
            continue
        error = row["value"] / value - 1.0
        inside = error <= row["band"] and (row["value"] + row["outside"]) / value - 1.0 >= -row["band"]
        compared += 1
        missed += not inside
        shown = f"{row['name']:28}{row['value']:12.4g}{value:12.4g}{error:+9.1%}{row['band']:8.0%}"
        print(shown + ("" if inside else "  outside"))
    if not compared:
        raise NotMeasured("the client's file has none of the predicted figures")
    print(f"{compared - missed} of {compared} figures within the band of the prediction")
    return 3 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else USUAL_URL))
