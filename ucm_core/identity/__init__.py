"""Identity in two steps: an engine-neutral content chain, then object ids per group."""

from ucm_core.identity.chain import ContentChain, Ids, Links, Tokens, object_ids
from ucm_core.identity.choose import choose_namespace
from ucm_core.identity.encoding import Encodable, encode
from ucm_core.identity.extras import ChainExtra
from ucm_core.identity.manifest import DEFAULT_BLOCK_TOKENS, FORMAT_VERSION, Manifest
from ucm_core.identity.namespace import open_namespace
from ucm_core.identity.root import chain_root
from ucm_core.identity.seed import GroupFacts, GroupIdentity, ModelIdentity
from ucm_core.identity.weights import WeightsIdentity, adapter_key, weights_identity

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "FORMAT_VERSION",
    "ChainExtra",
    "ContentChain",
    "Encodable",
    "GroupFacts",
    "GroupIdentity",
    "Ids",
    "Links",
    "Manifest",
    "ModelIdentity",
    "Tokens",
    "WeightsIdentity",
    "adapter_key",
    "chain_root",
    "choose_namespace",
    "encode",
    "object_ids",
    "open_namespace",
    "weights_identity",
]
