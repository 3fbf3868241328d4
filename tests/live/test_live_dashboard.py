"""The dashboard in a real browser, headless: what it loads, what it shows, how it looks in the dark.

Chromium comes from the system (`apt-get install chromium chromium-driver`); without it these tests skip and say so.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frontend_builders import ANSWER, MODEL, Script, ScriptedBackend, Shadowed, beside, ids_of, keys, shadow

from executors.frontend.settings import Access, Settings

pytestmark = pytest.mark.live
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,1000",
)  # fmt: skip
WAIT_S = 20
MOCKS = """
[[workers]]
count = 2
model = "llama-3.1-8b"
gpu = "h100_sxm"
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if not all(found.values()):
        pytest.skip(f"SKIP dashboard: {found}; install with: apt-get install -y chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="SKIP dashboard: pip install 'dynatwin[test]'")
    options = webdriver.ChromeOptions()
    options.binary_location = found["chromium"]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found["chromedriver"]))
    try:
        yield driver
    finally:
        driver.quit()


def shown(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).innerText", selector))


def wait_for(browser: Any, selector: str, pattern: str) -> str:
    """The text of an element once it has `pattern`."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, WAIT_S, 0.1).until(
        lambda _: re.search(pattern, shown(browser, selector)), f"{selector}: no {pattern!r}"
    )
    return shown(browser, selector)


def visit(browser: Any, url: str) -> None:
    """Logs of earlier pages are forgotten."""
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(f"{url}/dashboard")


def asked_for(browser: Any) -> set[str]:
    """Addresses that the page asked for."""
    told = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [one["params"]["request"]["url"] for one in told if one["method"] == "Network.requestWillBeSent"]
    return {address for address in sent if not address.startswith("data:")}


def answer(url: str, max_tokens: int, model: str = MODEL) -> None:
    body = json.dumps({"model": model, "prompt": "one", "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=WAIT_S).read()


def test_it_shows_workers_and_what_happens_and_asks_nobody_else(browser: Any) -> None:
    with beside(ScriptedBackend(Script(says=ids_of(ANSWER)))) as url:
        visit(browser, url)
        assert "1 of 1" in wait_for(browser, "#tiles", "ready workers")
        row = wait_for(browser, "#workers", "w0")
        assert re.search(r"w0\s+mixed\s+ready\s+0\s+0\s+0\s+25 %\s+12", row), row
        assert "tokens 0" in shown(browser, "#charts")
        assert browser.execute_script("return document.querySelectorAll('#charts polyline[points*=\",\"]').length") == 0
        answer(url, 9)
        wait_for(browser, "#charts", "tokens [1-9]")
        wait_for(browser, "#decisions", "only one")
        assert browser.execute_script("return document.querySelectorAll('#charts polyline[points*=\",\"]').length") > 0
        assert all(address.startswith(f"{url}/dashboard") for address in asked_for(browser))
        assert browser.get_log("browser") == []


def test_predicted_stands_beside_measured(browser: Any) -> None:
    backend = Shadowed(shadow())
    with beside(backend) as url:
        visit(browser, url)
        assert re.search(r"predicted p50 130\b", wait_for(browser, "#charts", "predicted p50"))
        assert dashed(browser) == 2
        assert re.search(r"0\.80\s+TTFT, predicted / measured", shown(browser, "#tiles"))
        assert "has predicted 7 requests, and is 4 s behind now" in shown(browser, "#shadow")
        answer(url, 9)
        wait_for(browser, "#charts", "p50 [1-9]")
        backend.seen = shadow(up=False, why="<b>signal 9</b>")
        assert "<b>signal 9</b>" in wait_for(browser, "#shadow", "has ended")
        assert browser.get_log("browser") == []


def test_without_a_twin_the_page_does_not_speak_of_one(browser: Any) -> None:
    with beside() as url:
        visit(browser, url)
        wait_for(browser, "#tiles", "ready workers")
        assert (shown(browser, "#shadow"), dashed(browser)) == ("", 0)
        assert "predicted" not in shown(browser, "main").removesuffix(shown(browser, "footer"))


def test_a_served_cluster_draws_what_its_own_twin_predicts(browser: Any, tmp_path: Path) -> None:
    """`twin serve --shadow` on mock engines: both lines are there once something was answered."""
    file = tmp_path / "c.toml"
    file.write_text(MOCKS, encoding="utf-8")
    line = [sys.executable, "-m", "twin", "serve", "--config", str(file), "--port", "0", "--grace", "0", "-q"]
    process = subprocess.Popen([*line, "--shadow"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(json.loads(told)["ready"] for told in process.stdout if "ready" in json.loads(told))
        for _ in range(3):
            answer(url, 9, "llama-3.1-8b")
        visit(browser, url)
        wait_for(browser, "#shadow", "has predicted 3 requests")
        charts = wait_for(browser, "#charts", "predicted p50")
        assert charts.count("predicted p50") == 2
        assert dashed(browser) >= 2
        assert re.search(r"\d\.\d\d\s+TTFT, predicted / measured", shown(browser, "#tiles"))
        assert browser.get_log("browser") == []
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert process.returncode == 0


def dashed(browser: Any) -> int:
    """How many predicted lines are drawn."""
    return int(browser.execute_script("return document.querySelectorAll('#charts polyline.dashed').length"))


def test_what_a_worker_says_of_itself_is_never_markup(browser: Any) -> None:
    backend = ScriptedBackend()
    backend.gone("<img src=x onerror=console.error(1)> of tiny: 0 of 1")
    with beside(backend) as url:
        visit(browser, url)
        assert "<img" in wait_for(browser, "#missing", "0 of 1")
        assert shown(browser, "#state") == "not_ready"
        assert browser.get_log("browser") == []


def test_a_page_without_a_key_asks_for_one(browser: Any, tmp_path: Path) -> None:
    access = Access(keys_file=keys(tmp_path / "keys", "secret boss admin"))
    with beside(settings=Settings(access=access)) as url:
        visit(browser, url)
        wait_for(browser, "#state", "no data: 401")
        browser.find_element("name", "key").send_keys("secret\n")
        assert "1 of 1" in wait_for(browser, "#tiles", "ready workers")
        assert not browser.find_element("id", "key").is_displayed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(browser: Any, scheme: str) -> None:
    """WCAG 2.1, 1.4.3: contrast of at least 4.5."""
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    with beside() as url:
        visit(browser, url)
        wait_for(browser, "#tiles", "ready workers")
        paper = luminance(browser, ".tile", "background-color")
        assert (paper < 0.1) == (scheme == "dark")
        for selector in (".tile b", ".tile span", "#state", "th", "td", ".legend", "footer", "h2"):
            ink = luminance(browser, selector, "color")
            light, dark = max(ink, paper), min(ink, paper)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, selector


def luminance(browser: Any, selector: str, name: str) -> float:
    """Relative luminance as WCAG 2.1 defines it."""
    told = browser.execute_script(
        "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name
    )
    shares = [int(part) / 255 for part in re.findall(r"\d+", told)[:3]]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_sticks_out_at_the_side(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    with beside() as url:
        visit(browser, url)
        wait_for(browser, "#workers", "w0")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
