"""StoreURL: parts and options are read as meant, mistakes say what to write, no secret shows."""

from __future__ import annotations

import contextlib

import pytest

from pdstore.errors import ConfigError
from pdstore.settings import Settings
from pdstore.store import StoreURL, open_store
from pdstore.store.connect import check_url
from pdstore.store.url import urls_in, without_secret


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush@host",
        "redis://user:hush@host:6379/0?timeout=1",
        "redis://:hu/sh@host",
        "redis://:hu?sh@host",
        "redis://:hu#sh@host",
        "redis://:hu@sh@host",
        "redis://:hush@host:notaport",
        "redis://:hush@host?timeout",
        "redis://:hush@host/notadatabase",
        "rediss://:hush@host?what=1",
        "reddis://:hush@host",
        "redis:/:hush@host",
        ":hush@host",
        "redis+unix://:hush@/x?db=a",
    ],
)
def test_no_message_shows_a_password(url):
    shown = []
    try:
        shown += [repr(StoreURL.of(url)), StoreURL.of(url).label]
        with contextlib.closing(open_store(url, Settings())) as store:
            shown += [repr(store), store.label]
    except ConfigError as error:
        shown += [str(error), repr(error.__context__), repr(error.__cause__)]
    assert shown
    assert not any("hu" in text.replace("what", "") or "sh@" in text for text in shown), shown


@pytest.mark.misconfiguration("a variable that nothing replaced, as `${REDIS_HOST}`")
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://?budget=0", "budget must be positive"),
        ("memory://?budget=many", r"budget='many' is no size; write one like 20GiB"),
        ("memory://?lease=soon", r"lease='soon' is not a number of seconds"),
        ("memory://?lease=nan", r"lease must be a positive number of seconds"),
        ("redis://h?timeout=5000", r"it is in seconds, below 600; if milliseconds .* timeout=5$"),
        ("redis://h1,h2", r"only one host .*: several hosts are redis\+cluster:// or redis\+sent"),
        ("redis://${REDIS_HOST}:6379", r"nothing replaced the variable in it"),
        ("redis://$REDIS_HOST:$PORT", r"nothing replaced the variable in it"),
        ("redis://:pass$word@${HOST}", r"nothing replaced the variable in it"),
        ("file:///pool/${DIRECTORY}", r"nothing replaced the variable in it"),
        ("file:///$POOL_DIR?budget=1GiB", r"nothing replaced the variable in it"),
        ("redis+unix:///run/$(NAME).sock", r"nothing replaced the variable in it"),
        ("mooncake://$(MASTER)", r"Kubernetes replaces \$\(NAME\)"),
        ("memory://?lease=1e9", r"it is in seconds, below 1e\+06"),
        ("memory://?size=1", r"unknown option 'size'; known: budget, lease"),
        ("memory://x#y", r"write # as %23"),
        ("redis://host:99999", r"its port or its options cannot be read"),
    ],
)
def test_a_bad_option_says_what_to_write(url, words):
    with pytest.raises(ConfigError, match=words):
        open_store(url, Settings())


@pytest.mark.parametrize("url", ["redis://:a$B${C}@h", "file:///pool/a$b", "file:///50$/x"])
def test_a_dollar_that_names_no_variable_is_a_character(url):
    assert StoreURL.of(url).text == url


def test_options_are_taken_with_their_defaults_and_what_is_left_is_refused():
    url = StoreURL.of("file:///pool?budget=2MiB&lease=0.5&extra=1")
    assert url.size("budget", 7) == 2 << 20
    assert url.seconds("lease", 3.0) == 0.5
    assert url.size("budget", 7) == 7
    assert url.seconds("lease", 3.0) == 3.0
    with pytest.raises(ConfigError, match=r"unknown option 'extra'; known: budget, lease"):
        url.finish("budget, lease")


BARE = ["redis://u:/hush@host", "redis://u:a@b/hush@host", "rediss://u:?hush=1@host"]
"""The rest of the password would be taken for a path or an option, and be quoted as one."""
NO_TEXT = ["file:///a%00b", "file:///a%FFb", "redis://u:hush%00@h", "shm://a?dir=/%FF"]
"""A path would end at the zero, and other bytes would be another directory."""


@pytest.mark.parametrize(
    ("url", "words"),
    [*((url, "an @ comes after") for url in BARE), *((url, "no text") for url in NO_TEXT)],
)
def test_a_bare_slash_in_a_password_or_what_is_no_text_is_refused_and_never_shown(url, words):
    with pytest.raises(ConfigError, match=words) as caught:
        StoreURL.of(url)
    error = caught.value
    assert "hush" not in f"{error} {error.__cause__} {error.__context__}"


def test_a_path_may_have_an_at():
    assert StoreURL.of("redis+unix:///run/redis@1.sock").path == "/run/redis@1.sock"
    assert StoreURL.of("file:///pool@1").path == "/pool@1"


def test_a_url_shows_no_secret_when_it_is_printed():
    assert repr(StoreURL.of("redis://u:hush@h/1?x=hush")) == "StoreURL('redis://u:***@h/1')"


@pytest.mark.parametrize(
    "text",
    [
        "redis://u:hu sh x://more@host",
        "redis://u:hush x://more@host",
        "redis://u:hu sh x://more y://sh@host file:///pool",
        "shm://pool redis://:hush x://more@host",
        "redis://:hush file:///more file:///pool@1 redis://more@host",
    ],
)
def test_no_part_of_a_password_with_a_blank_and_a_url_in_it_is_shown(text):
    shown = without_secret(text)
    assert "***@host" in shown
    for use in (open_store, check_url):
        with pytest.raises(ConfigError, match="write %20 for a blank") as caught:
            use(text, Settings())
        shown += str(caught.value)
    assert not any(part in shown for part in ("hu", "sh x", "more"))


@pytest.mark.parametrize(
    "urls",
    [
        ["redis://host:6379/0", "redis://:hush@other:6379"],
        ["redis+cluster://[::1]:1,h:2?timeout=1", "file:///a@b", "redis://u:x@[::1]"],
        ["shm://pool?dir=/dev/shm", "redis+unix://", "file:///a:b", "rediss://u@h"],
    ],
)
def test_urls_of_tiers_are_told_apart_beside_passwords(urls):
    assert urls_in(" ".join(urls)) == urls


@pytest.mark.misconfiguration("quotes in the URL, as docker's `--env-file` leaves them")
@pytest.mark.misconfiguration("blanks or line ends around the URL")
@pytest.mark.misconfiguration("`;budget=5GiB` for `?budget=5GiB`")
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///pool ", r"'file:///pool ': remove the blanks or line ends around it"),
        ("redis://host:6379/0\n", r"remove the blanks or line ends around it"),
        (" shm://pool", r"remove the blanks or line ends around it"),
        ("file:///pool ?budget=1GiB", r"remove the blanks or line ends around it"),
        ('"file:///pool"', r"""'"file:///pool"': write it without the quotes"""),
        ("'redis://:hush@host'", r"write it without the quotes: docker's --env-file"),
        ("file:///pool;budget=5GiB", r"write \?budget= for ;budget=, and & between options"),
        ("shm://pool;size=1GiB", r"write \?size= for ;size="),
        ("file:///pool?budget=5GiB;lease=3", r"write \?lease= for ;lease=, and & between options"),
        ("redis://:hush@host:6379;timeout=3", r"write \?timeout= for ;timeout="),
    ],
)
@pytest.mark.parametrize("use", [open_store, check_url])
def test_what_a_file_of_variables_leaves_in_a_url_is_refused_with_what_to_write(url, words, use):
    with pytest.raises(ConfigError, match=words) as caught:
        use(url, Settings())
    assert "hush" not in str(caught.value)
