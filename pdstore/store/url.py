"""StoreURL: the parts of a store URL. Place: where a store's values are, as its URL tells.

Seconds are parsed here: the library pytimeparse2 would save 6 of 27 lines, while pydantic and the
libraries pytimeparse and durationpy do not read a plain `5`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from pdstore.errors import ConfigError
from pdstore.settings import parse_size

_HOSTS = re.compile("([^/?#]*://(?:[^/?#]*@)?[^/?#,@]*)((?:,[^/?#,@]*)*)")
"""Matches a URL's text up to the end of the first host, and then the list of the other hosts."""
_VARIABLE = re.compile(r"\$(\{\w+\}|\(\w+\)|[A-Z_][A-Z0-9_]+)")
_OPTION_AFTER_SEMICOLON = re.compile(r";(\w+)=")
_TIER = re.compile(r"(?<=\S)\s+(?=[a-z][a-z0-9+.-]*://)")
"""Matches the blanks between two of several URLs."""
_BEFORE_PATH = re.compile(
    r"[^:\s]*://((\[[^\]\s]*\]|[^:@/?#,\s]*)(:[0-9]*)?(,|(?=[/?#]|$)))*([/?#]\S*)?"
)
"""Matches a URL without a password, whose hosts have numbers as ports."""
_MILLISECONDS = re.compile("([0-9.]+)ms")
_BLANK = (
    "write %20 for a blank inside a URL; blanks separate the URLs of several tiers, the fastest"
    " first, as in 'shm://pool file:///mnt/pool'"
)
_ESCAPES = " (in a password, write / ? # @ : as %2F %3F %23 %40 %3A)"
_WITHOUT_PASSWORD = ("memory", "file")  # in these, an @ is part of a name


_OF_REDIS = ("redis", "rediss", "valkey", "valkeys")


@dataclass(repr=False)
class StoreURL:
    """A parsed store URL.

    A store takes its options with `size`, `seconds`, `switch` and `options.pop`; then `finish`
    refuses the options that are left.

    more_hosts: the hosts after the first in `host1:port,host2`. A store that uses several hosts
      empties this list.
    tiers: the URLs of several tiers, the fastest first; empty if there is one URL. Of several,
      the whole has only `text` and `label`.
    """

    text: str
    scheme: str
    host: str
    port: int | None
    path: str
    username: str | None
    password: str | None
    options: dict[str, str]
    more_hosts: Sequence[tuple[str, int | None]] = ()
    tiers: Sequence[StoreURL] = ()

    @classmethod
    def of(cls, text: str) -> StoreURL:
        """Parses a URL of any scheme, or the URLs of several tiers, separated by blanks.

        Raises ConfigError with no password or option in its text.
        """
        urls = urls_in(text)
        if len(urls) > 1:
            tiers = tuple(map(cls.of, urls))
            return cls(text, "", "", None, "", None, None, {}, tiers=tiers)
        problem = _slip_in(text)
        try:
            with_one_host, others = _hosts_apart(text)
            parts = urlsplit(with_one_host)
            port = parts.port
            more_hosts = [(of.hostname or "", of.port) for of in map(urlsplit, others)]
            options = dict(
                parse_qsl(parts.query, strict_parsing=bool(parts.query), keep_blank_values=True)
            )
        except ValueError:
            problem = problem or f"its port or its options cannot be read{_ESCAPES}"
        else:
            problem = problem or _problem_of(text, parts)
        if problem:  # not raised from the ValueError, which may quote the password
            raise ConfigError(f"bad store URL {without_secret(text)!r}: {problem}")
        return cls(
            text,
            text.partition("://")[0] if "://" in text else "",
            parts.hostname or "",
            port,
            unquote(parts.path),
            unquote(parts.username) if parts.username else None,
            unquote(parts.password) if parts.password else None,
            options,
            more_hosts,
        )

    def __repr__(self) -> str:
        return f"StoreURL({self.label!r})"

    @property
    def label(self) -> str:
        """The URL, or the URLs, without passwords and options, for messages."""
        return without_secret(self.text)

    def size(self, option: str, default: int) -> int:
        """Takes an option in bytes, such as `20GiB`. Raises ConfigError if it is not positive."""
        text = self.options.pop(option, None)
        if text is None:
            return default
        try:
            size = parse_size(text)
        except ValueError as error:
            raise ConfigError(
                f"{self.label}: {option}={text!r} is no size; write one like 20GiB"
            ) from error
        if size <= 0:
            raise ConfigError(f"{self.label}: {option} must be positive")
        return size

    def rate(self, option: str, default: int) -> int:
        """Takes an option in bytes a second, such as `500MB/s`. Raises ConfigError as `size`."""
        text = self.options.get(option)
        if text is not None:
            if not text.endswith("/s"):
                raise ConfigError(
                    f"{self.label}: {option}={text!r} is no rate; write one like 500MB/s"
                )
            self.options[option] = text.removesuffix("/s")
        return self.size(option, default)

    def seconds(self, option: str, default: float, most: float = 1e6) -> float:
        """Takes an option in seconds, or in milliseconds such as `100ms`.

        Raises ConfigError if it is not above 0 and below `most`.
        """
        text = self.options.pop(option, None)
        milliseconds = _MILLISECONDS.fullmatch(text or "")
        try:
            if milliseconds is not None:
                value = float(milliseconds[1]) / 1000
            else:
                value = default if text is None else float(text)
        except ValueError as error:
            raise ConfigError(
                f"{self.label}: {option}={text!r} is not a number of seconds"
            ) from error
        if not value > 0:  # also if it is NaN
            raise ConfigError(f"{self.label}: {option} must be a positive number of seconds")
        if value >= most:
            raise ConfigError(
                f"{self.label}: {option}={text} is too long: it is in seconds, below {most:g};"
                f" if milliseconds were meant, write {option}={value / 1000:g}"
            )
        return value

    def switch(self, option: str) -> bool:
        """Takes an option that is 1 or 0, and 0 if it is missing. Raises ConfigError otherwise."""
        text = self.options.pop(option, "0")
        if text not in ("0", "1"):
            raise ConfigError(f"{self.label}: {option}={text!r} is neither 1 nor 0")
        return text == "1"

    def inner(self, prefix: str) -> str:
        """Returns the URL without the options taken so far, and without `prefix` in its scheme."""
        base, _, _ = self.text.removeprefix(prefix).partition("?")
        return f"{base}?{urlencode(self.options)}" if self.options else base

    def finish(self, known: str) -> None:
        """Raises ConfigError, which lists the `known` options, if an option or a host is left."""
        if self.more_hosts:
            hint = ""
            if self.scheme.partition("+")[0] in _OF_REDIS:
                hint = f": several hosts are {self.scheme}+cluster:// or {self.scheme}+sentinel://"
            raise ConfigError(f"{self.label}: only one host can be used{hint}")
        if self.options:
            raise ConfigError(
                f"{self.label}: unknown option {min(self.options)!r}; known: {known or 'none'}"
            )


def _slip_in(text: str) -> str:
    """Returns a remedy for quotes, blanks, a variable or `;budget=` in a URL; "" if it has none."""
    if _VARIABLE.search(text.rpartition("@")[2]):
        return (
            "nothing replaced the variable in it: a shell replaces ${NAME}, but not in single"
            " quotes or an --env-file; Kubernetes replaces $(NAME) if NAME is set above it"
        )
    option = _OPTION_AFTER_SEMICOLON.search(text.rpartition("@")[2])
    if text[:1] in ("'", '"'):
        return "write it without the quotes: docker's --env-file takes them as a part of it"
    if any(part != part.strip() for part in (text, text.partition("?")[0])):
        return "remove the blanks or line ends around it: a Secret or a .env file may have them"
    if option:
        return f"write ?{option[1]}= for ;{option[1]}=, and & between options"
    return _BLANK if any(map(str.isspace, text)) else ""


def _problem_of(text: str, parts: SplitResult) -> str:
    """Returns what is wrong with a URL that could be split; an empty text if nothing is."""
    if parts.fragment:
        return f"write # as %23{_ESCAPES}"
    may_hide_one = parts.netloc and not _is_without_password(parts.scheme)
    if may_hide_one and "@" in parts.path + parts.query:
        return f"an @ comes after a / or a ?{_ESCAPES}"
    try:
        is_text = "\0" not in unquote(text, errors="strict")
    except UnicodeDecodeError:
        is_text = False
    return "" if is_text else "what it writes with a % is no text"


def _hosts_apart(text: str) -> tuple[str, list[str]]:
    """Returns the URL with only its first host, and one URL for each of the other hosts."""
    found = _HOSTS.match(text)
    if found is None or _is_without_password(text.partition("://")[0]):
        return text, []
    others = found[2].split(",")[1:]
    return found[1] + text[found.end() :], [f"//{host}" for host in others]


def urls_in(text: str) -> list[str]:
    """Splits the text of PDSTORE_STORE into the URLs of its tiers; most have one.

    A password may have a blank and `x://` in it by mistake. So what begins as a URL that no host
    can have goes on up to the last URL with a password.
    """
    urls = _TIER.split(text)
    for start, url in enumerate(urls):
        is_cut = "@" not in url and not _is_without_password(url.partition("://")[0])
        if is_cut and not _BEFORE_PATH.fullmatch(url):
            rest = range(start + 1, len(urls))
            ends = [i + 1 for i in rest if "@" in _user_and_host(urls[i])]
            end = max(ends, default=start + 1)
            return [*urls[:start], " ".join(urls[start:end]), *urls[end:]]
    return urls


def _user_and_host(url: str) -> str:
    """Returns what follows a scheme that has passwords; an empty text for another scheme."""
    scheme, _, rest = url.partition("://")
    return "" if _is_without_password(scheme) else rest


def without_secret(text: str) -> str:
    """Returns each URL, malformed or not, with its password replaced and without its options.

    All text between `://` and the last `@` may hold a password, if the scheme has passwords.
    """
    return " ".join(map(_without_secret, urls_in(text)))


def _without_secret(text: str) -> str:
    scheme, separator, rest = text.partition("://") if "://" in text else ("", "", text)
    user, at, host = ("", "", rest) if _is_without_password(scheme) else rest.rpartition("@")
    host, _, _ = host.partition("?")
    name, colon, _ = user.partition(":")  # without a colon, the name may be a password
    return f"{scheme}{separator}{(name + ':' if colon else '') + '***@' if at else ''}{host}"


def _is_without_password(scheme: str) -> bool:
    return scheme.rpartition("+")[2] in _WITHOUT_PASSWORD


class Reach(enum.Enum):
    """Processes that can share a store."""

    PROCESS = "one process"
    HOST = "the processes of one host and one user"
    SHARED = "all hosts that see the same directory or server"


class Place(NamedTuple):
    """Where the values of a store are; `pdstore.store.connect.place_of` tells it and opens nothing.

    The class that serves a URL's scheme may have `place(url, settings)` beside `check`. A class
    without it serves a place that all hosts share and of which nothing else is known.

    path: the file or directory that keeps the values, also if it does not exist yet; None for a
      server.
    is_memory: True if the values lie in memory that processes map, so that blocks are copied there.
    trial_url: what a check opens instead while `path` does not exist, because opening the store
      makes `path` and fixes its size; None if a check may open the store.
    locks_memory: True if the store locks staging's memory, as RDMA does.
    encrypted_scheme: what the URL should begin with, if it sends KV and the password to another
      host without encryption.
    why_two: text that says why this URL may name two places, as an end of a sentence.
    below: the places of the tiers below, if there are several URLs.
    """

    reach: Reach = Reach.SHARED
    path: Path | None = None
    is_memory: bool = False
    trial_url: str | None = None
    locks_memory: bool = False
    encrypted_scheme: str | None = None
    why_two: str = ""
    below: tuple[Place, ...] = ()

    @property
    def missing_path(self) -> Path | None:
        """The file or directory that opening the store would make; None if there is nothing."""
        return None if self.path is None or self.path.exists() else self.path

    @property
    def tiers(self) -> Sequence[Place]:
        """The places of all tiers, this one first."""
        return [self, *self.below]
