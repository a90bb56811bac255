"""NearWorker: vLLM hears of the end of a load when it takes an output up, and of each load once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.config import SchedulerConfig

from pdstore.adapters.vllm.messages import LoadSpec, PDStoreConnectorMetadata, RankLayout
from pdstore.adapters.vllm.near_worker import NearWorker
from tests.support.kv import eventually

IDS = list(range(1, 21))
CONFIG = SimpleNamespace(scheduler_config=SchedulerConfig.default_factory())


@pytest.fixture(autouse=True)
def prompt(instance):
    """Saves a prompt of 200 tokens."""
    instance.pool.save(instance.cache.keys(range(200)), IDS).wait(10)


@pytest.fixture
def near(worker):
    near = NearWorker.of(worker.rank_layout, CONFIG)
    assert near is not None, "the installed vLLM does not call the connector first"
    return near


def output_of(loaded=None):
    return SimpleNamespace(finished_recving=loaded)


def start_load(worker, instance, name="good", num_tokens=200, counts_on=200):
    keys = instance.cache.keys(range(num_tokens))
    spec = LoadSpec(name, keys, [IDS], 0, counts_on)
    worker.start_loads(PDStoreConnectorMetadata(loads=[spec]))
    eventually(lambda: all(job.done for job in worker.loads.jobs))


def test_a_load_that_brought_all_is_added_to_the_output(near, worker, instance):
    start_load(worker, instance)
    assert worker.take_loaded(set()) == set()
    output = output_of({"other"})
    report, loaded = near.take_ended(output)
    assert loaded == {"good"}
    assert output.finished_recving == {"other", "good"}
    assert report.loaded["good"][0] == 200
    assert worker.take_loaded(set()) == set(), "vLLM must not hear of it twice"
    assert near.take_ended(output_of())[1] == set()


def test_a_load_that_fell_short_is_left_to_the_worker_which_names_its_blocks(
    near, worker, instance
):
    start_load(worker, instance, num_tokens=250, counts_on=250)
    output = output_of()
    assert near.take_ended(output)[1] == set()
    assert output.finished_recving is None
    assert worker.take_loaded(set()) == {"good"}
    assert worker.loads.take_bad_blocks()


def test_a_report_is_made_as_long_as_a_load_runs(near, worker, instance):
    """vLLM shows nobody an output in which there is nothing."""
    assert worker.take_report() is None
    start_load(worker, instance)
    assert worker.take_report() is not None
    assert worker.take_report() is not None


def test_it_waits_in_the_worker_s_place(near):
    metadata = PDStoreConnectorMetadata(wait_s=0.002)
    near.take_wait(metadata)
    assert metadata.wait_s == 0.0


def test_a_step_follows_the_end_of_a_job(near, worker, instance):
    """With its output come the counts of that job, which vLLM would otherwise get much later."""
    start_load(worker, instance)
    near.take_ended(output_of())
    assert near.is_owed_a_step
    near.take_wait(PDStoreConnectorMetadata())
    assert not near.is_owed_a_step


def test_a_worker_of_another_process_is_not_near(worker):
    layout = RankLayout(worker.rank_layout.namespace, 16)
    assert NearWorker.of(layout, CONFIG) is None
    assert not worker.loads.is_near


@pytest.mark.parametrize("other", ["def looks_first", None])
def test_a_vllm_that_takes_outputs_up_otherwise_hears_a_step_later(worker, monkeypatch, other):
    from vllm.v1.core.sched.scheduler import Scheduler

    def looks_first(self, output):
        for _ in output.finished_recving or ():
            pass
        self.connector.update_connector_output(output)

    name = "_update_from_kv_xfer_finished"
    if other:
        monkeypatch.setattr(Scheduler, name, looks_first)
    else:
        monkeypatch.delattr(Scheduler, name)
    assert NearWorker.of(worker.rank_layout, CONFIG) is None


def test_a_worker_is_near_to_one_connector_alone(near, worker):
    """MultiConnector gives all its connectors the first one's layout."""
    assert NearWorker.of(worker.rank_layout, CONFIG) is None
