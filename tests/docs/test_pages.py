"""The runbook has a section for each reason and alert; the page of the API has every name."""

from __future__ import annotations

import re

import pytest
import yaml

import pdstore.public
from pdstore import errors
from pdstore.errors import Reason, reasons_with
from tests.docs.commands import ROOT

pytest.importorskip("griffe", reason="comes with the extra docs, which make setup installs")
from markdown_it import MarkdownIt

from scripts.site_docstrings import listed
from scripts.site_pages import OUTSIDE

RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "pdstore.rules.yaml").read_text())
MAX_WORDS_OF_BENCHMARKS = 1500
CODE_PAGES = sorted({*map(ROOT.joinpath, OUTSIDE), *(ROOT / "docs").glob("*.md")})
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]


def sections_of(title: str) -> list[str]:
    """The headings of the runbook below one of its parts."""
    part = RUNBOOK.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^### (\w+)\n\n\S", part, re.MULTILINE)


def test_each_reason_has_a_section_in_the_order_of_the_code():
    assert sections_of("By reason") == [reason.value for reason in Reason]


def test_each_alert_has_a_section_in_the_order_of_the_rules():
    assert sections_of("By alert") == [alert["alert"] for alert in ALERTS]


def test_the_readme_and_the_security_page_say_when_shm_loads_what_was_not_verified():
    readme, security = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "SECURITY.md")
    )
    told = "in `shm://`, [with exceptions if a process changes it meanwhile](SECURITY.md#what-"
    assert told in readme
    section = security.partition("## What `shm://` verifies")[2].partition(" ## ")[0]
    assert "device sums values in its own paged cache" in section
    assert "writes to the arena's file between D's sum and D's copy makes wrong KV" in section
    assert "writes between P's copy and P's sum makes wrong KV that is sealed as right" in section
    assert "takes `file://`, or sets a seal key" in section


def reasons_watched_by(alert: dict) -> list[Reason]:
    """The reasons whose misses or drops an alert counts, in the order of the code."""
    watched = re.findall(r'reason=~?"([\w|]+)"', alert["expr"])
    return [reason for reason in Reason if reason.value in "|".join(watched).split("|")]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_each_reason_that_it_watches_and_has_its_severity(alert):
    section = RUNBOOK.partition(f"### {alert['alert']}\n")[2].partition("\n### ")[0]
    for reason in reasons_watched_by(alert):
        assert f"(#{reason.value})" in section
        assert reason.severity.value == alert["labels"]["severity"]


def test_an_alert_that_watches_several_reasons_watches_all_of_their_classes():
    for alert in ALERTS:
        watched = reasons_watched_by(alert)
        if len(watched) > 1:
            assert set(watched) == reasons_with(*(r.cause for r in watched)), alert["alert"]


def test_the_page_of_the_api_has_every_public_name_once():
    text = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: pdstore\.(\w+)$", text, re.MULTILINE)
    of_errors = {
        name
        for name in pdstore.public.__all__
        if issubclass(getattr(errors, name, type), Exception)
    }
    assert sorted([*shown, *of_errors]) == sorted([*pdstore.public.__all__, "errors"])


def test_the_raw_files_are_those_that_the_pages_and_their_own_list_name():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "mooncake.md"]
    texts = {page.stem: page.read_text() for page in pages}
    named = {page: set(re.findall(r"\b\w+\.(?:json|txt)\b", text)) for page, text in texts.items()}
    results = ROOT / "benchmarks" / "results"
    there = {path.name for path in results.iterdir()} - {"README.md"}
    assert there <= set().union(*named.values())
    assert named["benchmarks"] | named["comparison"] | named["052-cells"] <= there
    assert there == set(re.findall(r"`(\w+\.json)`", (results / "README.md").read_text()))


def test_the_page_of_the_benchmarks_is_short_and_names_no_commit():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(text.split()) <= MAX_WORDS_OF_BENCHMARKS
    assert not re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,8}\b", text)


MOST_COLUMNS = 76
"""The columns of code that the site shows without a bar to scroll."""


@pytest.mark.parametrize("page", CODE_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_line_of_code_fits_the_sites_page(page):
    """What a program prints (`text`) is as wide as the program makes it."""
    lines = [
        line
        for token in MarkdownIt().parse(page.read_text())
        if token.type in ("fence", "code_block") and token.info != "text"
        for line in token.content.splitlines()
    ]
    assert not [line for line in lines if len(line) > MOST_COLUMNS]


def test_names_in_a_docstring_become_a_list():
    text = "Moves blocks.\n\nids: of blocks, in\n  order.\nsize: in bytes.\nThen it returns."
    assert listed(text) == (
        "Moves blocks.\n\n\n- **ids**: of blocks, in\n    order.\n- **size**: in bytes.\n\n"
        "Then it returns."
    )


@pytest.mark.parametrize("text", ["Returns x.", "Raises A: no.", "a:b"])
def test_other_lines_of_a_docstring_stay(text):
    assert listed(text) == text
