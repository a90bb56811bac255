"""Secrets that tests give to instances, and a search for them in what came out."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from tests.support.redis_server import RedisServer

PASSWORD, SALT = "p@ss/w-Zq7", "a salt-Xw9"
PASSWORDS = ("hush", "secret-word")
"""Passwords of the tests that need no particular one."""
KEY, OTHER_KEY = "5a17" * 16, "c0de" * 16
_RIGHTS = "+get +set +exists +expire +unlink +scan +ping"


def redis_with_password(directory: Path) -> RedisServer:
    """Starts a redis in which only `pdstore` may do anything, and only what the store needs."""
    user = ["--user", "pdstore", "on", f">{PASSWORD}", "~pds1:*", "-@all", *_RIGHTS.split()]
    return RedisServer(directory, "--user", "default", "off", *user)


def url_with_password(server: RedisServer) -> str:
    return f"redis://pdstore:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}"


def _forms_of(secret: str) -> tuple[str, ...]:
    """Returns how a secret could be written."""
    raw = bytes.fromhex(secret) if secret in (KEY, OTHER_KEY) else secret.encode()
    encoded = base64.b64encode(raw).decode()
    return secret, quote(secret, safe=""), raw.hex(), encoded, str(raw)


_FORMS = [
    *PASSWORDS,
    *(form for one in (PASSWORD, SALT, KEY, OTHER_KEY) for form in _forms_of(one)),
]


def secrets_in(text: str) -> list[str]:
    """Returns the secrets that are in a text, however they are written there."""
    return [form for form in _FORMS if form in text]


class SecretSearch(logging.Handler):
    """Looks through every record of the log; `found` has the lines with a secret."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.name}: {self.format(record)}"
        if secrets_in(line):
            self.found.append(line)

    def search(self, logs: Iterable[Path]) -> None:
        """Looks through files that other processes wrote."""
        for path in logs:
            if secrets := secrets_in(path.read_text(errors="replace")):
                self.found.append(f"{path}: {secrets}")
