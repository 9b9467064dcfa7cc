"""One pipeline stage of the ranks in this process: runs its layers, calling connectors around each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ucm_reference.batch import Micro
from ucm_reference.connector import Port
from ucm_reference.fixed import Array, normalise
from ucm_reference.layers import Place, build
from ucm_reference.memory import Memory, Sizes
from ucm_reference.model import Model
from ucm_reference.topology import Topology


class Comm(Protocol):
    """What this process's ranks need from ranks that live in other processes."""

    def sum(self, part: Array) -> Array:
        """The sum over the tensor-parallel ranks of a context-parallel one."""

    def join(self, found: Array) -> Array:
        """The sum over the context-parallel ranks of a tensor-parallel one: each page is on one of them."""


class Alone:
    """Every rank of the stage is in this process."""

    def sum(self, part: Array) -> Array:
        return part

    def join(self, found: Array) -> Array:
        return found


@dataclass(slots=True)
class Activations:
    """What one stage hands to the next, per micro-batch: residual stream and the indexers' choice."""

    hidden: Array
    selected: Array | None


class Stage:
    """``tp_ranks``, ``cp_ranks``: the ranks that this process computes; default all of the stage."""

    def __init__(
        self,
        model: Model,
        topology: Topology,
        number: int,
        sizes: Sizes,
        tp_ranks: range | None = None,
        comm: Comm | None = None,
        cp_ranks: range | None = None,
    ) -> None:
        ranks = range(topology.tp) if tp_ranks is None else tp_ranks
        self.model = model
        self.layers = topology.stages(model)[number]
        self.first, self.last = number == 0, number == topology.pp - 1
        self.memory = Memory(model, topology, self.layers, ranks, sizes, cp_ranks)
        self._comm: Comm = comm or Alone()
        self._built = [
            build(Place(model, i, topology, ranks, self.memory, self._comm.join))
            for i in self.layers
        ]
        self._embedding = model.embedding()
        self._reading = model.weight(-1, "logits", model.hidden, model.vocabulary)

    def run(
        self, micros: Sequence[Micro], incoming: Sequence[Activations], ports: Sequence[Port]
    ) -> list[Activations]:
        """All layers of the stage over all micro-batches; ``incoming`` is empty for the first stage."""
        if self.first:
            hidden = [self._embedding[micro.tokens] for micro in micros]
        else:
            hidden = [given.hidden for given in incoming]
            for micro, given in zip(micros, incoming, strict=True):
                micro.selected = given.selected
        for number, layer in zip(self.layers, self._built, strict=True):
            for i, micro in enumerate(micros):
                for port in ports:
                    port.wait_for_layer(number)
                part = layer.run(normalise(hidden[i]), micro)
                if part is not None:
                    hidden[i] = hidden[i] + np.rint(self._comm.sum(part) * 2.0**-5)
                for port in ports:
                    port.save_layer(number)
        return [Activations(h, m.selected) for h, m in zip(hidden, micros, strict=True)]

    def sample(
        self, micros: Sequence[Micro], outgoing: Sequence[Activations]
    ) -> dict[str, list[tuple[int, str]]]:
        """Per request that asked: the greedy token after each of its last ``sample`` tokens, and the
        digest of the exact activations it was chosen from."""
        found: dict[str, list[tuple[int, str]]] = {}
        for micro, given in zip(micros, outgoing, strict=True):
            for hidden, span in zip(given.hidden, micro.spans, strict=True):
                if not span.sample:
                    continue
                rows = hidden[len(span.tokens) - span.sample : len(span.tokens)]
                best = (normalise(rows) @ self._reading).argmax(axis=-1)
                found[span.request_id] = [
                    (int(token), hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest())
                    for token, row in zip(best, rows, strict=True)
                ]
        return found
