"""Prices what islands and their servers send each other, and chooses a strategy for a link.

M islands with C seconds of an own step, S servers with equal shares of the parameters, and links of r bytes/s each way:
one of each island and one of each server. In an exchange, which is due every H steps (H = 1 if gradients are pushed),
an island pushes P bytes and then reads R bytes. Its own link takes (P + R) / r; that of a server has its share of what
all push and read, M (P + R) / S bytes.

- All at the same time (`bsp`, `ssp` with bound 0, `local_sgd`, `diloco`): the servers receive all pushes, then all
  read. An exchange takes max(1, M / S) (P + R) / r, and a step waits for one H-th of that.
- Each at another time (`ssp`, `asp`, `async_diloco`): the links of the servers carry reads of some while others push or
  compute. H steps take max(H C + (P + R) / r, M P / (S r), M R / (S r)), and wait for what that is longer than H C.

Islands are of one speed, so none waits for a slower one. Latency and the time of the servers' updates are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.island_config import program_config
from jaxtrain.config.sections.islands import AT_ROUNDS, STALE
from jaxtrain.planning import advice
from jaxtrain.planning.hardware import calibration, chips
from jaxtrain.planning.hardware.link_rate import parse_rate
from jaxtrain.planning.hardware.network import DevicePosition, Fabric
from jaxtrain.planning.report import values
from jaxtrain.planning.result import Advice, IslandsPlan, Plan, PricedStrategy, Traffic

AXIS = "islands"  # in the rows of the plan's communication
ROUNDS = (16, 64, 256)  # steps from one exchange of diloco to the next, from which a plan chooses
SMALL_WAIT = 0.1  # part of a step that may be waiting
BATCH = "data.global_batch="
ASSUMED = (
    "each server is on a machine of its own, whose link has the rate of an island's, both ways at once",
    "islands are of one speed; latency and the servers' updates take no time",
    "islands of ssp, asp and async_diloco push at different times",
    "all strategies are priced with the step of this one",
)


def with_islands(config: Config, plan: Plan, dcn: str | None = None) -> Plan:
    """Adds what an island sends, receives and waits for to the plan of its own steps.

    Args:
        config: of the run.
        plan: of `program_config(config)`.
        dcn: rate of an island's link and of a server's, see `parse_rate`; None: the network of the target.
    """
    if not plan.can_run:
        return plan
    link, rate = _link(plan, dcn)
    own, *choices = _priced(config, plan, rate)
    chosen, why = choose(choices)
    count, servers = config.islands.count, config.islands.servers
    islands = IslandsPlan(count, servers, link, rate, own, tuple(choices), chosen, why)
    plan = replace(plan, islands=islands, notes=(*plan.notes, *ASSUMED))
    plan = advice.with_advice(program_config(config), _with_wait(plan, own, link))
    return replace(plan, advice=tuple(_of_run(each, count) for each in plan.advice))


def price(
    name: str, keys: str, sent: int, received: int, every: int, count: int, servers: int, *, is_lockstep: bool = True,
    rate: float | None = None, seconds: float | None = None, tokens: int = 0,
) -> PricedStrategy:  # fmt: skip
    """Prices a strategy by the formulas above.

    Args:
        name: of the strategy.
        keys: that select it.
        sent: bytes of a push (P).
        received: bytes of a read (R).
        every: steps between exchanges (H).
        count: islands (M).
        servers: servers (S).
        is_lockstep: all exchange at the same time.
        rate: of a link (r); None: unknown.
        seconds: of an island's own step (C); None: unknown.
        tokens: of an island's step.
    """
    total = sent + received
    priced = PricedStrategy(
        name, keys, every, sent, received, sent / every, received / every, count * total / servers
    )  # fmt: skip
    if rate is None:
        return priced
    if is_lockstep:
        exchange = max(1.0, count / servers) * total / rate
    elif seconds is None:
        return priced
    else:
        exchange = max(total / rate, count * max(sent, received) / (servers * rate) - every * seconds)
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


def _priced(config: Config, plan: Plan, rate: float | None) -> list[PricedStrategy]:
    """Prices the strategy of the config, then those to choose from, the least loose one first."""
    sync, sizes = config.sync, plan.tree_bytes
    count, servers = config.islands.count, config.islands.servers

    def at(strategy: str, every: int = 1) -> PricedStrategy:
        is_stale = strategy in STALE
        name, keys = strategy, f"sync.strategy={strategy}"
        if not is_stale:
            name, keys = f"{strategy}, every {every}", f"{keys} sync.every={every}"
            if strategy != "local_sgd" and config.steps % every:  # an exchange follows the last step
                keys += f" steps={ceil(config.steps / every) * every}"
        rounds = sizes["params"] + sizes["mutable"]
        sent, received = (sizes["gradients"], sizes["params"]) if is_stale else (rounds, rounds)
        is_lockstep = strategy not in ("ssp", "asp", "async_diloco") or (strategy == "ssp" and sync.stale.bound == 0)
        return price(
            name, keys, sent, received, every, count, servers, is_lockstep=is_lockstep, rate=rate,
            seconds=plan.step_seconds, tokens=plan.tokens,
        )  # fmt: skip

    has_rounds = sync.strategy in AT_ROUNDS
    rounds: list[int] = sorted({*ROUNDS, *([int(sync.every)] if has_rounds else [])})
    stale = sync.strategy if sync.strategy in ("ssp", "asp") else "ssp"
    own = at(sync.strategy, sync.every if has_rounds else 1)
    return [own, at("bsp"), at(stale), *(at("diloco", every) for every in rounds)]


def _link(plan: Plan, dcn: str | None) -> tuple[str, float | None]:
    """Returns the name of the link of an island, of all its devices together, and its bytes/s; None if unknown."""
    if dcn is not None:
        return dcn, parse_rate(dcn)
    chip, devices = values.chip_of(plan), max(1, plan.devices)
    fabric = Fabric(chip, calibration.calibration_of(chips.chip_kind(chip)), (), [DevicePosition(0)] * devices)
    time = fabric.exchange_time(1 / devices)  # of one byte of the island
    return time.network, None if time.seconds is None else 1 / time.seconds


def _with_wait(plan: Plan, own: PricedStrategy, link: str) -> Plan:
    """Makes the steps of a plan longer by the wait for the server."""
    wait, before = own.wait_seconds, plan.step_seconds
    sent = round(own.sent_a_step / max(1, plan.devices))
    row = Traffic(AXIS, "exchange", link, 1, sent, wait, None if wait is None else 0.0)
    traffic = tuple(sorted([*plan.traffic, row], key=lambda row: (-(row.seconds or 0.0), -row.bytes)))
    if wait is None or before is None or plan.exposed_seconds is None:
        return replace(plan, traffic=traffic)
    ratio, step = before / (before + wait), before + wait
    mfu, hfu = (None if rate is None else rate * ratio for rate in (plan.mfu, plan.hfu))
    exposed = plan.exposed_seconds + wait
    return replace(plan, traffic=traffic, exposed_seconds=exposed, step_seconds=step, mfu=mfu, hfu=hfu)


def _of_run(one: Advice, count: int) -> Advice:
    """Returns advice on an island's rows as one on those of the run."""
    if not one.change.startswith(BATCH):
        return one
    return replace(one, change=f"{BATCH}{int(one.change.removeprefix(BATCH)) * count}")
