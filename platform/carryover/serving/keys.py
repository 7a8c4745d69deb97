"""API keys: who may ask, and how often. Pure but for the key file.

Only SHA-256 hashes are kept. A key has 256 random bits, so a plain hash is enough; a password
would need a slow one. Comparison takes the same time whichever key matches, or none.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.errors import ServingError
from carryover.serving.openai_errors import ApiError

ADMIN_KEY_FILE = "admin.key"
_HASH = r"^[0-9a-f]{64}$"


class ApiKey(Config):
    """One key of a client or an admin."""

    id: str = Field(
        min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$",
        description="Names the key in logs and for `platform traffic revoke`; no secret.",
    )  # fmt: skip
    sha256: str = Field(
        pattern=_HASH,
        description="Of the key, in hex: printf %s KEY | sha256sum",
    )
    requests_per_minute: float | None = Field(
        default=None, gt=0, description="Null: as many as come."
    )
    burst: int = Field(default=10, ge=1, description="Requests that may come at once.")


class SecurityConfig(Config):
    """The `security:` section: who may use the endpoint, and who may change the split."""

    keys: list[ApiKey] = Field(
        default=[], description="Clients need one of these as a bearer; empty: anyone may ask."
    )
    admin_keys: list[ApiKey] = Field(
        default=[],
        description="For /admin/traffic; `platform serve` adds one of its own. "
        "Empty otherwise: nobody may change the split over HTTP.",
    )
    log_prompts: bool = Field(
        default=False, description="Whether engines may write prompts to their logs."
    )

    @model_validator(mode="after")
    def _check(self) -> SecurityConfig:
        ids = [key.id for key in (*self.keys, *self.admin_keys)]
        repeated = sorted({name for name in ids if ids.count(name) > 1})
        if repeated:
            raise ValueError(f"key ids must differ; {', '.join(repeated)} appears twice")
        shared = {key.sha256 for key in self.keys} & {key.sha256 for key in self.admin_keys}
        if shared:
            raise ValueError("a client's key must not be an admin's as well; make another")
        return self


def hash_key(key: str) -> str:
    """SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def make_admin_key(folder: Path) -> ApiKey:
    """Make a new admin key, write it to `admin.key` in the folder for its owner alone.

    Raises:
        ServingError: the file cannot be written.
    """
    key = secrets.token_urlsafe(32)
    path = folder / ADMIN_KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{ADMIN_KEY_FILE}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise ServingError(
            f"cannot write the admin key to {path}: {error.strerror}; choose another folder "
            "with --set traffic.state=FOLDER"
        ) from None
    return ApiKey(id="platform-serve", sha256=hash_key(key))


class KeyRing:
    """Keys that are accepted, and how much each has left to ask.

    Args:
        keys: accepted ones; with none, everybody is let in unless `required`.
        required: whether a key is needed even if there is none.
        replicas: that share requests at random; each grants its part of a key's rate.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey],
        *,
        required: bool = False,
        replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = tuple((bytes.fromhex(key.sha256), key) for key in keys)
        self._buckets = {
            key.id: TokenBucket(key.requests_per_minute / 60 / replicas, key.burst, clock=clock)
            for key in keys
            if key.requests_per_minute is not None
        }
        self.required = required or bool(keys)

    def check(self, authorization: str | None, *, revoked: Collection[str] = ()) -> str | None:
        """Let a request in.

        Args:
            authorization: the header's value.
            revoked: ids that no longer count.

        Returns:
            The key's id; None if no key is needed.

        Raises:
            ApiError: 401 without a valid key, 429 if it has been used too often.
        """
        if not self.required:
            return None
        key = self._find(authorization)
        if key is None or key.id in revoked:
            raise ApiError(
                401,
                "no valid API key; send 'Authorization: Bearer KEY' with a key that the operator "
                "of this endpoint gave you",
            )
        bucket = self._buckets.get(key.id)
        if bucket is not None:
            wait_s = bucket.take()
            if wait_s > 0:
                raise ApiError(
                    429,
                    f"key {key.id!r} may ask {key.requests_per_minute:g} times a minute; "
                    f"come back in {max(1, round(wait_s))} s",
                    retry_after_s=wait_s,
                )
        return key.id

    def _find(self, authorization: str | None) -> ApiKey | None:
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for expected, key in self._keys:
            if hmac.compare_digest(digest, expected):
                found = key
        return found if scheme.lower() == "bearer" else None


class TokenBucket:
    """Lets `rate_per_s` through on average, and `burst` at once."""

    def __init__(
        self, rate_per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate_per_s, float(burst), clock
        self._tokens, self._at = float(burst), clock()

    def take(self) -> float:
        """Take one; returns 0, or, with nothing taken, the seconds until there will be one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._rate
