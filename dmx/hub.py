"""The Hugging Face hub: is it in reach, and what a failed look-up means for the user.

huggingface_hub tries an unreachable host six times (23 s measured) before it gives up. One short
connection attempt says the same in the first second; what is in the local cache still loads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Iterator
from urllib.parse import urlparse
from urllib.request import getproxies

PROBE_SECONDS = 2.0
"""Longest wait for a connection to the hub; a chosen value, far above a usual round trip."""


@functools.cache
def hub_is_reachable() -> bool:
    """Whether a look-up on the hub is worth trying; asked once a process.

    False under HF_HUB_OFFLINE / HF_DATASETS_OFFLINE or when no connection opens in PROBE_SECONDS.
    Behind an https proxy the answer is True: only the proxy knows.
    """
    from huggingface_hub import constants

    offline = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    if any(os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} for name in offline):
        return False
    if "https" in getproxies():
        return True
    endpoint = urlparse(constants.ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        with socket.create_connection((endpoint.hostname or "", port), timeout=PROBE_SECONDS):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def datasets_offline(offline: bool) -> Iterator[None]:
    """Within it, and with `offline`, the datasets library reads its cache and asks nobody.

    Its `local_files_only` option does not reach the first look-up, so its own switch is used.
    """
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def hub_error_kind(error: BaseException) -> str:
    """ "gated", "missing", "offline" or "other", from an error and the errors that caused it."""
    names: set[str] = set()
    link: BaseException | None = error
    while link is not None:
        names.add(type(link).__name__)
        link = link.__cause__ or link.__context__
    if "GatedRepoError" in names or ("DatasetNotFoundError" in names and "gated" in str(error)):
        return "gated"
    missing = {"RepositoryNotFoundError", "RevisionNotFoundError", "DatasetNotFoundError"}
    if names & missing:
        return "missing"
    offline = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError"}
    return "offline" if names & offline else "other"
