"""seal_store: a store with its values encrypted, as PDSTORE_SEAL_KEY_FILE asks for it."""

from __future__ import annotations

import logging

from pdstore.errors import MissingExtra
from pdstore.settings import Settings
from pdstore.store.arena.store import ArenaStore
from pdstore.store.base import Store
from pdstore.store.find import find_optional
from pdstore.store.seal_key_file import read_seal_keys
from pdstore.store.wrappers import WrapperStore

log = logging.getLogger(__name__)


def seal_store(store: Store, settings: Settings) -> Store:
    """Returns a store that encrypts; the store itself if it does so already or without the setting.

    Raises ConfigError for a key file that cannot be used, MissingExtra without `cryptography`.
    """
    if settings.seal_key_file is None:
        return store
    keys = read_seal_keys(settings.seal_key_file)
    try:  # not at the top: the bare install has no `cryptography`
        from pdstore.format.envelope import Envelopes
        from pdstore.store.encrypted import Encrypted
    except ImportError as error:
        raise MissingExtra(
            f"PDSTORE_SEAL_KEY_FILE needs a package that is not installed ({error.name}):"
            " pip install 'pdstore[seal]'"
        ) from error
    inner = store
    while isinstance(inner, WrapperStore):
        if isinstance(inner, Encrypted):
            return store
        inner = inner.wrapped
    envelopes = Envelopes(keys)
    how = ", through staging" if find_optional(store, ArenaStore) else ""
    log.info("%s: values are encrypted%s; seal key %s", store.label, how, envelopes.key_id.hex())
    return Encrypted(store, envelopes)
