"""The scripted model: bytes that say what they are, and a forward pass that reads them all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from scripted_caches import HEADS, STATE_SIZE, Layer, state_pages
from scripted_runners import RunnerV1
from scripted_world import ScriptedConnector

#: What the model answers when it has read wrong bytes.
WRONG_TOKEN = 2


@dataclass
class Rank:
    """One tensor-parallel rank: connector, pages of its heads, the number of its first head, and who calls
    the connector."""

    worker: ScriptedConnector
    memory: torch.Tensor
    first_head: int
    runner: RunnerV1


class ScriptedModel:
    """The model on all ranks, and what a model runner keeps: ``tables`` and ``tokens`` by request.

    ``check_bytes``: wrong bytes are an error at once. Else the model computes wrongly on them, as a real
    one does, on all ranks from the next layer on: what it writes, and what it answers.
    """

    def __init__(
        self, layers: Sequence[Layer], ranks: Sequence[Rank], block: int, *, check_bytes: bool
    ) -> None:
        self.layers = layers
        self.ranks = ranks
        self.block = block
        self.check_bytes = check_bytes
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str] = {}
        #: Requests that read wrong bytes in this step.
        self.spoiled: set[str] = set()
        self._known: dict[str, tuple[list[int], list[int]]] = {}

    def update_tables(self, output: SchedulerOutput) -> dict[str, int]:
        """What a model runner keeps: block tables and tokens. Returns where each request starts."""
        starts = {}
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            # Model runner V2 gets a resumed request as a new one, with all tokens it has.
            prompt = new.prefill_token_ids or new.prompt_token_ids
            self.tokens[new.req_id] = [0] * new.prompt_len if prompt is None else list(prompt)
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i] or ()
            starts[req_id] = cached.num_computed_tokens[i]
            if req_id in cached.resumed_req_ids:
                self.tables[req_id] = [[] for _ in self.tables[req_id]]
                self.tokens[req_id] = list(cached.all_token_ids[req_id])
            for table, new_ids in zip(self.tables[req_id], blocks, strict=False):
                table += new_ids
        return starts

    def compute(self, output: SchedulerOutput, starts: dict[str, int]) -> list[list[int]]:
        """The forward pass, layer by layer with the connector's hooks, and the sampled tokens."""
        ends = {r: starts[r] + n for r, n in output.num_scheduled_tokens.items()}
        drafts = {
            r: [max(t, 0) for t in output.scheduled_spec_decode_tokens.get(r, ())]  # -1: taken back
            for r in ends
        }
        values = {}
        for r, end in ends.items():
            inputs = [*self.tokens[r][: end - len(drafts[r])], *drafts[r]]
            values[r] = np.array(self._values(r, inputs), dtype=np.float32)
        self.spoiled.clear()
        for layer in self.layers if ends else ():
            for rank in self.ranks:
                if layer.is_state:  # vLLM calls for attention layers alone
                    for req_id, end in ends.items():
                        self._compute_state(
                            rank, layer, req_id, values[req_id], starts[req_id], end
                        )
                    continue
                rank.worker.wait_for_layer_load(layer.name)
                for req_id, end in ends.items():
                    self._compute_layer(rank, layer, req_id, values[req_id], starts[req_id], end)
                rank.worker.save_kv_layer(layer.name, rank.memory[layer.slot], None)  # type: ignore[arg-type]
        return [self._sample(r, values[r], drafts[r]) for r in ends]

    def _sample(self, req_id: str, values: np.ndarray, drafts: list[int]) -> list[int]:
        """The drafts that turn out right, and one token more; nothing within a prompt."""
        tokens, end = self.tokens[req_id], len(values)
        if end < len(tokens):
            return []
        if req_id in self.spoiled:  # vLLM must not take it
            return [WRONG_TOKEN]
        answer = []
        for value, draft in zip(values[end - len(drafts) - 1 :], [*drafts, None], strict=True):
            answer.append(next_token(int(value)))
            if answer[-1] != draft:
                break
        tokens += answer
        return answer

    def _compute_layer(
        self, rank: Rank, layer: Layer, req_id: str, values: np.ndarray, start: int, end: int
    ) -> None:
        table = np.array(self.tables[req_id][layer.group])
        memory = rank.memory.numpy()[layer.slot]
        if start:
            read = layer.needed(start)
            right = expand(values[read], layer, memory, rank.first_head)
            wrong = (memory[self._where(table, read)] != right).any(axis=(1, 2))
            if wrong.any():
                assert not self.check_bytes, (
                    f"{req_id}: wrong bytes in layer {layer.index} at position "
                    f"{int(read[wrong.argmax()])}"
                )
                self.spoiled.add(req_id)
        computed = expand(values[start:], layer, memory, rank.first_head)
        if req_id in self.spoiled:
            computed = computed * -1 - 7
        memory[self._where(table, np.arange(start, end))] = computed

    def _compute_state(
        self, rank: Rank, layer: Layer, req_id: str, values: np.ndarray, start: int, end: int
    ) -> None:
        """Continue from the state in the block of the last computed token, into that of the step's last."""
        table = self.tables[req_id][layer.group]
        pages = state_pages(rank.memory[layer.slot]).numpy()
        if start:
            found = pages[table[(start - 1) // self.block]]
            if (found != state_of(values[start - 1], layer, rank.first_head)).any():
                assert not self.check_bytes, (
                    f"{req_id}: wrong state in layer {layer.index} at {start}"
                )
                self.spoiled.add(req_id)
        right = state_of(values[end - 1], layer, rank.first_head)
        target = table[(end - 1) // self.block]
        assert target, f"{req_id}: vLLM gave no block for the state at {end}"
        pages[target] = right if req_id not in self.spoiled else -right - 7

    def _values(self, req_id: str, tokens: list[int]) -> list[int]:
        """``prefix_values`` of the request, computed once per token."""
        known, values = self._known.get(req_id, ([], []))
        if tokens[: len(known)] != known[: len(tokens)] or len(tokens) > len(known):
            known, values = tokens, prefix_values(tokens, self.salts.get(req_id, ""))
            self._known[req_id] = (known, values)
        return values[: len(tokens)]

    def _where(self, table: np.ndarray, positions: np.ndarray) -> tuple[Any, ...]:
        """Index of the cells ``[positions, heads, cell]`` in a layer's memory."""
        return table[positions // self.block], slice(None), positions % self.block


def state_of(value: float, layer: Layer, first_head: int = 0) -> np.ndarray:
    """``float32[STATE_SIZE]``: the state after a token with this value; other in every layer, element and
    rank, exact."""
    elements = np.arange(STATE_SIZE, dtype=np.float32) + 32 * layer.index + first_head / 2
    return np.float32(value) + elements / 1024


def prefix_values(tokens: list[int], salt: str) -> list[int]:
    """Per position a number that depends on every token up to it."""
    state, out = hashlib.sha256(salt.encode()), []
    for token in tokens:
        state.update(int(token).to_bytes(4, "little"))
        # 13 bits, and 10 for layer, head and element: all of it is exact in a float32.
        out.append(int.from_bytes(state.digest()[:2], "little") & 0x1FFF)
    return out


def next_token(value: int) -> int:
    return int(value % 1000) + 3


def expected(tokens: list[int], count: int, salt: str = "") -> list[int]:
    """What the scripted model answers."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(prefix_values(known, salt)[-1]))
    return known[len(tokens) :]


def expand(values: np.ndarray, layer: Layer, memory: np.ndarray, first_head: int = 0) -> np.ndarray:
    """``float32[positions, heads, cell]``: different in every element, head and layer, exact."""
    _, heads, _, cell = memory.shape
    grid = np.arange(heads * cell, dtype=np.float32).reshape(heads, cell)
    before = layer.index * HEADS * cell + first_head * cell
    return values[:, None, None] + (grid + before) / 1024


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 1000, length)]
