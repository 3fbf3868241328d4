"""Who may speak to a router: whoever has its key, once, now, and to it alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.peer_seal import MARK, Refused, Seal, read_key
from executors.peering import peering
from policies.errors import ConfigError

KEY = b"0123456789abcdef"
US, THEM = 2**62 + 1, 7


def test_what_is_sealed_for_us_opens_once() -> None:
    us, them = Seal(KEY, US), Seal(KEY, THEM)
    message = them.close(b"news", US)
    assert us.open(message) == (b"news", THEM, True)
    with pytest.raises(Refused, match="it was here before"):
        us.open(message)
    earlier, later = them.close(b"2", US), them.close(b"3", US)
    assert us.open(later).text == b"3"
    with pytest.raises(Refused, match="it was here before"):
        us.open(earlier)  # order between two routers is kept, so what is behind was recorded


def test_who_does_not_know_us_is_heard_and_not_for_us() -> None:
    assert Seal(KEY, US).open(Seal(KEY, THEM).close(b"who?", None)) == (b"who?", THEM, False)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Seal(KEY, THEM).close(b"news", US + 1), "for another router"),
        (Seal(b"another key, as long", THEM).close(b"news", US), "sealed with another key"),
        (b"plain", "it is not sealed"),
        (MARK, "it is not sealed"),
    ],
)
def test_anything_else_is_refused(message: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        Seal(KEY, US).open(message)


def test_what_was_recorded_before_a_restart_is_worth_nothing_after_it() -> None:
    message = Seal(KEY, THEM).close(b"news", US)
    Seal(KEY, US).open(message)
    with pytest.raises(Refused, match="one that was here before"):
        Seal(KEY, US + 5).open(message)


@given(st.integers(min_value=0), st.integers(1, 255))
def test_no_bit_of_a_message_can_be_changed(at: int, flip: int) -> None:
    message = bytearray(Seal(KEY, THEM).close(b"some news", US))
    message[at % len(message)] ^= flip
    with pytest.raises(Refused):
        Seal(KEY, US).open(bytes(message))


def test_without_a_key_nothing_is_sealed_and_nothing_sealed_is_taken() -> None:
    plain = Seal(None, US)
    assert plain.close(b"news", THEM) == b"news"
    assert plain.open(b"news") == (b"news", None, True)
    with pytest.raises(Refused, match="no --peer-key here"):
        plain.open(Seal(KEY, THEM).close(b"news", US))


def test_a_key_comes_from_a_file_that_not_everybody_may_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"--peer-key .*key: cannot be read: No such file"):
        read_key(file)
    file.write_bytes(b"short\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="5 bytes, and a key needs 16 or more; make one with: openssl rand -hex 32"):
        read_key(file)
    file.write_bytes(KEY + b"\n")
    assert read_key(file) == KEY
    assert peering("/shared", "10.0.0.1:0", str(file)).key == KEY
    assert peering("/shared", "10.0.0.1:0", "none").key is None
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="everybody on this host may read it; chmod o-r"):
        read_key(file)
