"""Who asks: API keys with names and roles, and how often a key may ask.

Keys are kept as SHA-256 and compared in constant time; none is ever logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from executors.frontend.errors import AUTHENTICATION, FORBIDDEN, RATE_LIMIT, ApiError
from executors.frontend.settings import Access
from policies.errors import ConfigError
from policies.frozen import frozen


class Role(IntEnum):
    """Each may do what those below it may."""

    USER = 1
    TRUSTED = 2
    ADMIN = 3


@frozen
class Principal:
    """`name` None: a client without a key."""

    name: str | None
    role: Role


class Keys:
    """The keys of a file. Without any, everybody is `anonymous`."""

    def __init__(self, keys: dict[bytes, Principal], anonymous: Role) -> None:
        self._keys = keys
        self.anonymous = Principal(name=None, role=anonymous)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @classmethod
    def read(cls, path: Path | None, anonymous: Role) -> Keys:
        """One key a line, then name and role if wanted; `#` begins a comment. Raises ConfigError, never with a key."""
        if path is None:
            return cls({}, anonymous)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; name a file of API keys") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not a text in UTF-8; name a file of API keys") from None
        keys: dict[bytes, Principal] = {}
        for row, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if words:
                keys[_digest(words[0])] = _principal(f"{path}:{row}", words[1:], row)
        if not keys:
            raise ConfigError(f"{path} has no key; write one a line, or leave keys_file out")
        return cls(keys, anonymous)

    def who(self, authorization: str | None, api_key: str | None) -> Principal:
        """The client with these two headers. Raises ApiError where a key is missing or wrong."""
        if not self._keys:
            return self.anonymous
        given = api_key
        if authorization is not None:
            scheme, _, token = authorization.partition(" ")
            if scheme.lower() != "bearer":
                raise ApiError(AUTHENTICATION, "the Authorization header must say Bearer and an API key")
            given = token.strip()
        if not given:
            raise ApiError(AUTHENTICATION, "an API key is missing; send it as Authorization: Bearer")
        asked, found = _digest(given), None
        for digest, principal in self._keys.items():
            if hmac.compare_digest(digest, asked):
                found = principal
        if found is None:
            raise ApiError(AUTHENTICATION, "the API key is not known here")
        return found


def demand(principal: Principal, role: Role) -> None:
    """Raises ApiError unless `principal` has at least `role`."""
    if principal.role < role:
        raise ApiError(FORBIDDEN, f"only for API keys with the role {role.name.lower()}", code="permission_denied")


class RateLimit:
    """Buckets of requests and of tokens, one pair for each key; `now` gives seconds."""

    def __init__(self, access: Access, now: Callable[[], float]) -> None:
        self._requests_per_s = access.requests_per_s
        self._tokens_per_s = None if access.tokens_per_min is None else access.tokens_per_min / 60
        self._now = now
        self._requests: dict[str | None, _Bucket] = {}
        self._tokens: dict[str | None, _Bucket] = {}

    def request(self, principal: Principal) -> None:
        """Count one. Raises ApiError where the key has no request or no token left."""
        if self._tokens_per_s is not None:
            self._bucket(self._tokens, principal, self._tokens_per_s, 60 * self._tokens_per_s).take(self._now(), 0)
        if self._requests_per_s is not None:
            most = max(1.0, self._requests_per_s)
            self._bucket(self._requests, principal, self._requests_per_s, most).take(self._now(), 1)

    def tokens(self, principal: Principal, count: int) -> None:
        """Charge what was used; a key may be in debt until its bucket has filled again."""
        if self._tokens_per_s is not None:
            bucket = self._bucket(self._tokens, principal, self._tokens_per_s, 60 * self._tokens_per_s)
            bucket.charge(self._now(), count)

    def _bucket(self, buckets: dict[str | None, _Bucket], who: Principal, per_s: float, most: float) -> _Bucket:
        if who.name not in buckets:
            buckets[who.name] = _Bucket(per_s, most, self._now())
        return buckets[who.name]


class _Bucket:
    def __init__(self, per_s: float, most: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = most
        self._level = most
        self._at_s = now_s

    def charge(self, now_s: float, count: float) -> None:
        self._level = min(self._most, self._level + (now_s - self._at_s) * self._per_s) - count
        self._at_s = now_s

    def take(self, now_s: float, count: float) -> None:
        self.charge(now_s, 0)
        lacking = max(count, 1e-9) - self._level
        if lacking > 0:
            raise ApiError(RATE_LIMIT, "the rate limit of this API key is reached", retry_after_s=lacking / self._per_s)
        self._level -= count


def _principal(where: str, words: list[str], row: int) -> Principal:
    roles = {role.name.lower(): role for role in Role}
    if len(words) == 1 and words[0] in roles:
        return Principal(name=f"key{row}", role=roles[words[0]])
    if len(words) > 2 or (len(words) == 2 and words[1] not in roles):
        raise ConfigError(f"{where}: after the key come its name and its role, one of {', '.join(roles)}")
    name = words[0] if words else f"key{row}"
    return Principal(name=name, role=roles[words[1]] if len(words) == 2 else Role.USER)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
