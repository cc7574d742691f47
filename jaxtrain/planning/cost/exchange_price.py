"""Prices exchanges of islands or replicas over a slow link, and chooses a strategy for it.

M islands with C seconds of an own step and a link of r bytes/s each way, and S servers with equal shares of the
parameters and a link of q bytes/s each way. In an exchange, which is due every H steps (H = 1 if gradients are pushed),
an island pushes P bytes and then reads R bytes. Its own link takes (P + R) / r; that of a server carries its share of
what all push and read, M (P + R) / S bytes. It may be another one: islands at home and a server in a data center, or
many islands behind the one link of a server.

- All at the same time (`bsp`, `ssp` with bound 0, `local_sgd`, `diloco`): the servers receive all pushes, then all
  read. An exchange takes max((P + R) / r, M (P + R) / (S q)), and a step waits for one H-th of that.
- Each at another time (`ssp`, `asp`, `async_diloco`): the links of the servers carry reads of some while others push or
  compute. H steps take max(H C + (P + R) / r, M P / (S q), M R / (S q)), and wait for what that is longer than H C.

- Without servers, where islands average among themselves (`islands.servers=0`): P and R are what an island sends and
  receives at the same time, and an exchange takes max(P, R) / r. With `streaming_diloco` it goes on for `tau` steps
  meanwhile, and waits for the rest, max(0, max(P, R) / r - tau C). For `gossip` both are the largest number of messages
  that an island sends in a round of the graph, times the bytes of one.

Islands are of one speed, so none waits for a slower one. Latency and the time of the servers' updates are not counted.

Replicas exchange in a ring, at the same time and without a server: P is what each sends, R = 0, S = M and q = r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from jaxtrain.config.sections.sync import AT_OUTER
from jaxtrain.planning.result import PricedStrategy

ROUNDS = (16, 64, 256)  # steps from one exchange of diloco to the next, from which a plan chooses
SMALL_WAIT = 0.1  # part of a step that may be waiting


def price(
    name: str, keys: str, sent: int, received: int, every: int, count: int, servers: int, *, is_lockstep: bool = True,
    hidden: int = 0, rate: float | None = None, server_rate: float | None = None, seconds: float | None = None,
    tokens: int = 0,
) -> PricedStrategy:  # fmt: skip
    """Prices a strategy by the formulas above.

    Args:
        name: of the strategy.
        keys: that select it.
        sent: bytes of a push (P).
        received: bytes of a read (R).
        every: steps between exchanges (H).
        count: islands (M).
        servers: servers (S); 0: there are none.
        is_lockstep: all exchange at the same time.
        hidden: steps that an island takes during an exchange without a server.
        rate: of the link of an island (r); None: unknown.
        server_rate: of the link of a server (q); None: that of an island.
        seconds: of an island's own step (C); None: unknown.
        tokens: of an island's step.
    """
    total = sent + received
    priced = PricedStrategy(
        name, keys, every, sent, received, sent / every, received / every, count * total / servers if servers else 0.0
    )  # fmt: skip
    if rate is None:
        return priced
    server_rate = servers * (server_rate or rate)
    if not servers:
        exchange = max(0.0, max(sent, received) / rate - hidden * (seconds or 0.0))
    elif is_lockstep:
        exchange = max(total / rate, count * total / server_rate)
    elif seconds is None:
        return priced
    else:
        exchange = max(total / rate, count * max(sent, received) / server_rate - every * seconds)
    wait = exchange / every
    priced = replace(priced, exchange_seconds=exchange, wait_seconds=wait)
    if not seconds:
        return priced
    step = seconds + wait
    return replace(priced, step_seconds=step, wait_share=wait / step, tokens_per_second=count * tokens / step)


def choose(choices: Sequence[PricedStrategy]) -> tuple[str, str]:
    """Returns (keys, why) of the least loose strategy with a small wait, else of the fastest one.

    Args:
        choices: the least loose one first.
    """
    shares = [each.wait_share for each in choices]
    if any(share is None for share in shares):
        return "", "the time of an exchange or of a step is unknown; expected --dcn RATE, such as 1Gbit"
    small = next((at for at, share in enumerate(shares) if share is not None and share < SMALL_WAIT), None)
    if small is None:
        best = max(choices, key=lambda each: each.tokens_per_second or 0.0)
        return best.keys, f"none waits for less than {SMALL_WAIT:.0%} of a step, and it has the most tokens/s"
    best, limit = choices[small], f"less than {SMALL_WAIT:.0%}"
    why = f"it waits for {best.wait_share:.1%} of a step, {limit}"
    if small == 0:
        return best.keys, f"{why}, and no other is as strict"
    before = choices[small - 1]
    return best.keys, f"{why}; the next stricter one, {before.name}, waits for {before.wait_share:.1%}"


def rounds_keys(strategy: str, every: int, steps: int) -> str:
    """Keys of a strategy that exchanges every `every` steps, in a run of `steps`, or of a few more that it allows."""
    keys = f"sync.every={every}"
    if strategy in AT_OUTER and steps % every:  # an exchange follows the last step
        keys += f" steps={ceil(steps / every) * every}"
    return keys
