"""`pdstore explain` of a chat, and of a request that is in the logs of P and D."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdstore.cli.logged import explain_request
from pdstore.cli.prompts import Prompt
from pdstore.errors import ConfigError, Reason
from pdstore.format import block
from pdstore.format.handoff import HandoffId
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.telemetry.reasons import ADVICE
from pdstore.telemetry.request_record import Loss, Phase, RequestRecord
from tests.cli.conftest import fill
from tests.support.command import run, run_json, save

MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% for tool in tools or [] %}{{ tool['name'] }} {% endfor %}"
    "{% if mood is defined %}{{ mood }} {% endif %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ["[unk]", "user", "assistant", "a", "b", "c", "search", "calm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a tokenizer of whole words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(ids, unk_token="[unk]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[unk]")
    tokenizer.chat_template = TEMPLATE
    directory = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(directory)
    return str(directory)


def chat_ids(model, tmp_path, chat) -> str:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(chat))
    ids = Prompt(chat=str(path), model=model).token_ids()
    return " ".join(WORDS[number] for number in ids)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "user a b assistant c assistant"),
        ({"add_generation_prompt": False}, "user a b assistant c"),
        ({"tools": [{"name": "search"}]}, "user a b assistant c search assistant"),
        ({"chat_template_kwargs": {"mood": "calm"}}, "user a b assistant c calm assistant"),
    ],
)
def test_a_chat_is_what_the_models_template_makes_of_it(model, tmp_path, more, words):
    assert chat_ids(model, tmp_path, {"model": "m", "messages": MESSAGES, **more}) == words


@pytest.mark.parametrize("options", [[1], "calm", 3])
def test_options_of_the_template_that_are_none_are_refused(model, tmp_path, options):
    with pytest.raises(ConfigError, match="chat_template_kwargs is no object"):
        chat_ids(model, tmp_path, {"messages": MESSAGES, "chat_template_kwargs": options})


def test_a_content_in_parts_is_refused_with_where_to_get_its_ids(model, tmp_path):
    """vLLM joins them or leaves them apart, by what it reads in the template."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]
    with pytest.raises(ConfigError, match="/tokenize gives its ids: give them by --ids"):
        chat_ids(model, tmp_path, parts)


def test_arguments_of_tool_calls_are_objects_to_the_template_as_vllm_makes_them(model, tmp_path):
    called = {"name": "search", "arguments": '{"mood": "calm"}'}
    calls = [{"type": "function", "function": called}]
    template = "{{ messages[-1].tool_calls[0].function.arguments.mood }}"
    chat = {
        "messages": [*MESSAGES, {"role": "assistant", "tool_calls": calls}],
        "chat_template_kwargs": {"chat_template": template},
    }
    assert chat_ids(model, tmp_path, chat) == "calm"


def test_a_bare_list_of_messages_is_a_chat(model, tmp_path):
    assert chat_ids(model, tmp_path, MESSAGES) == "user a b assistant c assistant"


def test_a_chat_is_found_in_a_pool(model, tmp_path, file_url, prompts):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(MESSAGES * 5))
    ids = Prompt(chat=str(path), model=model).token_ids()
    store = open_store(file_url, read_settings())
    save(store, type(prompts[0])(prompts[0].namespace).extend(ids))
    store.close()
    asked = ("explain", "--chat", str(path), "--model", model, "--store", file_url)
    document = run_json(*asked)
    assert document["found_tokens"] == document["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("text", ["", "[]", "{}", '["a"]', '{"messages": "a"}', "[{}]"])
def test_what_is_no_chat_is_refused(model, tmp_path, text):
    path = tmp_path / "chat.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--chat"):
        Prompt(chat=str(path), model=model).token_ids()


ANSWER = '{"count": 2, "max_model_len": 9, "tokens": [7, 8], "token_strs": null}'


@pytest.mark.parametrize("text", ["7,8", "[7, 8]", ANSWER])
def test_ids_are_given_in_a_file_or_in_place_also_as_tokenize_answers(tmp_path, text):
    path = tmp_path / "ids"
    path.write_text(text)
    assert Prompt(ids=text).token_ids() == Prompt(ids=str(path)).token_ids() == [7, 8]


@pytest.mark.parametrize("text", ["", "no-file", "[-1]", "{", "{}", '{"tokens": 5}'])
def test_what_are_no_ids_is_refused(text):
    with pytest.raises(ConfigError, match="--ids"):
        Prompt(ids=text).token_ids()


def test_a_template_that_refuses_a_chat_is_one_line(model, tmp_path, monkeypatch):
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "user"}, {"role": "user", "content": {"a": 1}}]')
    template = "{{ raise_exception('roles must alternate') }}"
    body = {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": template}}
    path.write_text(json.dumps(body))
    ran = run("explain", "--chat", str(path), "--model", model, "--store", "memory://x")
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert "roles must alternate" in ran.err


HANDOFF = "ab" * 16
P = RequestRecord("chatcmpl-7-P", HANDOFF, "prefill", 1.0, 210, 0, 0, 210, 210, None)
LOSS = Loss(192, 64, Reason.LOST, 19.7, 10.0)
D = RequestRecord(
    *("chatcmpl-7", HANDOFF, "decode", 1.0, 210, 192, 128, 82, 0, Reason.LOST),
    phases=(Phase("load", 0.0, 0.25),),
    loss=LOSS,
)
OTHER = replace(D, request_id="chatcmpl-8", handoff=None, reason=None, loss=None)


@pytest.fixture
def logs(tmp_path):
    """The logs of P and of D."""
    paths = [tmp_path / "p.log", tmp_path / "d.log"]
    for path, records in zip(paths, ([P], [OTHER, D]), strict=True):
        lines = [f"INFO 01-01 [request_record.py:180] {record.line()}\n" for record in records]
        path.write_text("".join(["another line: request of nobody\n", *lines]))
    return [word for path in paths for word in ("--log", str(path))]


def test_a_request_is_told_by_both_logs_with_the_reason_and_what_to_look_at(logs, filled_file):
    ran = run("explain", "--request", "chatcmpl-7", *logs, "--store", filled_file)
    assert ran.status == 1
    assert "chatcmpl-7-P" in ran.out, "P's line of the same hand-off, under another id"
    assert "chatcmpl-8" not in ran.out
    assert f"→ lost: {ADVICE[Reason.LOST].means}. To look at:" in ran.out
    assert f"→ of hand-off {HANDOFF[:12]} the pool has nothing any more" in ran.out
    document = run(
        "explain", "--json", "--request", "chatcmpl-7", *logs, "--store", filled_file
    ).json
    assert document["reasons"] == ["lost"]
    [p, d] = document["lines"]
    assert (p["saved"], p["reason"], d["matched"], d["loaded"]) == (210, None, 192, 128)
    assert LOSS.words in d["line"]


def test_p_and_d_without_a_handoff_are_joined_by_the_clients_id(tmp_path):
    log = tmp_path / "both.log"
    p = replace(P, request_id="cmpl-race-0-8e0b6d48")
    d = replace(D, request_id="cmpl-race-0-a68ddb16", handoff=None)
    log.write_text(f"{p.line()}\n{d.line()}\n")
    [of_p, of_d] = explain_request("file:///nowhere", "race", [str(log)]).document["lines"]
    assert (of_p["request_id"], of_d["request_id"]) == (p.request_id, d.request_id)
    other = replace(d, request_id="cmpl-race-1-a68ddb17")
    log.write_text(f"{d.line()}\n{other.line()}\n")
    with pytest.raises(ConfigError, match="2 requests have 'race' in their ids"):
        explain_request("file:///nowhere", "race", [str(log)])


def test_a_request_whose_id_is_an_order_to_the_terminal_is_shown_without_it(tmp_path):
    log = tmp_path / "d.log"
    log.write_text(replace(OTHER, request_id="chatcmpl-\x1b]0;owned\x07").line())
    ran = run("explain", "--request", "chatcmpl", "--log", str(log), "--store", "memory://x")
    assert ran.status == 0
    assert not {"\x1b", "\x07"} & set(ran.out)


def test_the_markers_of_its_handoff_are_told(logs, file_url, prompts):
    url = fill(file_url, prompts)
    namespace = prompts[0].namespace
    store = open_store(url, read_settings())
    value = memoryview(bytearray(block.HEADER_BYTES))
    handoff = HandoffId(HANDOFF)
    block.seal(value, handoff.marker(namespace, 0, 1, 210))
    assert store.put([handoff.done(namespace, 0)], Slots(value, len(value), [0], [len(value)])) == 1
    store.close()
    ran = run("explain", "--request", "chatcmpl-7", *logs, "--store", url)
    assert f"the pool has `done` of rank 0 in namespace {namespace.hex[:12]}" in ran.out


def test_a_request_that_missed_nothing_is_status_0_and_needs_no_pool(logs):
    answer = explain_request("file:///nowhere", "chatcmpl-8", logs[1::2])
    assert answer.status == 0
    assert answer.shown[-1] == "→ nothing was missing"


def test_a_pool_that_is_gone_leaves_the_logs(logs):
    answer = explain_request("file:///nowhere/at/all", "chatcmpl-7", logs[1::2])
    assert answer.document["problems"][0].startswith("the pool was not asked: there is no pool in")
    assert answer.document["reasons"] == ["lost"]


@pytest.mark.parametrize(
    ("request_id", "files", "said"),
    [
        ("chatcmpl-9", True, "no line of .* is of a request with 'chatcmpl-9' in its id"),
        ("chatcmpl", True, "3 requests have 'chatcmpl' in their ids"),
        ("chatcmpl-7", False, "--request needs --log FILE"),
    ],
)
def test_a_request_that_is_not_clear_is_refused(logs, request_id, files, said):
    with pytest.raises(ConfigError, match=said):
        explain_request("file:///nowhere", request_id, logs[1::2] if files else [])


def test_a_log_without_a_request_is_refused(logs, filled_file):
    ran = run("explain", "--ids", "1,2", *logs, "--store", filled_file)
    assert ran.status == 2
    assert "--log needs --request ID" in ran.err


def test_a_log_that_is_not_there_is_one_line():
    with pytest.raises(ConfigError, match="--log /nowhere: No such file"):
        explain_request(None, "x", ["/nowhere"])
