"""Prices of collectives on small networks, worked out by hand, and what runs beside computing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from jaxtrain.errors import UserError
from jaxtrain.hlo import collectives, parse
from jaxtrain.planning.cost import overlap, roofline, transfers
from jaxtrain.planning.hardware import network, targets
from jaxtrain.planning.hardware.calibration import Calibration
from jaxtrain.planning.hardware.chips import GPUS, TPUS, Chip, Figure, SharedMemory
from jaxtrain.planning.hardware.link_rate import parse_rate
from jaxtrain.planning.hardware.network import CollectiveTime, DevicePosition, Fabric, SlowLink

ALL = Calibration(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)  # every figure in full
HALF = dataclasses.replace(ALL, inside=0.5, outside=0.5)
BIG = 1e12  # bytes, so that latency does not matter
H100 = {"nvlink": 450e9, "card": 50e9}


def nodes(count: int, per_node: int = 8, kind: str = "h100") -> Fabric:
    target = targets.parse(f"{kind}:{count}x{per_node}")
    devices = [SimpleNamespace(id=i, process_index=i // per_node) for i in range(count * per_node)]
    return Fabric(target.chip, ALL, (), network.device_positions(target, devices))


def torus(*sizes: int, kind: str = "v5p", slices: int = 1) -> Fabric:
    coords = [()]
    for size in sizes:
        coords = [(*at, i) for at in coords for i in range(size)]
    chip = TPUS[kind]
    places = [DevicePosition(s, at, core) for s in range(slices) for at in coords for core in range(chip.devices)]
    return Fabric(chip, ALL, sizes, places)


def seconds(fabric: Fabric, op: str, group: list[int], full: float = BIG) -> tuple[float, str]:
    share = (len(group) - 1) / len(group) * (2 if op == "all-reduce" else 1)
    price = fabric.collective_time(op, [group], full * share)
    assert price.seconds is not None
    return price.seconds, price.network


def test_inside_of_a_node():
    node = nodes(1)
    assert seconds(node, "all-gather", list(range(8))) == (
        pytest.approx(BIG * 7 / 8 / H100["nvlink"], rel=1e-4),
        "NVLink",
    )
    twice, _ = seconds(node, "all-reduce", list(range(8)))
    assert twice == pytest.approx(2 * BIG * 7 / 8 / H100["nvlink"], rel=1e-4)
    small, _ = seconds(node, "all-gather", list(range(8)), 8.0)
    assert small == pytest.approx(6.6e-6 + 7 * 0.6e-6, rel=1e-3)


def test_across_nodes_all_cards_work_for_a_group_of_whole_nodes():
    fabric = nodes(4)
    whole, name = seconds(fabric, "all-gather", list(range(32)))
    assert name == "NVLink+InfiniBand"
    assert whole == pytest.approx(BIG * 31 / 32 / H100["nvlink"], rel=1e-3)  # 8 cards are faster than one NVLink here
    older, _ = seconds(nodes(4, kind="a100"), "all-gather", list(range(32)))
    assert older == pytest.approx(BIG * 3 / 4 / (8 * 25e9), rel=1e-3)
    one_each, name = seconds(fabric, "all-gather", [0, 8, 16, 24])
    assert (one_each, name) == (pytest.approx(BIG * 3 / 4 / H100["card"], rel=1e-3), "InfiniBand")
    exchange, _ = seconds(fabric, "all-to-all", list(range(32)))
    assert exchange == pytest.approx(BIG * 24 / 32 / H100["card"], rel=1e-3)


def test_a_rack_of_gb200_is_one_node():
    rack = nodes(18, 4, "gb200")
    _, name = seconds(rack, "all-gather", list(range(72)))
    assert name == "NVLink"


def test_a_group_uses_the_links_of_all_dims_it_lies_along():
    cube = torus(4, 4, 4)
    link = 100e9
    line, name = seconds(cube, "all-gather", [0, 1, 2, 3])  # z, a ring: two links
    assert (line, name) == (pytest.approx(BIG * 3 / 4 / (2 * link), rel=1e-3), "ICI")
    whole, _ = seconds(cube, "all-gather", list(range(64)))
    assert whole == pytest.approx(BIG * 63 / 64 / (6 * link), rel=1e-3)
    small = torus(2, 2, 2)  # no rings
    half, _ = seconds(small, "all-gather", [0, 1])
    assert half == pytest.approx(BIG / 2 / link, rel=1e-3)
    plane = torus(4, 4, kind="v6e")
    row, _ = seconds(plane, "all-gather", [0, 1, 2, 3])  # a ring from 16 on
    assert row == pytest.approx(BIG * 3 / 4 / link, rel=1e-3)


def test_interleaved_groups_share_links():
    ring = torus(1, 1, 8)
    apart, _ = seconds(ring, "all-gather", [0, 2, 4, 6])
    together, _ = seconds(ring, "all-gather", list(range(8)))
    assert apart == pytest.approx(2 * together * (3 / 4) / (7 / 8), rel=1e-3)


def test_an_exchange_crosses_the_middle():
    ring = torus(1, 1, 8)
    found, _ = seconds(ring, "all-to-all", list(range(8)))
    assert found == pytest.approx(BIG * 8 / 8 / 100e9, rel=1e-3)  # 8 devices x BIG / 2, half each way over 2 x 2 links


def test_between_slices_each_device_takes_its_share():
    slices = torus(2, 2, 1, slices=2)
    found, name = seconds(slices, "all-reduce", list(range(8)))
    inside, outside = BIG * 3 / 4 / (2 * 100e9), BIG / 4 / 2 / 6.25e9
    assert (found, name) == (pytest.approx(2 * (inside + outside), rel=1e-3), "ICI+DCN")
    assert seconds(slices, "all-gather", [0, 4])[1] == "DCN"


def test_two_devices_of_a_chip_share_its_links():
    chip = torus(4, 4, 4, kind="tpu7x")
    one_core, both = list(range(0, 8, 2)), list(range(8))
    alone, _ = seconds(chip, "all-gather", one_core)
    shared, _ = seconds(chip, "all-gather", both)
    assert alone == pytest.approx(2 * shared, rel=1e-3)


def test_permutes_pay_for_hops_and_for_leaving():
    ring = torus(1, 1, 8)
    around = [(i, (i + 1) % 8) for i in range(8)]
    assert ring.collective_time("collective-permute", around, BIG).seconds == pytest.approx(BIG / 100e9, rel=1e-3)
    line = torus(1, 1, 2, kind="v5p")
    assert line.collective_time("collective-permute", [(0, 1)], BIG).network == "ICI"
    assert nodes(2).collective_time("collective-permute", [(0, 1), (7, 8)], BIG).network == "InfiniBand"


def test_what_is_achieved_and_what_nobody_knows():
    slower = dataclasses.replace(nodes(1), calibration=HALF)
    assert seconds(slower, "all-gather", [0, 1])[0] == pytest.approx(
        2 * seconds(nodes(1), "all-gather", [0, 1])[0], rel=1e-3
    )
    unknown = Fabric(None, ALL, (), [DevicePosition(0), DevicePosition(0)])
    assert unknown.collective_time("all-gather", [[0, 1]], 8.0) == network.CollectiveTime(None, "host")
    assert GPUS["h100"].inside is not None


def test_simulated_devices_meet_and_copy_through_the_host_s_memory():
    copy, add, meeting, none = (Figure(value, "measured") for value in (4e9, 1e9, 1e-5, 0))
    host = Chip("cpu", {"bf16": none}, none, none, none, SharedMemory(copy, add, meeting, 8))
    fabric = Fabric(host, ALL, (), [DevicePosition(0)] * 8)
    assert seconds(fabric, "all-gather", [0, 1, 2, 3], 1e6) == (pytest.approx(4e-5 + 2e6 / 4e9), "host")
    assert seconds(fabric, "all-reduce", [0, 1], 1e6) == (pytest.approx(2e-5 + 2e6 / 1e9), "host")
    # A permute waits for all devices, whoever takes part.
    assert fabric.collective_time("collective-permute", [(0, 1)], 1e6).seconds == pytest.approx(8e-5 + 2e6 / 4e9)


def test_axes_that_leave_a_node():
    fabric = nodes(2)
    assert network.axes_crossing_domains(fabric.positions, {"data": 2, "fsdp": 1, "model": 8}) == {
        "data": True,
        "model": False,
    }
    assert network.axes_crossing_domains(fabric.positions, {"fsdp": 16}) == {"fsdp": True}


LINES = """HloModule m, is_scheduled=true

%body (t: (f32[8,8])) -> (f32[8,8]) {
  %t = (f32[8,8]) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=0
  %g = (f32[2,8], f32[8,8]) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %a = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}
  %done = f32[8,8]{1,0} all-gather-done(%g)
  %r = f32[8,8]{1,0} all-reduce(%a), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %out = (f32[8,8]) tuple(%r)
}

%cond (t: (f32[8,8])) -> pred[] {
  ROOT %p = pred[] parameter(0)
}

ENTRY %main (t: (f32[8,8])) -> (f32[8,8]) {
  %t = (f32[8,8]) parameter(0)
  ROOT %w = (f32[8,8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


class Second:
    """A dot of 8 x 8 x 8 takes a second."""

    memory, launch = 1e9, 0.0

    def compute(self, kind: str, dtype: str) -> float:
        return 2.0 * 8**3


def test_what_is_between_start_and_done_runs_at_the_same_time():
    module = parse.parse(LINES)
    found = roofline.analyze(module, Second())
    assert found.seconds == pytest.approx(3.0)
    moving = {("body", "g"): overlap.TransferTime(1.5), ("body", "r"): overlap.TransferTime(0.25)}
    assert overlap.exposed_seconds(module, found, moving) == {
        ("body", "g"): pytest.approx(0.5), ("body", "r"): 0.25,
    }  # fmt: skip
    line = overlap.Timeline(module, {("body", "a"): 1.0}, moving)
    assert line.run("main") == pytest.approx(3 * 1.75)


# A gather of 8 x 8 that a TPU starts before a dot, carries through it, and ends after another.
CARRIED = """HloModule m, is_scheduled=true

%begin (p0: f32[2,8]) -> (f32[2,8], f32[8,8]) {
  %p0 = f32[2,8]{1,0} parameter(0)
  %gather.1 = f32[8,8]{1,0} all-gather(%p0), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="7"}
  ROOT %c = (f32[2,8], f32[8,8]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%both (p0: f32[2,8], p1: f32[8,8]) -> (f32[8,8], f32[8,8]) {
  %p0 = f32[2,8]{1,0} parameter(0)
  %p1 = f32[8,8]{1,0} parameter(1)
  %gather.2 = f32[8,8]{1,0} all-gather(%p0), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="7"}
  %d = f32[8,8]{1,0} dot(%p1, %p1), lhs_contracting_dims={1}
  ROOT %t = (f32[8,8], f32[8,8]) tuple(%d, %gather.2)
}

%end (p0: f32[2,8]) -> f32[8,8] {
  %p0 = f32[2,8]{1,0} parameter(0)
  %gather.3 = f32[8,8]{1,0} all-gather(%p0), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="7"}
  ROOT %c = f32[8,8]{1,0} custom-call(%gather.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[2,8], y: f32[8,8]) -> f32[8,8] {
  %x = f32[2,8]{1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %s = (f32[2,8], f32[8,8]) fusion(%x), kind=kCustom, calls=%begin
  %xs = f32[2,8]{1,0} get-tuple-element(%s), index=0
  %f = (f32[8,8], f32[8,8]) fusion(%xs, %y), kind=kOutput, calls=%both
  %a = f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}
  ROOT %g = f32[8,8]{1,0} fusion(%xs), kind=kCustom, calls=%end
}
"""


def test_a_collective_that_a_tpu_carries_through_fusions_runs_once_and_beside_them():
    (row,) = collectives.count_collectives(CARRIED, {"fsdp": 4})
    assert (row.op, row.count, row.bytes) == ("all-gather", 1, 8 * 8 * 4 * 3 // 4)
    module = parse.parse(CARRIED)
    found = roofline.analyze(module, Second())
    assert found.seconds == pytest.approx(2.0)  # the dot inside of the fusion computes as well
    for takes, waits in ((1.5, 0.0), (2.5, 0.5)):
        moving = {("begin", "gather.1"): overlap.TransferTime(takes)}
        assert overlap.exposed_seconds(module, found, moving) == {("begin", "gather.1"): pytest.approx(waits)}
    line = overlap.Timeline(module, {("main", "f"): 1.0, ("main", "a"): 1.0}, moving)
    assert line.run("main") == pytest.approx(2.5)


# An all-reduce between two slices, by way of the hosts.
BETWEEN = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %t = token[] after-all()
  %s = (f32[8,8], u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="r.1_0",_xla_megascale_transfer_type="ALL_REDUCE"}
  %r = (f32[8,8], u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="r.1_0",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sd = token[] send-done(%s), channel_id=1, is_host_transfer=true
  %a = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}
  %rd = (f32[8,8], token[]) recv-done(%r), channel_id=2, is_host_transfer=true
  ROOT %g = f32[8,8]{1,0} get-tuple-element(%rd), index=0
}
"""  # noqa: E501


def test_what_slices_send_each_other_ends_where_it_is_received():
    module = parse.parse(BETWEEN)
    moving = {("main", "s"): overlap.TransferTime(1.5)}
    assert overlap.exposed_seconds(module, roofline.analyze(module, Second()), moving) == {
        ("main", "s"): pytest.approx(0.5)
    }


def test_other_wires_do_not_wait_for_each_other():
    """A copy to the host runs beside a collective, two collectives take turns."""
    lines = LINES.replace(
        "  %a = f32",
        "  %h = (f32[8,8]{1,0:S(5)}, f32[8,8]{1,0}, u32[]) copy-start(%x)\n  %a = f32", 1,
    ).replace("  %r = f32", "  %hd = f32[8,8]{1,0:S(5)} copy-done(%h)\n  %r = f32", 1)  # fmt: skip
    module = parse.parse(lines)
    found = roofline.analyze(module, Second())
    keys = [("body", name) for name in ("g", "h", "r")]
    assert [one.kind for one in found.operations if one.host_bytes] == ["to host"]
    for wires, waits in (("to host", 0.5), ("network", 2.0)):
        moving = dict(
            zip(
                keys,
                (
                    overlap.TransferTime(1.5, "network"),
                    overlap.TransferTime(1.5, wires),
                    overlap.TransferTime(0.25, "network"),
                ),
            )
        )
        assert sum(overlap.exposed_seconds(module, found, moving).values()) == pytest.approx(waits + 0.25)


def test_a_copy_to_the_host_takes_the_bus():
    h100, nobody = nodes(1), Fabric(None, ALL, (), ())
    assert h100.host_copy_time(64e9).seconds == pytest.approx(1.0, rel=1e-3)
    assert h100.host_copy_time(64e9).network == "PCIe"
    assert nobody.host_copy_time(1.0).seconds is None


def islands(rate: str) -> Fabric:
    """Two replicas of 16 GPUs, each on two nodes, with a slow link between them."""
    return dataclasses.replace(nodes(4), slow_link=SlowLink(rate, parse_rate(rate), 2))


def test_replicas_share_a_slow_link():
    fabric, sent = islands("10Gbit"), 1e6
    pairs = [[device, device + 16] for device in range(16)]
    # All 16 devices of a replica send 1 MB over 1.25 GB/s.
    assert fabric.collective_time("all-reduce", pairs, sent) == CollectiveTime(16 * sent / 1.25e9, "10Gbit")
    assert fabric.collective_time("collective-permute", pairs, sent).seconds == pytest.approx(16 * sent / 1.25e9)
    # Of a group over all devices half of the tensor crosses, twice: the bytes are 2 * 31 / 32 * tensor.
    tensor = sent * 32 / 31 / 2
    found = fabric.collective_time("all-reduce", [list(range(32))], sent)
    assert found.seconds == pytest.approx(2 * tensor / 2 / 1.25e9)
    assert fabric.collective_time("all-to-all", [list(range(32))], sent).seconds == pytest.approx(
        16 * (sent * 32 / 31) / 2 / 1.25e9
    )
    assert fabric.exchange_time(sent).seconds == pytest.approx(16 * sent / 1.25e9)


def test_a_slow_link_is_not_inside_replicas_nor_faster_than_they_are():
    inside = [list(range(16)), list(range(16, 32))]
    plain = dataclasses.replace(islands("10Gbit"), slow_link=None)
    assert islands("10Gbit").collective_time("all-reduce", inside, 1e6) == plain.collective_time(
        "all-reduce", inside, 1e6
    )
    pairs = [[device, device + 16] for device in range(16)]
    assert islands("900Tbit").collective_time("all-reduce", pairs, 1e6) == plain.collective_time(
        "all-reduce", pairs, 1e6
    )


@pytest.mark.parametrize(
    ("text", "rate"), [("10Gbit", 1.25e9), ("400 Mbit/s", 5e7), ("1.5GB", 1.5e9), ("1gbps", 1.25e8)]
)
def test_rates_of_links(text: str, rate: float):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "10", "10G", "0Gbit", "-1Gbit", ""])
def test_no_rates_of_links(text: str):
    with pytest.raises(UserError, match="expected one such as 10Gbit"):
        parse_rate(text)


def test_exchanges_are_the_mean_of_a_step_and_hidden_while_steps_compute():
    fabric = islands("10Gbit")
    seconds = 16 * 1e6 / 1.25e9

    def row(*exchange: float, compute: float = 1.0):
        return transfers.exchange_row(SimpleNamespace(exchange=exchange), 10, fabric, compute)  # pyright: ignore

    assert row(0.0, 0.0, 0.0, 0) is None
    waits = row(1e6, 1e6, 0.0, 0)
    assert (waits.bytes, waits.hidden) == (1e5, 0.0)
    assert waits.exposed == pytest.approx(seconds / 10)
    assert row(1e6, 5e5, 1e6, 2).exposed == pytest.approx(0)
    # Each of two steps hides 1 ms of its half.
    assert row(1e6, 5e5, 1e6, 2, compute=1e-3).exposed == pytest.approx((seconds - 2e-3) / 10)
