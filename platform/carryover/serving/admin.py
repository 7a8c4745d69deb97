"""Asks a running endpoint's controller over HTTP, for `platform traffic`.

The key is `--key-file`'s content, else CARRYOVER_ADMIN_KEY, else the one that `platform serve` left
in its state folder.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from carryover.errors import ConfigError, ServingError

KEY_VARIABLE = "CARRYOVER_ADMIN_KEY"
KEY_FILES = "runs/serve/*/admin.key"
# `stop` waits for MLflow.
TIMEOUT_S = 70.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class AdminClient:
    """Sends admin actions to one endpoint.

    Args:
        url: of the endpoint, with or without /v1.
        key: an admin's.
    """

    def __init__(self, url: str, *, key: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url takes http://HOST:PORT, got {url!r}")
        self._http = httpx.Client(
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(TIMEOUT_S, connect=5.0),
            # A proxy that the environment names cannot reach this machine's own loopback.
            trust_env=httpx.URL(self.url).host not in _LOOPBACK,
        )

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, action: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Have the controller do something.

        Raises:
            ServingError: no endpoint, no answer, a key that is not accepted, or no such action.
            ConfigError: the controller refuses the arguments; its message says why.
        """
        try:
            response = self._http.post(f"{self.url}/admin/traffic/{action}", json=arguments or {})
        except httpx.ConnectError:
            raise ServingError(
                f"no endpoint answers at {self.url}; start one with "
                "`platform serve -c serve_apps/configs/ab_embedded.yaml`, or give --url"
            ) from None
        except httpx.TimeoutException:
            raise ServingError(
                f"{self.url} did not answer within {TIMEOUT_S:.0f} s; the change may have been "
                "made: see `platform traffic log`"
            ) from None
        except httpx.HTTPError as error:
            raise ServingError(
                f"{self.url} broke off: {type(error).__name__}: {error}; the change may have been "
                "made: see `platform traffic log`"
            ) from None
        return self._read(response)

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        status = response.status_code
        try:
            answer = response.json()
        except ValueError:
            answer = None
        error = answer.get("error") if isinstance(answer, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if status in (401, 403):
            raise ServingError(
                f"{self.url} does not accept this admin key; read the right one from the state "
                "folder of the application (FOLDER/admin.key, made anew by each `platform serve`) "
                f"with --key-file, or put it into {KEY_VARIABLE}"
            )
        if status == 200 and isinstance(answer, dict):
            return answer
        if status in (404, 405) or message is None:
            raise ServingError(
                f"{self.url} has no split to control (it answered {status}); give the --url of an "
                "endpoint that `platform serve` or `serve deploy` started"
            )
        raise ConfigError(message) if status == 400 else ServingError(message)


def read_key(file: Path | None = None) -> str:
    """Find the admin key.

    Args:
        file: holds the key; None looks at CARRYOVER_ADMIN_KEY, then in the state folders below the
            working folder.

    Raises:
        ConfigError: there is no key, or more than one.
    """
    if file is None and (key := os.environ.get(KEY_VARIABLE, "").strip()):
        return key
    if file is None:
        found = sorted(Path().glob(KEY_FILES))
        if not found:
            raise ConfigError(
                f"no admin key: no file {KEY_FILES} here; run this where `platform serve` runs, "
                f"give --key-file, or set {KEY_VARIABLE}"
            )
        if len(found) > 1:
            raise ConfigError(
                "several applications left an admin key here; choose one: "
                + ", ".join(f"--key-file {path}" for path in found)
            )
        file = found[0]
    try:
        key = file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"cannot read the admin key in {file}: {reason}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{file} holds no key: one line of letters and digits is expected")
    return key


def person() -> str:
    """Who is asking, as user@host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
