"""A tokenizer for the generated checkpoints: token ``i`` is the word ``w<i>``, so text goes both ways."""

from __future__ import annotations

import json
from pathlib import Path


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Writes ``tokenizer.json`` and its configuration beside a checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
