"""The plugin: known versions only, once only, and a user's own configuration wins."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_plugins_by_group

from pdstore.adapters.vllm import plugin
from pdstore.errors import ConfigError
from tests.adapters.vllm.standins import GROUP


@pytest.fixture(autouse=True)
def vllms_own(monkeypatch):
    """vLLM as it was before any plugin, and again after the test."""
    known = {name: v for name, v in KVConnectorFactory._registry.items() if name != plugin.NAME}
    monkeypatch.setattr(KVConnectorFactory, "_registry", known)
    plain = EngineArgs.create_engine_config
    plain = getattr(plain, "__wrapped__", plain)
    monkeypatch.setattr(EngineArgs, "create_engine_config", plain)
    for name in ("PD_TRANSFER_VIA_STORAGE", "PDSTORE_ROLE", "PDSTORE_REQUIRE_STORE"):
        monkeypatch.delenv(name, raising=False)
    return plain


@pytest.fixture
def log(caplog):
    plugin.log.addHandler(caplog.handler)  # vLLM's loggers do not propagate
    with caplog.at_level(logging.INFO, plugin.log.name):
        yield caplog
    plugin.log.removeHandler(caplog.handler)


def messages_of(log):
    """Each line that was logged, once: where vLLM's logger does propagate, a record comes twice."""
    return [record.getMessage() for record in {id(each): each for each in log.records}.values()]


def install(monkeypatch, version):
    """Makes this vLLM say that it is of another version."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.1+cpu", "0.33.0rc1"])
def test_a_known_vllm_gets_the_connector_once(monkeypatch, vllms_own, version):
    install(monkeypatch, version)
    for _ in range(2):
        plugin.register()
        assert plugin.NAME in KVConnectorFactory._registry
        assert EngineArgs.create_engine_config.__wrapped__ is vllms_own


def test_a_worker_of_dynamo_learns_of_the_connector(monkeypatch):
    name = "dynamo.vllm.kv_connector_protocols"
    table = {"NixlConnector": "as NIXL does", "MooncakeConnector": "as Mooncake does"}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(KV_CONNECTOR_PROTOCOLS=table))
    plugin.register()
    assert table[plugin.NAME] == "as NIXL does"
    table[plugin.NAME] = "as a newer Dynamo does"
    plugin.register()
    assert table[plugin.NAME] == "as a newer Dynamo does"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    plugin.register()


@pytest.mark.misconfiguration("a version of vLLM that is not supported")
@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0"])
def test_another_vllm_is_left_alone_and_told_so(monkeypatch, log, vllms_own, version):
    install(monkeypatch, version)
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    plugin.register()
    assert plugin.NAME not in KVConnectorFactory._registry
    assert EngineArgs.create_engine_config is vllms_own
    assert "pdstore stays off" in log.text


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [
        ("0.34.0", ConfigError, r"0\.26 to 0\.33; this is 0\.34: .*PDSTORE_REQUIRE_STORE=0"),
        ("unknown", ValueError, "cannot tell vLLM's version"),
    ],
)
def test_another_vllm_ends_a_start_that_requires_the_store(monkeypatch, version, error, words):
    install(monkeypatch, version)
    monkeypatch.setenv("PDSTORE_REQUIRE_STORE", "1")
    plugin.register()  # the switch is off
    assert plugin.NAME not in KVConnectorFactory._registry
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    with pytest.raises(error, match=words):
        plugin.register()


@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(KVConnectorFactory, "register_connector"), (EngineArgs, "create_engine_config")],
)
def test_a_vllm_without_what_the_switch_needs_is_told_how_to_do_without(
    monkeypatch, log, owner, name, is_required
):
    said = (
        rf"the switch of pdstore cannot work in this vLLM [\d.]+: it has no {owner.__name__}.{name}"
        r": .*leave PD_TRANSFER_VIA_STORAGE out, and name PDStoreConnector in"
        r' --kv-transfer-config with "kv_connector_module_path": "pdstore.adapters.vllm"'
    )
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    monkeypatch.setenv("PDSTORE_REQUIRE_STORE", str(int(is_required)))
    monkeypatch.delattr(owner, name)
    if is_required:
        with pytest.raises(ConfigError, match=said):
            plugin.register()
        return
    plugin.register()
    [line] = messages_of(log)
    assert re.search(said, line)
    assert plugin.NAME not in KVConnectorFactory._registry


@pytest.fixture
def configured(monkeypatch):
    """Returns the KVTransferConfig that vLLM uses when a user gave this one: `configured(None)`."""
    monkeypatch.setattr(
        EngineArgs, "create_engine_config", lambda engine_args: engine_args.kv_transfer_config
    )
    plugin.register()
    return lambda given=None, **options: EngineArgs.create_engine_config(
        SimpleNamespace(kv_transfer_config=given, **options)
    )


EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def ours(**fields):
    return KVTransferConfig(**{"kv_connector": plugin.NAME, "kv_role": "kv_both", **fields})


def multi(*entries, **fields):
    """A MultiConnector: entries of pdstore with some fields, behind vLLM's example connector."""
    connectors: list[dict[str, object]] = [EXAMPLE]
    connectors += [{"kv_connector": plugin.NAME, **entry} for entry in entries]
    return ours(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": connectors},
        **fields,
    )


def nested(entry, **fields):
    """A MultiConnector in a MultiConnector."""
    inner = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": plugin.NAME, **entry}]},
    }
    return ours(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": [inner]},
        **fields,
    )


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")],
)
def test_the_switch_turns_the_connector_on_and_opens_no_store_yet(
    monkeypatch, configured, tmp_path, role, kv_role
):
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    monkeypatch.setenv("PDSTORE_STORE", f"file://{tmp_path}/pool")
    monkeypatch.setenv("PDSTORE_ROLE", role)
    config = configured()
    assert (config.kv_connector, config.kv_role) == (plugin.NAME, kv_role)
    assert config.kv_load_failure_policy == "recompute"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PDSTORE_STOER", "redis://there", "PDSTORE_STORE"),
        ("PDSTORE_WORKERS", "none", "PDSTORE_WORKERS"),
        ("PD_TRANSFER_VIA_STORGE", "1", r"did you mean PD_TRANSFER_VIA_STORAGE\?"),
    ],
)
def test_a_wrong_setting_ends_the_start_where_the_switch_is_on(
    monkeypatch, configured, name, value, message
):
    monkeypatch.setenv(name, value)
    if name.startswith("PDSTORE"):
        assert configured() is None
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    with pytest.raises(ConfigError, match=message):
        configured()


@pytest.mark.requirement("R-AW-1", "unless it is switched on, pdstore does nothing")
def test_without_the_switch_vllm_stays_as_it_is(monkeypatch, configured):
    assert configured() is None
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "0")
    assert configured() is None


@pytest.mark.misconfiguration("a Kubernetes Service called `pdstore` or `pdstore-*`")
@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_kubernetes_service_called_pdstore_ends_no_start(monkeypatch, configured, switch):
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", switch)
    monkeypatch.setenv("PDSTORE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PDSTORE_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("PDSTORE_STATUS_PORT", "tcp://10.0.0.2:80")
    assert (configured() is not None) == (switch == "1")


@pytest.mark.misconfiguration("`PDSTORE_ROLE=`, empty")
def test_an_empty_role_is_both_and_the_log_says_so(monkeypatch, configured, log):
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    monkeypatch.setenv("PDSTORE_ROLE", "")
    assert configured().kv_role == "kv_both"
    assert "pdstore hands KV over, role both" in log.text


@pytest.mark.misconfiguration("a URL that nothing can open")
@pytest.mark.parametrize("url", ["redsi://there", "file://{tmp}/pool?colour=red", "shm://a?size=x"])
def test_a_store_that_nothing_can_open_ends_the_start(monkeypatch, configured, tmp_path, url):
    url = url.format(tmp=tmp_path)
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    monkeypatch.setenv("PDSTORE_STORE", url)
    with pytest.raises(ConfigError, match=url.partition("?")[0]):
        configured()
    monkeypatch.delenv("PDSTORE_STORE")
    given = KVTransferConfig(
        kv_connector=plugin.NAME, kv_role="kv_both", kv_connector_extra_config={"store": url}
    )
    with pytest.raises(ConfigError, match=url.partition("?")[0]):
        configured(given)


@pytest.mark.misconfiguration("`--kv-offloading-size` beside pdstore")
@pytest.mark.parametrize("given", [None, ours(), multi({}), nested({})])
def test_an_option_that_replaces_the_connector_is_refused(monkeypatch, configured, given):
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    with pytest.raises(ConfigError, match="--kv-offloading-size replaces pdstore"):
        configured(given, kv_offloading_size=4.0)


def test_offloading_without_pdstore_is_vllms_own_affair(configured, log):
    assert configured(None, kv_offloading_size=4.0) is None
    other = ours(kv_connector="OffloadingConnector")
    assert configured(other, kv_offloading_size=4.0) is other
    assert not log.records


@pytest.mark.misconfiguration("the switch beside another connector")
@pytest.mark.parametrize("given", [ours(kv_connector="OffloadingConnector"), multi()])
def test_the_switch_beside_another_connector_is_one_warning(monkeypatch, configured, log, given):
    configured(given)
    assert not log.records
    monkeypatch.setenv("PD_TRANSFER_VIA_STORAGE", "1")
    assert configured(given) is given
    [said] = messages_of(log)
    assert f"has no effect, because --kv-transfer-config names {given.kv_connector}" in said
    log.clear()
    monkeypatch.setenv("PDSTORE_STOER", "redis://there")
    configured(given)
    [said] = messages_of(log)
    assert "PDSTORE_STOER" in said


MISSPELT = ["PDstoreConnector", "PDStoreConnection", "PDStorageConnector", "pdstore"]


@pytest.mark.misconfiguration("the connector is misspelt in `--kv-transfer-config`")
@pytest.mark.parametrize("name", MISSPELT)
@pytest.mark.parametrize("config", [ours, multi, nested])
def test_a_misspelt_connector_is_refused_with_its_right_name(configured, config, name):
    given = ours(kv_connector=name) if config is ours else config({"kv_connector": name})
    with pytest.raises(ConfigError, match=f"no connector {name}: did you mean PDStoreConnector"):
        configured(given)


@pytest.mark.parametrize("name", ["AscendStoreConnector", "PDstoreConnector"])
def test_another_products_connector_is_not_taken_for_a_misspelt_one(configured, name):
    path = "theirs" if name in MISSPELT else None
    given = ours(kv_connector=name, kv_connector_module_path=path)
    assert configured(given) is given


@pytest.mark.misconfiguration("`PDSTORE_ON_MISS=fail` beside the policy `recompute`")
@pytest.mark.parametrize("config", [ours, multi, nested])
def test_a_policy_that_contradicts_on_miss_is_refused_before_a_model_is_loaded(
    monkeypatch, configured, config
):
    entry = () if config is ours else ({},)
    monkeypatch.setenv("PDSTORE_ON_MISS", "fail")
    given = config(*entry, kv_load_failure_policy="fail")
    assert configured(given) is given
    with pytest.raises(ConfigError, match='write "kv_load_failure_policy": "fail"'):
        configured(config(*entry, kv_load_failure_policy="recompute"))


@pytest.mark.misconfiguration("`PDSTORE_ROLE` is another role than `kv_role`")
@pytest.mark.parametrize("config", [ours, multi, nested])
def test_roles_that_disagree_are_one_warning(monkeypatch, configured, log, config):
    entry = () if config is ours else ({},)
    monkeypatch.setenv("PDSTORE_ROLE", "decode")
    for kv_role in ("kv_consumer", "kv_both"):
        configured(config(*entry, kv_role=kv_role))
    assert not log.records
    configured(config(*entry, kv_role="kv_producer"))
    [said] = messages_of(log)
    assert "kv_role is kv_producer, but pdstore's role is set to decode, which is not used" in said


@pytest.mark.misconfiguration("`PDSTORE_ROLE` is another role than `kv_role`")
def test_the_role_of_the_extra_config_wins_with_a_warning(configured, log):
    configured(ours(kv_role="kv_consumer", kv_connector_extra_config={"role": "prefill"}))
    [said] = messages_of(log)
    assert "kv_role is kv_consumer, but pdstore's role is set to prefill, which is used" in said
    assert "write kv_both, or kv_producer" in said


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_entries_of_a_multi_connector_inherit_what_vllm_obeys(configured, policy):
    fields = {"kv_load_failure_policy": policy, "kv_role": "kv_consumer"}
    example, *entries = configured(
        multi({}, {"kv_load_failure_policy": policy}, **fields)
    ).kv_connector_extra_config["connectors"]
    assert example == EXAMPLE
    assert entries == [{"kv_connector": plugin.NAME, **fields}] * 2
    [inner] = configured(nested({}, **fields)).kv_connector_extra_config["connectors"]
    assert inner["kv_connector_extra_config"]["connectors"] == entries[:1]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_parts_of_vllms_multi_connector_have_the_policy_that_it_obeys(
    monkeypatch, checkpoints, request, tmp_path, policy
):
    monkeypatch.setenv("PDSTORE_STORE", f"file://{tmp_path}/pool?budget=10MiB")
    plugin.register()
    connectors = [{"kv_connector": plugin.NAME} for _ in range(2)]
    transfer = ours(
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": connectors},
        kv_load_failure_policy=policy,
    )
    engine = EngineArgs(model=str(checkpoints("llama")), kv_transfer_config=transfer)
    config = engine.create_engine_config()
    log = request.getfixturevalue("log")  # by then vLLM has set up its own log
    caches = SimpleNamespace(kv_cache_groups=[GROUP])
    made = MultiConnector(config, KVConnectorRole.SCHEDULER, caches)
    made.shutdown()
    told = [said for said in messages_of(log) if "kv_load_failure_policy is fail" in said]
    assert len(told) == (2 if policy == "fail" else 0)


def test_a_dictionary_is_checked_and_completed_as_an_option_is(configured):
    connectors = [{"kv_connector": plugin.NAME}]
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    [entry] = configured(given).kv_connector_extra_config["connectors"]
    assert (entry["kv_role"], entry["kv_load_failure_policy"]) == ("kv_both", "recompute")
    alone = {"kv_connector": plugin.NAME, "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match="stoer"):
        configured({**alone, "kv_connector_extra_config": {"stoer": "redis://there"}})


@pytest.mark.misconfiguration(
    "the entry of a `MultiConnector` contradicts it in `kv_load_failure_policy` or `kv_role`"
)
@pytest.mark.parametrize("config", [multi, nested])
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kv_load_failure_policy": "recompute"}, "kv_load_failure_policy is recompute .* is fail"),
        ({"kv_role": "kv_producer"}, "kv_role is kv_producer .* is kv_both"),
        ({"kv_connector_extra_config": {"store": "redsi://there"}}, "redsi://there"),
        ({"kv_connector_extra_config": {"stoer": "redis://there"}}, "stoer"),
    ],
)
def test_entries_that_contradict_or_cannot_be_used_end_the_start(
    configured, config, entry, message
):
    with pytest.raises(ConfigError, match=message):
        configured(config(entry))


@pytest.mark.misconfiguration("`VLLM_PLUGINS` without `pdstore`, or with blanks in it")
@pytest.mark.parametrize(
    ("names", "is_told"),
    [
        (None, False),
        ("other,pdstore", False),
        ("", True),
        ("other", True),
        ("other, pdstore", True),
    ],
)
def test_plugins_without_pdstores_are_one_warning(monkeypatch, log, names, is_told):
    [entry] = importlib.metadata.entry_points(group="vllm.general_plugins", name=plugin.ENTRY_POINT)
    assert entry.load() is plugin.register
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if names is not None:
        monkeypatch.setenv("VLLM_PLUGINS", names)
    plugin.warn_if_plugin_is_off()
    assert ["Add pdstore to VLLM_PLUGINS" in said for said in messages_of(log)] == [True] * is_told
    assert (plugin.ENTRY_POINT in load_plugins_by_group("vllm.general_plugins")) is not is_told
