"""Secrets that tests give to instances, and a search for them in what came out."""

from __future__ import annotations

import base64
from pathlib import Path
from urllib.parse import quote

from tests.support.redis_server import RedisServer

PASSWORD, SALT = "p@ss/w-Zq7", "a salt-Xw9"
KEY, OTHER_KEY = "5a17" * 16, "c0de" * 16
_RIGHTS = "+get +getrange +set +exists +expire +unlink +scan +ping"


def redis_with_password(directory: Path) -> RedisServer:
    """Starts a redis in which only `pdstore` may do anything, and only what the store needs."""
    user = ["--user", "pdstore", "on", f">{PASSWORD}", "~pds1:*", "-@all", *_RIGHTS.split()]
    return RedisServer(directory, "--user", "default", "off", *user)


def url_with_password(server: RedisServer) -> str:
    return f"redis://pdstore:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}"


def secrets_in(text: str) -> list[str]:
    """Returns the secrets that are in a text, however they are written there."""
    found = []
    for secret in (PASSWORD, SALT, KEY, OTHER_KEY):
        raw = bytes.fromhex(secret) if secret in (KEY, OTHER_KEY) else secret.encode()
        encoded = base64.b64encode(raw).decode()
        forms = (secret, quote(secret, safe=""), raw.hex(), encoded, str(raw))
        found += [form for form in forms if form in text]
    return found
