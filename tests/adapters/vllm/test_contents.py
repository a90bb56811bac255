"""Contents of requests: what a name stands for decides, whoever chose the name."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.multimodal.cache import ShmObjectStoreSenderCache
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from pdstore import open_store
from pdstore.adapters.vllm.contents import Contents
from pdstore.adapters.vllm.digests import ItemDigests, NotAtHand
from pdstore.format.handoff import Handoff, HandoffId
from tests.adapters.vllm.scheduler_kit import BLOCK, PROMPT, TABLE, found, idle_step, step
from tests.adapters.vllm.scheduler_kit import scheduler_of as scheduler_of
from tests.adapters.vllm.scheduler_kit import url as url
from tests.adapters.vllm.standins import item, picture, vllm_request
from tests.support.kv import Instance, settings_of

LONG = len(PROMPT)


def request(*features, request_id="r", **changes):
    return vllm_request(PROMPT, mm_features=list(features), request_id=request_id, **changes)


def saves_of(scheduler, asked, num_tokens=LONG):
    """Saves of the step in which vLLM computes a request of which the pool has nothing."""
    assert found(scheduler, asked) == 0
    return step(scheduler, asked, num_tokens).saves


@pytest.fixture
def stored(url):
    """Puts what P saves into the pool, as a worker would: `stored(save)`."""
    store = open_store(url, settings_of(store=url))
    instance = Instance(store, engine_block_tokens=BLOCK, weights="w")

    def put(save):
        assert instance.pool.save(save.plan.keys, TABLE).wait(20).num_tokens == LONG

    yield put
    instance.close()
    store.close()


def test_a_picture_is_found_by_its_content_under_whatever_name_another_had(scheduler_of, stored):
    p, d = scheduler_of(role="prefill"), scheduler_of(role="decode")
    [save] = saves_of(p, request(picture(1)))
    stored(save)
    assert found(d, request(picture(2), request_id="other picture")) == BLOCK, "before the picture"
    assert found(scheduler_of(role="decode"), request(picture(1))) == LONG
    assert found(d, request(picture(1, "img-1"), request_id="other name")) == BLOCK


def test_both_pictures_of_one_name_bypass_the_pool_from_then_on(scheduler_of, caplog):
    """vLLM's caches of this process may have either of them under the name."""
    p, first = scheduler_of(role="prefill"), request(picture(1))
    assert saves_of(p, first, 128)
    assert saves_of(p, request(picture(3, "img-3"), request_id="beside"))
    second = request(picture(2), request_id="second")
    assert saves_of(p, second) == []
    assert step(p, first, LONG - 128).saves == [], "its later tokens may be of the second picture"
    assert p.finish_request(first) is p.finish_request(second) is None
    assert len(idle_step(p).aborted_handoffs) == 1, "D does not wait for the first"
    for seed in (1, 2):
        assert saves_of(p, request(picture(seed), request_id=f"later {seed}")) == []
    assert saves_of(p, request(picture(3, "img-3"), request_id="untouched"))
    assert saves_of(p, request(request_id="text"))
    assert caplog.text.count("stands for two different ones") == 1


def test_a_name_is_remembered_when_its_request_bypasses_the_pool_or_has_ended(scheduler_of):
    p = scheduler_of(role="prefill")
    salted = request(picture(1), request_id="pooling", pooling_params=object())
    assert saves_of(p, salted) == []
    p.finish_request(salted)
    assert saves_of(p, request(picture(2))) == []


def test_names_beyond_a_full_table_bypass_the_pool(scheduler_of, caplog):
    p = scheduler_of(role="prefill", contents=Contents(most_names=2))
    names = ["a", "b", "c", "a", "c"]
    saved = [
        bool(saves_of(p, request(picture(1, name), request_id=f"{number}")))
        for number, name in enumerate(names)
    ]
    assert saved == [True, True, False, True, False]
    assert caplog.text.count("requests with new ones bypass") == 1


NOWHERE = torch.empty(8, device="meta")


@pytest.mark.parametrize(
    "data",
    [
        None,
        ShmObjectStoreSenderCache.address_as_item(None, 1, 2, [3]),
        item(pixel_values=None),
        item(pixel_values=[torch.rand(2), NOWHERE]),
        item(pixel_values=np.array([object()])),
        item(pixel_values=object()),
    ],
)
def test_data_that_is_not_at_hand_bypasses_the_pool_and_spoils_its_name(scheduler_of, caplog, data):
    p, elsewhere = scheduler_of(role="prefill"), picture(1)
    elsewhere.data = data
    assert saves_of(p, request(elsewhere)) == []
    assert "vLLM does not give pdstore their data" in caplog.text
    assert saves_of(p, request(picture(1), request_id="at hand")) == [], (
        "vLLM may have something else under this name"
    )
    assert "stands for two" not in caplog.text


ROW = torch.arange(12, dtype=torch.int32)
DIFFERENT = [
    {"a": ROW},
    {"b": ROW},
    {"a": ROW + 1},
    {"a": ROW.view(3, 4)},
    {"a": ROW.view(4, 3)},
    {"a": ROW.view(torch.float32)},
    {"a": ROW.numpy()},
    {"a": [ROW]},
    {"a": [ROW[:6], ROW[6:]]},
    {"a": [[ROW[:6]], ROW[6:]]},
    {"a": ROW, "b": 1},
    {"a": ROW, "b": True},
    {"a": ROW, "b": 1.0},
    {"a": ROW, "b": "1"},
    {"a": ROW, "b": []},
    {"a": ROW[:0]},
    {},
]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_different_data_has_different_digests_and_equal_data_equal_ones_in_any_process():
    digests = ItemDigests()
    values = [digests.digest_of(picture(0, data=item(**data))) for data in DIFFERENT]
    assert len(set(values)) == len(DIFFERENT)
    encode, decode = MsgpackEncoder().encode, MsgpackDecoder(type(item())).decode
    for data, value in zip(DIFFERENT, values, strict=True):
        if not {type(each) for each in data.values()} <= {torch.Tensor, list, int, float}:
            continue  # vLLM does not send these
        sent = decode(encode(item(**data)))
        assert digests.digest_of(picture(0, data=sent)) == value
    strided = item(a=torch.stack([ROW, ROW], 1)[:, 0])
    assert digests.digest_of(picture(0, data=strided)) == values[0]


def test_the_kind_and_the_positions_of_an_item_are_in_its_digest():
    digests, mask = ItemDigests(), torch.arange(16) % 2 == 0
    places = [PlaceholderRange(70, 16), *(PlaceholderRange(70, 16, each) for each in (mask, ~mask))]
    features = [picture(1, modality=kind, mm_position=at) for kind in "iv" for at in places]
    assert len({digests.digest_of(feature) for feature in features}) == 6


def test_an_item_that_vllm_has_cached_is_read_once(monkeypatch):
    digests, cached = ItemDigests(), item(pixel_values=torch.rand(8))
    first = digests.digest_of(picture(0, data=cached))
    monkeypatch.setattr("pdstore.adapters.vllm.digests.torch.Tensor", NotAtHand)
    assert digests.digest_of(picture(0, "other turn", data=cached, offset=200)) == first
    with pytest.raises(NotAtHand):
        digests.digest_of(picture(0))


class Held(ItemDigests):
    """Digests that come when a test wants them. It is a fault that cannot be made otherwise."""

    def __init__(self):
        super().__init__()
        self.may_begin = threading.Event()
        self.threads = set()

    def digest_of(self, feature):
        self.threads.add(threading.current_thread())
        assert self.may_begin.wait(30)
        return super().digest_of(feature)


@pytest.fixture
def held():
    digests = Held()
    yield digests
    digests.may_begin.set()


def test_a_request_waits_for_its_digests_and_nobody_else_does(scheduler_of, held):
    p, asked = scheduler_of(role="prefill", contents=Contents(items=held)), request(picture(1))
    assert p.add(asked) is None
    assert p.num_found(asked, 0) is None
    assert saves_of(p, request(request_id="text"))
    held.may_begin.set()
    assert [save.plan.handoff is not None for save in saves_of(p, asked)] == [True]
    assert threading.current_thread() not in held.threads


def test_digests_that_take_too_long_bypass_the_pool_and_d_does_not_wait(scheduler_of, held, caplog):
    contents = Contents(items=held, timeout_s=0.05)
    p, handoff = scheduler_of(role="prefill", contents=contents), HandoffId.new()
    late = request(picture(1), kv_transfer_params=Handoff(handoff).params())
    assert found(p, late) == 0
    assert [each.hex for each in idle_step(p).aborted_handoffs] == [handoff.hex]
    assert step(p, late, LONG).saves == []
    assert p.finish_request(late) is None
    assert "took longer than" in caplog.text
    held.may_begin.set()
    assert saves_of(p, request(picture(1), request_id="later")) == []


def test_a_request_that_vllm_computes_without_waiting_bypasses_the_pool(scheduler_of, held):
    """A request for its prompt's log probabilities: vLLM takes "not known yet" for nothing."""
    p = scheduler_of(role="prefill", contents=Contents(items=held))
    asked = request(picture(1), skip_reading_prefix_cache=True)
    p.add(asked)
    assert p.num_found(asked, 0) == 0
    held.may_begin.set()
    assert saves_of(p, request(picture(2), request_id="after")) == []


def test_a_request_that_ends_before_it_is_computed_leaves_no_name(scheduler_of, held):
    p, asked = scheduler_of(role="prefill", contents=Contents(items=held)), request(picture(1))
    assert p.num_found(asked, 0) is None
    p.finish_request(asked)
    held.may_begin.set()
    assert saves_of(p, request(picture(2), request_id="after"))


def test_where_vllm_numbers_items_they_bypass_the_pool(scheduler_of):
    p = scheduler_of(role="prefill", contents=Contents(hashes_items=False))
    assert saves_of(p, request(picture(1))) == []
    assert saves_of(p, request(request_id="text"))


def adapter(directory, weights, number=1, name="mine"):
    """A LoRA adapter of these bytes, as a request names it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(directory))


@pytest.fixture
def p(scheduler_of):
    return scheduler_of(role="prefill", contents=Contents(tells_paths_apart=True))


@pytest.mark.misconfiguration("two LoRA adapters of one name")
def test_adapters_of_one_name_and_other_contents_never_share_a_block(p, tmp_path):
    """Neither do adapters of one path and number; but equal files in two places do."""
    first, other, copy = (
        adapter(tmp_path / where / "mine", weights, number)
        for number, (where, weights) in enumerate(
            [("a", b"first"), ("b", b"other"), ("c", b"first")], 1
        )
    )
    hashes = [
        saves_of(p, request(request_id=f"{number}", lora_request=lora))[0].plan.keys.hash_of(0)
        for number, lora in enumerate((None, first, other, copy))
    ]
    assert len(set(hashes[:3])) == 3
    assert hashes[3] == hashes[1]


def replaced(path):
    shutil.copy(path.parent / "other" / "adapter_model.safetensors", path)


def renamed_over(path):
    fresh = path.with_suffix(".new")
    shutil.copy2(path, fresh)
    os.replace(fresh, path)


def touched(path):
    os.utime(path, ns=(0, 0))


def grown(path):
    times = path.stat()
    with path.open("ab") as file:
        file.write(b"more")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def removed(path):
    path.unlink()


def joined(path):
    (path.parent / "more.bin").write_bytes(b"")


def retargeted(path):
    path.parent.rename(path.parent.with_name("old"))
    path.parent.symlink_to(path.parent.with_name("other"))


CHANGES = [replaced, renamed_over, touched, grown, removed, joined, retargeted]


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_whose_files_changed_bypasses_the_pool(p, tmp_path, caplog, change):
    """vLLM may have loaded the new files under the old number, or have KV of the old ones."""
    caplog.set_level(logging.WARNING)
    lora, other = adapter(tmp_path / "mine", b"first"), adapter(tmp_path / "other", b"second", 2)
    live = request(lora_request=lora)
    assert saves_of(p, live, 128)
    replaced_file = tmp_path / "mine" / "adapter_model.safetensors"
    if change is replaced:
        shutil.copytree(tmp_path / "other", tmp_path / "mine" / "other")
    change(replaced_file)
    again = SimpleNamespace(**vars(lora) | {"lora_int_id": 3})
    for number, each in enumerate((lora, again, lora)):
        assert saves_of(p, request(request_id=f"{number}", lora_request=each)) == []
    assert step(p, live, LONG - 128).saves == [], "nothing is saved under the old digest"
    assert p.finish_request(live) is None
    assert caplog.text.count("were replaced") == 1
    assert saves_of(p, request(request_id="other", lora_request=other))


@pytest.mark.parametrize("is_found", [True, False])
def test_files_are_looked_at_again_when_a_waiting_request_gets_its_turn(
    scheduler_of, tmp_path, is_found
):
    """vLLM shows a request first, and may compute it, or ask for it again, much later."""
    p = scheduler_of(role="prefill", contents=Contents(fresh_s=0.0))
    lora = adapter(tmp_path / "mine", b"first")
    assert saves_of(p, request(request_id="first", lora_request=lora))
    waits = request(lora_request=lora)
    p.add(waits)
    if is_found:
        assert found(p, waits) == 0
    assert saves_of(p, request(request_id="same thread", lora_request=lora))
    shutil.rmtree(tmp_path / "mine")
    adapter(tmp_path / "mine", b"other")
    assert saves_of(p, waits) == []


def test_one_number_for_two_adapters_bypasses_the_pool_for_both(p, tmp_path):
    """vLLM computes with the one that it has loaded under the number."""
    one, other = (adapter(tmp_path / name, name.encode()) for name in ("one", "other"))
    live = request(lora_request=one)
    assert saves_of(p, live, 128)
    assert saves_of(p, request(request_id="other", lora_request=other)) == []
    assert step(p, live, LONG - 128).saves == []


@pytest.mark.parametrize("tells_paths_apart", [True, False])
def test_one_name_for_two_adapters_bypasses_the_pool_where_vllm_takes_them_for_one(
    scheduler_of, tmp_path, tells_paths_apart
):
    contents = Contents(tells_paths_apart=tells_paths_apart)
    p = scheduler_of(role="prefill", contents=contents)
    one, other = (
        adapter(tmp_path / name, name.encode(), number)
        for number, name in enumerate(("one", "other"), 1)
    )
    assert saves_of(p, request(lora_request=one))
    is_saved = bool(saves_of(p, request(request_id="other", lora_request=other)))
    assert is_saved is tells_paths_apart


def test_files_that_cannot_be_read_bypass_the_pool_with_one_warning(p, tmp_path, caplog):
    lora = SimpleNamespace(lora_int_id=1, lora_name="mine", lora_path=str(tmp_path / "nowhere"))
    for number in range(2):
        assert saves_of(p, request(request_id=f"{number}", lora_request=lora)) == []
    assert caplog.text.count("bypass the pool") == 1


def test_an_encoders_adapter_is_part_of_what_a_name_stands_for(p, tmp_path):
    """With a LoRA adapter in the encoder, vLLM puts the adapter's name in front of the item's."""
    lora = adapter(tmp_path / "mine", b"first")
    adapted = picture(1, "mine:img-0", mm_hash="img-0")
    assert saves_of(p, request(adapted, lora_request=lora))
    client_said = request(picture(1, "mine:img-0"), request_id="without an adapter")
    assert saves_of(p, client_said) == []
