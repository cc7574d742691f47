"""Adds to the plan of an island what islands and their servers send each other, and chooses a strategy for the link.

The formulas are those of `cost.exchange_price`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.island_config import program_config
from jaxtrain.config.sections.islands import AT_ROUNDS, STALE, WITHOUT_MEAN, WITHOUT_SERVER
from jaxtrain.config.sections.islands_checks import FORMATS
from jaxtrain.config.sections.sync import STRATEGY_KEYS
from jaxtrain.planning import advice
from jaxtrain.planning.cost.exchange_price import ROUNDS, choose, price, rounds_keys
from jaxtrain.planning.cost.transfers import EXCHANGE
from jaxtrain.planning.hardware import calibration, chips
from jaxtrain.planning.hardware.link_rate import parse_rate
from jaxtrain.planning.hardware.network import DevicePosition, Fabric
from jaxtrain.planning.report import values
from jaxtrain.planning.result import Advice, IslandsPlan, Plan, PricedStrategy, Traffic
from jaxtrain.sync.gossip.graphs import most_messages

GRAPH = "exponential"  # of gossip, from which a plan chooses
AXIS = "islands"  # in the rows of the plan's communication
BATCH = "data.global_batch="
OWN_MACHINE = "each server is on a machine of its own"
BOTH_WAYS = "links carry both ways at once"
SAME_LINK = f"{OWN_MACHINE}, whose link has the rate of an island's (--server-dcn), both ways at once"
ASSUMED = (
    "islands are of one speed; latency and the servers' updates take no time",
    "islands of ssp, asp and async_diloco push at different times",
    "all strategies are priced with the step of this one",
)


def with_islands(config: Config, plan: Plan, dcn: str | None = None, server_dcn: str | None = None) -> Plan:
    """Adds what an island sends, receives and waits for to the plan of its own steps.

    Args:
        config: of the run.
        plan: of `program_config(config)`.
        dcn: rate of an island's link, see `parse_rate`; None: the network of the target.
        server_dcn: rate of a server's link; None: that of an island's.
    """
    if not plan.can_run:
        return plan
    link, rate = _link(plan, dcn)
    server = None if server_dcn is None else parse_rate(server_dcn, "--server-dcn")
    own, *choices = priced_strategies(
        config, plan.tree_bytes, tokens=plan.tokens, seconds=plan.step_seconds, rate=rate, server_rate=server
    )
    chosen, why = choose(choices)
    count, servers = config.islands.count, config.islands.servers
    islands = IslandsPlan(count, servers, link, rate, own, tuple(choices), chosen, why, server_dcn or "", server)
    links = SAME_LINK if server is None else f"{OWN_MACHINE}, and {BOTH_WAYS}"
    plan = replace(plan, islands=islands, notes=(*plan.notes, links if servers else BOTH_WAYS, *ASSUMED))
    plan = advice.with_advice(program_config(config), _with_wait(plan, own, link))
    return replace(plan, advice=tuple(_of_run(each, count) for each in plan.advice))


def priced_strategies(
    config: Config, sizes: Mapping[str, int], *, tokens: int, seconds: float | None, rate: float | None,
    server_rate: float | None = None,
) -> list[PricedStrategy]:  # fmt: skip
    """Prices the strategy of the config, then those to choose from, the least loose one first.

    Args:
        config: of the run.
        sizes: of trees, see `step_program.tree_bytes`.
        tokens: of an island's step.
        seconds: of an island's own step, as if the links took no time; None: unknown.
        rate: bytes/s of the link of an island, one way; None: unknown.
        server_rate: of the link of a server, inf if it is no limit; None: that of an island.
    """
    sync = config.sync
    count, servers = config.islands.count, config.islands.servers
    graph = sync.gossip.graph if sync.strategy in WITHOUT_MEAN else GRAPH
    graph_key = "" if graph == sync.gossip.graph else f" sync.gossip.graph={graph}"

    def at(strategy: str, every: int = 1) -> PricedStrategy:
        is_stale = strategy in STALE
        name, keys = strategy, f"sync.strategy={strategy}"
        if not is_stale:
            name, keys = f"{strategy}, every {every}", f"{keys} {rounds_keys(strategy, every, config.steps)}"
        is_lockstep = strategy not in ("ssp", "asp", "async_diloco") or (strategy == "ssp" and sync.stale.bound == 0)
        reads, own = "compress" in STRATEGY_KEYS.get(strategy, ()), "gradients" if is_stale else "deltas"
        for other in ("gradients", "deltas"):
            if not (reads and other == own) and getattr(sync.compress, other) in FORMATS[1:]:
                keys += f" sync.compress.{other}=none"
        form = getattr(sync.compress, own) if reads else "none"
        is_streaming, hidden = strategy == "streaming_diloco", 0
        if is_streaming:
            every, hidden = sync.interval, sync.streaming.tau
        if strategy in WITHOUT_MEAN:
            keys += graph_key
            sent = received = most_messages(graph, count) * (sizes["params"] + sizes["mutable"])
        elif not servers:
            sent = received = _averaged(sizes, count, form, sync.streaming.fragments if is_streaming else 0)
        else:
            sent, received = _exchanged(sizes, form, is_stale, 1 if is_lockstep else count)
        return price(
            name, keys, sent, received, every, count, servers, is_lockstep=is_lockstep, hidden=hidden, rate=rate,
            server_rate=server_rate, seconds=seconds, tokens=tokens,
        )  # fmt: skip

    has_rounds = sync.strategy in (*AT_ROUNDS, *WITHOUT_SERVER)
    rounds: list[int] = sorted({*ROUNDS, *([int(sync.every)] if has_rounds else [])})
    stale = sync.strategy if sync.strategy in ("ssp", "asp") else "ssp"
    own = at(sync.strategy, sync.every if has_rounds else 1)
    stricter = [at("bsp"), at(stale)] if servers else []
    has_gossip = not (servers or config.islands.quorum or config.islands.grace)
    looser = [at("gossip", every) for every in rounds] if has_gossip else []
    return [own, *stricter, *(at("diloco", every) for every in rounds), *looser]


def _exchanged(sizes: Mapping[str, int], form: str, is_stale: bool, updates: int) -> tuple[int, int]:
    """Returns the bytes that an island pushes, and those that it then reads.

    Args:
        sizes: of trees, see `step_program.tree_bytes`.
        form: format of values, see `sync.compress`.
        is_stale: gradients are pushed, and mutable variables stay those of each island.
        updates: made since the last read, each of which has a message if values are rounded.
    """
    mutable = 0 if is_stale else sizes["mutable"]
    if form == "none":
        return (sizes["gradients"] if is_stale else sizes["params"] + mutable), sizes["params"] + mutable
    sent = sizes[f"{'gradients' if is_stale else 'changes'} {form}"] + mutable
    return sent, min(updates * (sizes[f"message {form}"] + mutable), sizes[f"params {form}"] + mutable)


def _averaged(sizes: Mapping[str, int], count: int, form: str, fragments: int) -> int:
    """Returns the bytes that an island sends, and receives, where islands average among themselves.

    Args:
        sizes: of trees, see `step_program.tree_bytes`.
        count: islands.
        form: format of values, see `sync.compress`. `none`: they travel as they are, or of a fragment in float32, and
            the mean in float32.
        fragments: of which one travels; 0: all does.
    """
    mean = sizes["mean" if form == "none" else f"mean {form}"]
    values = sizes[f"changes {form}"] if form != "none" else mean if fragments else sizes["params"]
    whole = (values + mean) / (fragments or 1) + sizes["mutable"] + sizes["mutable mean"]
    return round((count - 1) / count * whole)


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
    row = Traffic(AXIS, EXCHANGE, link, 1, sent, wait, None if wait is None else 0.0)
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
