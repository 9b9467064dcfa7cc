"""Where SGLang's CPU engine would take a kernel for a model family, say which plain path it has."""

from __future__ import annotations


def install() -> None:
    """Latent attention (MLA): the plain torch backend computes the absorbed form."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    handlers.AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
