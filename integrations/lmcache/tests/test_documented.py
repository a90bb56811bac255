"""docs/lmcache.md: its flags are LMCache's, and its configuration opens the adapter."""

from __future__ import annotations

import json
import re
import zipfile

import lmcache_server as kit
import lmcache_wheel as wheel
from tests.docs.commands import ROOT

PAGE = (ROOT / "docs" / "lmcache.md").read_text()


def test_the_flags_of_the_page_are_lmcaches():
    commands = re.findall(r"^lmcache .*?(?=\n```|\nlmcache)", PAGE, re.MULTILINE | re.DOTALL)
    with zipfile.ZipFile(wheel.WHEEL) as opened:
        sources = "".join(
            opened.read(name).decode() for name in opened.namelist() if name.endswith(".py")
        )
    flags = [flag for command in commands for flag in re.findall(r"--[a-z0-9-]+", command)]
    assert len(flags) > 2
    given = [flag.replace("--no-", "--") for flag in flags]  # a switch may be turned off
    assert not [flag for flag in given if f'"{flag}"' not in sources]


def test_the_configuration_of_the_page_opens_the_adapter():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(text) == kit.PLUGIN | {"adapter_params": {}}
