"""Graphs over which replicas gossip: who sends which share of its values to whom in a round. Pure functions, NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.errors import UserError

GRAPHS = ("ring", "exponential", "matching", "directed")
Edge = tuple[int, int]  # (sender, receiver)


class Messages(NamedTuple):
    """Messages of one round that travel together: no two have the same sender or the same receiver.

    Attributes:
        edges: (sender, receiver) of each.
        share: of its values that each replica sends, float32 [replicas]; 0 for one that sends nothing here.
    """

    edges: tuple[Edge, ...]
    share: np.ndarray


def messages_of(graph: str, replicas: int, number: int = 0, edges: Sequence[Edge] = ()) -> list[Messages]:
    """Returns the messages of a round. What a replica does not send it keeps.

    ring         a third to each of the two neighbours, or half to the only one
    exponential  half to the replica 2^number places on (Assran et al. 2019, arXiv 1811.10792); after log2(replicas)
                 rounds all agree, if that is a whole number
    matching     half to a partner, who answers; `number` chooses one of the rounds of a tournament, in which all pairs
                 meet once
    directed     one part of equal parts along each edge of `edges`, and one is kept

    Args:
        graph: one of `GRAPHS`.
        replicas: their number.
        number: of the round, see above.
        edges: (sender, receiver) of a directed graph.
    """
    if graph == "ring":
        steps = (1,) if replicas == 2 else (1, -1)
        return [_shift(replicas, step, 1 / (len(steps) + 1)) for step in steps]
    if graph == "exponential":
        return [_shift(replicas, 2**number, 0.5)]
    if graph == "matching":
        pairs = _tournament(replicas, number)
        both = tuple(sorted([*pairs, *((b, a) for a, b in pairs)]))
        return [_messages(both, replicas, dict.fromkeys(range(replicas), 0.5))]
    count = np.bincount([sender for sender, _ in edges], minlength=replicas)
    shares = {sender: 1 / (1 + int(sent)) for sender, sent in enumerate(count)}
    return [_messages(part, replicas, shares) for part in _without_conflicts(edges)]


def rounds(graph: str, replicas: int) -> int:
    """Returns how many different rounds a graph has."""
    if graph == "exponential":
        return max(1, int(np.ceil(np.log2(replicas))))
    return replicas - 1 + replicas % 2 if graph == "matching" else 1


def most_messages(graph: str, replicas: int) -> int:
    """Returns the largest number of messages that a replica sends in a round of a graph without `edges`."""
    if replicas == 1:
        return 0
    every = (messages_of(graph, replicas, number) for number in range(rounds(graph, replicas)))
    counts = [Counter(sender for part in parts for sender, _ in part.edges) for parts in every]
    return max(max(count.values()) for count in counts)


def round_number(graph: str, replicas: int, exchange: int, seed: int) -> int:
    """Returns the number of the round of an exchange: a pure function of the seed and the exchange's number, from 0."""
    count = rounds(graph, replicas)
    if graph == "matching":
        return int(np.random.default_rng((seed, exchange)).integers(count))
    return exchange % count


def mixing_matrix(parts: Sequence[Messages], replicas: int) -> np.ndarray:
    """Returns what a round does as a matrix, [receivers, senders]; each column has the sum 1."""
    matrix = np.zeros((replicas, replicas))
    for part in parts:
        for sender, receiver in part.edges:
            matrix[receiver, sender] += part.share[sender]
    return matrix + np.diag(1 - matrix.sum(0))


def check_edges(edges: Sequence[Any], replicas: int) -> None:
    """Raises UserError unless every replica of a directed graph hears of every other one, in one line."""
    where = "sync.gossip.edges"
    pairs = [(int(sender), int(receiver)) for sender, receiver in edges]
    for sender, receiver in pairs:
        if sender == receiver or not (0 <= sender < replicas and 0 <= receiver < replicas):
            message = f"({sender}, {receiver}) is no edge between two of {replicas} replicas"
            raise UserError(f"{where}: {message}; expected numbers from 0 to {replicas - 1}")
    if len(set(pairs)) < len(pairs):
        raise UserError(f"{where}: an edge is there twice; expected each once")
    reach = np.linalg.matrix_power(np.eye(replicas) + _adjacency(pairs, replicas), replicas) > 0
    if not reach.all():
        receiver, sender = (int(index[0]) for index in np.nonzero(~reach))
        raise UserError(f"{where}: nothing of replica {sender} reaches replica {receiver}; expected a path between any")


def _adjacency(edges: Sequence[Edge], replicas: int) -> np.ndarray:
    matrix = np.zeros((replicas, replicas))
    for sender, receiver in edges:
        matrix[receiver, sender] = 1
    return matrix


def _shift(replicas: int, step: int, share: float) -> Messages:
    edges = tuple((sender, (sender + step) % replicas) for sender in range(replicas))
    return _messages(edges, replicas, dict.fromkeys(range(replicas), share))


def _messages(edges: Sequence[Edge], replicas: int, shares: dict[int, float]) -> Messages:
    share = np.zeros(replicas, np.float32)
    for sender, _ in edges:
        share[sender] = shares[sender]
    return Messages(tuple(edges), share)


def _tournament(replicas: int, number: int) -> list[Edge]:
    """Returns the pairs of a round of a round-robin tournament by the circle method; of an odd number one rests."""
    places = [*range(replicas), *([-1] if replicas % 2 else [])]
    fixed, rest = places[0], places[1:]
    rest = rest[number:] + rest[:number]
    circle = [fixed, *rest]
    pairs = [(circle[i], circle[-1 - i]) for i in range(len(circle) // 2)]
    return [(min(pair), max(pair)) for pair in pairs if -1 not in pair]


def _without_conflicts(edges: Sequence[Edge]) -> list[list[Edge]]:
    """Returns the edges in parts, in each of which every sender and every receiver is there once."""
    parts: list[list[Edge]] = []
    for sender, receiver in sorted(edges):
        fitting = (p for p in parts if all(sender != s and receiver != r for s, r in p))
        part = next(fitting, None)
        if part is None:
            parts.append([(sender, receiver)])
        else:
            part.append((sender, receiver))
    return parts
