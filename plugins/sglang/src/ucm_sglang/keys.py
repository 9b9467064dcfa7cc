"""SGLang's page keys are links of our content chain, in hex. One conversion for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Links = npt.NDArray[np.uint8]

#: Bytes of a link, and digits of a key.
LINK_BYTES = 32
KEY_DIGITS = 2 * LINK_BYTES


def links_of(keys: Sequence[str]) -> Links:
    """``uint8[N, 32]``. Raises ValueError for a key that is not 64 hex digits."""
    text = "".join(keys)
    if len(text) != KEY_DIGITS * len(keys) or any(len(key) != KEY_DIGITS for key in keys):
        wrong = next((key for key in keys if len(key) != KEY_DIGITS), "")
        raise ValueError(f"page key {wrong!r}: expected {KEY_DIGITS} hex digits")
    return np.frombuffer(bytes.fromhex(text), np.uint8).reshape(-1, LINK_BYTES)
