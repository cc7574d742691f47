"""Values of a plan's islands for reports: what they send and wait for, and the strategy to choose."""

from __future__ import annotations

from jaxtrain.planning.report.values import (
    PlanFact,
    byte_unit,
    format_bytes,
    format_percent,
    format_seconds,
    format_si,
    time_unit,
)
from jaxtrain.planning.result import IslandsPlan


def islands_note(islands: IslandsPlan) -> str:
    """Describes the servers and the links."""
    servers = {0: "no server", 1: "1 server"}.get(islands.servers, f"{islands.servers} servers")
    rate = "of unknown rate" if islands.rate is None else f"of {format_si(islands.rate, 'B/s')} each way"
    line = f"{islands.count} islands, {servers}; link {islands.link} {rate}"
    if islands.server_rate is None:
        return line
    return f"{line}, of a server {islands.server_link} of {format_si(islands.server_rate, 'B/s')}"


def islands_facts(islands: IslandsPlan) -> list[PlanFact]:
    """Bytes and times of the config's strategy."""
    own = islands.own
    order = "then" if islands.servers else "and"
    exchange = f"{own.name}: sends {format_bytes(own.sent)}, {order} receives {format_bytes(own.received)}"
    mean = f"sends {format_bytes(own.sent_a_step)}, receives {format_bytes(own.received_a_step)}"
    rate = "unknown" if own.tokens_per_second is None else f"{own.tokens_per_second:,.0f}"
    link = "its link" if islands.servers == 1 else "the link of each"
    through = f"through {link} in an exchange, of all islands, both ways"
    return [
        PlanFact("exchange", format_seconds(own.exchange_seconds), exchange),
        *([PlanFact("server", format_bytes(own.server_bytes), through)] if islands.servers else []),
        PlanFact("mean step", format_seconds(own.wait_seconds), f"{format_percent(own.wait_share)} waits; {mean}"),
        PlanFact("tokens/s", rate, "of all islands together"),
    ]


def choice_cells(islands: IslandsPlan) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Titles and rows of a table of the strategies to choose from, the least loose one first."""
    choices = islands.choices
    size = byte_unit(each.sent_a_step for each in choices)
    time = time_unit(each.exchange_seconds or 0.0 for each in choices)
    titles = (
        "mean step with", f"sends {size.name}", f"receives {size.name}", f"exchange {time.name}",
        f"waits {time.name}", "of a step", "tokens/s",
    )  # fmt: skip
    rows = [
        (
            each.name, size.number(each.sent_a_step), size.number(each.received_a_step),
            time.number(each.exchange_seconds), time.number(each.wait_seconds),
            "-" if each.wait_share is None else format_percent(each.wait_share),
            "-" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}",
        )
        for each in choices
    ]  # fmt: skip
    return titles, rows


def choice_text(islands: IslandsPlan) -> str:
    """Names the strategy to choose, and why."""
    return f"{islands.chosen}: {islands.why}" if islands.chosen else islands.why
