"""Entry point of vLLM's ``vllm.general_plugins``: makes the name ``UCMConnector`` known."""

from __future__ import annotations

import logging

CONNECTOR_NAME = "UCMConnector"
CONNECTOR_MODULE = "ucm_vllm.api"

_log = logging.getLogger("ucm.vllm")
_done = False


def register() -> None:
    """Register the connector by name. vLLM calls this in every process, maybe more than once.

    Only the name is registered: the connector's module is imported when a server asks for it, so a
    server that does not use UCM pays nothing. A name that someone else holds is reported and left
    alone, because an exception here would stop servers that never asked for UCM.
    """
    global _done
    if _done:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError as error:
        _log.warning(
            "vLLM already has a connector named %s (%s); to use the one of ucm-vllm add "
            '"kv_connector_module_path": "%s" to --kv-transfer-config',
            CONNECTOR_NAME,
            error,
            CONNECTOR_MODULE,
        )
    _done = True
