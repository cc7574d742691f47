"""Plans of islands: sums worked out by hand, a simulation of the links, bytes of real programs, and what is shown."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from flax import nnx
from plan_examples import fitting, refused, simulated
from rich.console import Console

import jaxtrain
from jaxtrain.cli.main import main
from jaxtrain.config.schema import Config
from jaxtrain.config.sections.island_config import program_config
from jaxtrain.core.program import Program, build_program
from jaxtrain.core.resolve import load_config
from jaxtrain.errors import UserError
from jaxtrain.islands.callback import tensors
from jaxtrain.islands.partition import partition
from jaxtrain.islands.pieces import pieces_of
from jaxtrain.islands.server.process import ServerProcess
from jaxtrain.islands.server.rules import ExchangeRule, Header
from jaxtrain.islands.shard_encoder import ShardEncoder
from jaxtrain.islands.trees import flatten_dict
from jaxtrain.planning import advice, islands, step_program
from jaxtrain.planning.cost import exchange_price
from jaxtrain.planning.hardware import calibration, chips
from jaxtrain.planning.report import diff, page, terminal
from jaxtrain.planning.result import Advice, Plan, PricedStrategy
from jaxtrain.sync.quantized_mean import BITS

RATE = 125e6  # bytes/s of 1Gbit
MB = 10**6
TINY: dict[str, Any] = {
    "simulate": 2, "layout": "fsdp", "step": {"attention": "reference"},
    "model": {"embed": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 128, "vocab": 64},
    "data": {"sources": [{"path": "not/there"}], "sequence": 64, "global_batch": 8},
}  # fmt: skip


def priced(sent: int = 125 * MB, received: int = 125 * MB, every: int = 1, **changes: Any) -> PricedStrategy:
    """Four islands with steps of 2 s and 1,000 tokens, one server, and a second to push and a second to read."""
    options = {"rate": RATE, "seconds": 2.0, "tokens": 1000, "count": 4, "servers": 1} | changes
    return exchange_price.price("it", "sync.strategy=it", sent, received, every, **options)


def test_islands_that_exchange_at_the_same_time_share_the_link_of_the_server():
    one = priced()  # 4 s in which all push, 4 s in which all read
    assert (one.exchange_seconds, one.wait_seconds, one.step_seconds) == (8.0, 8.0, 10.0)
    assert (one.wait_share, one.tokens_per_second) == (0.8, 400.0)
    assert one.server_bytes == 1000 * MB  # 500 in, 500 out


@pytest.mark.parametrize(("servers", "seconds"), [(1, 8.0), (2, 4.0), (4, 2.0), (8, 2.0)])
def test_servers_share_the_bytes_until_the_link_of_an_island_counts(servers: int, seconds: float):
    one = priced(servers=servers)
    assert one.exchange_seconds == seconds
    assert one.server_bytes * servers == 1000 * MB


@pytest.mark.parametrize(
    ("server", "servers", "seconds"),
    [(RATE, 1, 8.0), (2 * RATE, 1, 4.0), (4 * RATE, 1, 2.0), (float("inf"), 1, 2.0), (RATE / 2, 1, 16.0),
     (2 * RATE, 2, 2.0)],
)  # fmt: skip
def test_a_server_may_have_another_link_than_an_island(server: float, servers: int, seconds: float):
    one = priced(server_rate=server, servers=servers)  # 1,000 MB through those of the servers, 250 MB through its own
    assert one.exchange_seconds == seconds
    assert one.step_seconds == 2.0 + seconds
    assert one.server_bytes * servers == 1000 * MB


def test_islands_without_a_server_send_and_receive_at_the_same_time():
    one = priced(servers=0, every=4)
    assert (one.exchange_seconds, one.wait_seconds, one.step_seconds) == (1.0, 0.25, 2.25)
    assert one.server_bytes == 0


def test_an_island_alone_has_its_own_link():
    one = priced(250 * MB, 125 * MB, count=1)
    assert (one.exchange_seconds, one.tokens_per_second) == (3.0, 200.0)  # 2 s to push, 1 s to read


def test_rounds_divide_the_wait_by_their_steps():
    one = priced(every=16)
    assert (one.exchange_seconds, one.wait_seconds, one.step_seconds) == (8.0, 0.5, 2.5)
    assert (one.sent, one.sent_a_step, one.received_a_step) == (125 * MB, 7.8125 * MB, 7.8125 * MB)
    assert (one.wait_share, one.tokens_per_second) == (0.2, 1600.0)


@pytest.mark.parametrize(
    ("sent", "received", "servers", "seconds", "step"),
    [
        (125, 125, 1, 2.0, 4.0),  # 2 s and the two of its own link; those of 4 pushes are as long
        (125, 125, 1, 0.5, 4.0),  # 4 pushes through the link of the server
        (125, 125, 2, 0.5, 2.5),
        (125, 250, 1, 2.0, 8.0),  # 4 reads
        (250, 125, 1, 7.0, 10.0),
    ],
)
def test_islands_that_exchange_at_different_times(sent: int, received: int, servers: int, seconds: float, step: float):
    one = priced(sent * MB, received * MB, servers=servers, seconds=seconds, is_lockstep=False)
    assert one.step_seconds == pytest.approx(step)
    assert one.wait_seconds == one.exchange_seconds == pytest.approx(step - seconds)
    assert one.tokens_per_second == pytest.approx(4000 / step)


def test_islands_that_exchange_at_different_times_do_not_wait_for_a_fast_server():
    assert priced(seconds=0.5, server_rate=4 * RATE, is_lockstep=False).exchange_seconds == 2.0  # its own link
    assert priced(seconds=0.5, server_rate=RATE / 2, is_lockstep=False).exchange_seconds == 7.5  # 4 pushes of 2 s


@pytest.mark.parametrize("seconds", [0.1, 1.0, 3.0, 9.0])
@pytest.mark.parametrize(("sent", "received"), [(125, 125), (250, 125), (125, 375)])
def test_the_step_of_ssp_is_that_of_islands_that_queue_for_a_link(seconds: float, sent: int, received: int):
    """Each way of the server's link serves one island after the other, in the order in which they come."""
    steps, free, done = 200, {"in": 0.0, "out": 0.0}, [0] * 4
    events = [(seconds * (1 + 0.1 * index), index, "in") for index in range(4)]
    while events:
        now, index, way = min(events)
        events.remove((now, index, way))
        free[way] = max(now, free[way]) + (sent if way == "in" else received) * MB / RATE
        done[index] += way == "out"
        if done[index] < steps:
            events.append((free[way] + (0.0 if way == "in" else seconds), index, "out" if way == "in" else "in"))
    one = priced(sent * MB, received * MB, seconds=seconds, is_lockstep=False)
    assert one.step_seconds == pytest.approx(max(free.values()) / steps, rel=0.03)


def test_unknown_rates_and_steps_leave_the_bytes():
    one = priced(rate=None)
    assert (one.server_bytes, one.exchange_seconds, one.wait_share) == (1000 * MB, None, None)
    one = priced(seconds=None)
    assert (one.exchange_seconds, one.wait_seconds, one.step_seconds) == (8.0, 8.0, None)
    assert priced(seconds=None, is_lockstep=False).exchange_seconds is None


def choices(**seconds: float) -> list[PricedStrategy]:
    return [
        exchange_price.price(
            name, f"sync.strategy={name}", round(s * RATE / 2), round(s * RATE / 2), 1, 1, 1, rate=RATE, seconds=9.0,
            tokens=10,
        ) for name, s in seconds.items()
    ]  # fmt: skip


def test_the_strictest_strategy_with_a_small_wait_is_chosen():
    keys, why = exchange_price.choose(choices(bsp=9.0, ssp=0.9, diloco=0.1))
    assert keys == "sync.strategy=ssp"
    assert why == "it waits for 9.1% of a step, less than 10%; the next stricter one, bsp, waits for 50.0%"
    keys, why = exchange_price.choose(choices(bsp=0.9, ssp=0.5))
    assert (keys, why) == ("sync.strategy=bsp", "it waits for 9.1% of a step, less than 10%, and no other is as strict")
    assert exchange_price.choose(choices(bsp=9.0, ssp=1.0, diloco=0.9))[0] == "sync.strategy=diloco"  # 10% is not less


def test_else_the_fastest_one_is_chosen():
    keys, why = exchange_price.choose(choices(bsp=9.0, ssp=5.0, diloco=6.0))
    assert (keys, why) == ("sync.strategy=ssp", "none waits for less than 10% of a step, and it has the most tokens/s")
    keys, why = exchange_price.choose([priced(rate=None)])
    assert keys == ""
    assert "expected --dcn RATE" in why


def config(*overrides: str) -> Config:
    return load_config(None, "islands.count=4", "data.global_batch=64", *overrides, paths=False, checks=())


def island_plan(
    *overrides: str, plan: Plan | None = None, dcn: str | None = "1Gbit", server_dcn: str | None = None
) -> Plan:
    """The plan of `plan_examples.fitting`, whose steps take a second, as one of four islands."""
    sizes = {"gradients": 250 * MB, "params": 125 * MB, "mutable": 0, "mean": 250 * MB, "mutable mean": 0}
    sizes |= {"changes int4": 34 * MB, "mean int4": 33 * MB}
    return islands.with_islands(config(*overrides), plan or fitting(tree_bytes=sizes), dcn, server_dcn)


def test_a_plan_has_the_wait_in_its_step_and_its_bytes_in_the_communication():
    plan = island_plan("sync.strategy=bsp")
    assert plan.islands is not None
    assert (plan.islands.own.sent, plan.islands.own.received) == (250 * MB, 125 * MB)
    assert plan.step_seconds == pytest.approx(1.0 + 12.0)  # 8 s in which four push, 4 s in which four read
    assert plan.exposed_seconds == pytest.approx(0.2 + 12.0)
    assert (plan.mfu, plan.hfu) == (pytest.approx(0.3 / 13), pytest.approx(0.4 / 13))
    assert plan.islands.own.tokens_per_second == pytest.approx(4 * (plan.tokens_per_second or 0))
    row = plan.traffic[0]
    assert (row.axes, row.network, row.bytes, row.exposed) == ("islands", "1Gbit", 15_625_000, 12.0)
    assert plan.bottleneck.endswith("most of it exchange over islands (1Gbit)")
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_a_plan_with_a_link_of_the_server():
    plan = island_plan("sync.strategy=bsp", server_dcn="2Gbit")
    assert plan.islands is not None
    assert (plan.islands.server_link, plan.islands.server_rate) == ("2Gbit", 2 * RATE)
    waits = [each.wait_seconds for each in plan.islands.choices]
    assert waits == pytest.approx([6, 3, 0.25, 0.0625, 0.015625])  # half as long, all of them by that link
    said = "4 islands, 1 server; link 1Gbit of 125 MB/s each way, of a server 2Gbit of 250 MB/s"
    for shown in (" ".join(text(plan).split()), page.page(plan, "my.yaml")):
        assert said in shown
        assert "each server is on a machine of its own, and links carry both ways at once" in shown
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    with pytest.raises(UserError, match="--server-dcn fast: no rate of a link"):
        island_plan(server_dcn="fast")


def test_a_plan_without_a_server():
    """Four islands: each sends three quarters of its parameters, and three times a quarter of the mean, in float32."""
    plan = island_plan("sync.strategy=diloco", "sync.every=16", "islands.servers=0", "steps=1024")
    own = plan.islands.own
    assert own.sent == own.received == 3 * 125 * MB // 4 + 3 * 250 * MB // 4
    assert own.exchange_seconds == pytest.approx(own.sent / RATE)
    assert plan.step_seconds == pytest.approx(1.0 + own.sent / RATE / 16)
    names = [f"{strategy}, every {every}" for strategy in ("diloco", "gossip") for every in (16, 64, 256)]
    assert [each.name for each in plan.islands.choices] == names
    for shown in (" ".join(text(plan).split()), page.page(plan, "my.yaml")):
        assert "4 islands, no server; link 1Gbit of 125 MB/s each way" in shown
        assert "each server is on a machine of its own" not in shown
        assert "through its link" not in shown


@pytest.mark.parametrize(
    ("graph", "count", "messages"), [("ring", 4, 2), ("ring", 2, 1), ("exponential", 4, 1), ("matching", 4, 1)]
)
def test_a_plan_of_gossip(graph: str, count: int, messages: int):
    """Each sends its parameters, and receives those of as many others, at the same time."""
    gossip = ("sync.strategy=gossip", f"sync.gossip.graph={graph}", "sync.every=50", "islands.servers=0")
    found = island_plan(*gossip, f"islands.count={count}", "steps=1000").islands
    assert found is not None
    own = found.own
    assert (own.name, own.keys) == ("gossip, every 50", "sync.strategy=gossip sync.every=50")
    assert own.sent == own.received == messages * 125 * MB
    assert own.wait_seconds == pytest.approx(messages * 1.0 / 50)
    assert own in found.choices


def test_gossip_is_chosen_where_no_average_is_fast_enough():
    plan = island_plan("sync.strategy=diloco", "islands.servers=0", "steps=512", "sync.every=256", dcn="8Mbit")
    assert plan.islands is not None
    chosen = "sync.strategy=gossip sync.every=256"
    shares = [each.wait_share for each in plan.islands.choices]
    assert min(shares) == shares[-1] == pytest.approx(125 / 256 / (1 + 125 / 256))
    assert plan.islands.chosen == chosen  # none waits for less than a tenth, and it has the most tokens/s
    ring = island_plan("sync.strategy=diloco", "islands.servers=0", "sync.gossip.graph=ring").islands
    assert ring.choices[-1].keys == f"{chosen} sync.gossip.graph=exponential"
    few_bits = island_plan("sync.strategy=diloco", "islands.servers=0", "sync.compress.deltas=int4").islands
    assert few_bits.choices[-1].keys == f"{chosen} sync.compress.deltas=none"
    assert few_bits.own.sent == few_bits.own.received == 3 / 4 * (34 + 33) * MB
    asked = island_plan("sync.strategy=diloco", "islands.servers=0", "islands.quorum=2").islands
    assert not any("gossip" in each.keys for each in asked.choices)  # which has no quorum


def test_the_choices_of_a_plan():
    plan = island_plan("sync.strategy=local_sgd", "sync.every=100", "steps=1000")
    assert plan.islands is not None
    assert (plan.islands.own.name, plan.islands.own.sent) == ("local_sgd, every 100", 125 * MB)
    names = ["bsp", "ssp", *(f"diloco, every {every}" for every in (16, 64, 100, 256))]
    assert [each.name for each in plan.islands.choices] == names
    waits = [each.wait_seconds for each in plan.islands.choices]
    # 12 s; 8 s of four pushes less the second of a step; 8 s of four pushes and four reads, over the steps of a round.
    assert waits == pytest.approx([12, 7, 0.5, 0.125, 0.08, 0.03125])
    assert plan.islands.chosen == "sync.strategy=diloco sync.every=100"  # 0.125 of 1.125 is more than a tenth
    assert island_plan("steps=1000").islands.chosen == "sync.strategy=diloco sync.every=256 steps=1024"


def test_ssp_without_a_bound_to_use_is_bsp():
    plans = [
        island_plan(*keys).islands for keys in (("sync.strategy=bsp",), ("sync.strategy=ssp", "sync.stale.bound=0"))
    ]
    assert plans[0].own.wait_seconds == plans[1].own.wait_seconds == 12.0
    assert island_plan("sync.strategy=asp").islands.own.wait_seconds == 7.0
    assert island_plan("sync.strategy=asp").islands.choices[1].keys == "sync.strategy=asp"


def test_without_a_rate_the_link_is_the_network_of_the_target():
    found = island_plan(dcn=None).islands
    card = float(chips.CHIPS["h100"].outside.bandwidth) * calibration.calibration_of("h100").outside
    assert (found.link, found.rate) == (chips.CHIPS["h100"].outside.name, pytest.approx(16 * card))


def test_a_plan_without_times_or_without_a_step():
    unknown = simulated()
    plan = island_plan(plan=fitting(**{**vars(unknown), "tree_bytes": fitting_bytes()}), dcn=None)
    assert (plan.islands.rate, plan.islands.chosen, plan.islands.own.sent) == (None, "", 8)
    assert "expected --dcn RATE" in text(plan)
    assert island_plan(plan=refused()) == refused()


def fitting_bytes() -> dict[str, int]:
    return {"gradients": 8, "params": 8, "mutable": 0, "mean": 8, "mutable mean": 0}


def test_advice_on_rows_is_on_those_of_the_run(monkeypatch):
    found = [Advice("data.global_batch=32", 0.2, "why"), Advice("mesh.model=4", 0.1, "why")]
    monkeypatch.setattr(advice, "suggest", lambda config, plan: found if config.data.global_batch == 16 else [])
    assert [one.change for one in island_plan().advice] == ["data.global_batch=128", "mesh.model=4"]


def text(plan: Plan) -> str:
    console = Console(width=80, highlight=False)
    with console.capture() as found:
        console.print(terminal.report(plan, "my.yaml", 80))
    return found.get()


def test_reports_show_the_islands():
    plan = island_plan("sync.strategy=bsp")
    shown, html = text(plan), page.page(plan, "my.yaml")
    for words in (
        "4 islands, 1 server; link 1Gbit of 125 MB/s each way", "12.00 s", "92.3% waits",
        "sync.strategy=diloco sync.every=", "diloco, every 64", "each server is on a machine of its own",
    ):  # fmt: skip
        assert words in " ".join(shown.split())
        assert words in html
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "islands" not in text(fitting())
    rows = {row.name: row for row in diff.rows(plan, island_plan("sync.strategy=asp"))}
    row = rows["tokens/s of all islands"]
    assert (row.a, row.b) == (pytest.approx(2e6 / 13), pytest.approx(2e6 / 8))


def program(*overrides: str) -> tuple[Config, Program]:
    found = load_config(TINY, "islands.count=2", *overrides, paths=False, checks=())
    return found, build_program(program_config(found), 64, jax.devices()[:2])


@pytest.mark.parametrize(
    "keys",
    [("precision=fp32",), ("precision=bf16",), ("precision=bf16_pure",), ("precision=fp16",),
     ("precision=bf16_pure", "step.microbatches=2")],
)  # fmt: skip
def test_bytes_of_pushed_gradients_are_those_of_the_step(keys: tuple[str, ...]):
    _, made = program("sync.strategy=ssp", *keys)
    grads = jax.eval_shape(made.step_with_gradients, made.state, step_program.abstract_batch(made))[2]
    expected = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(grads))
    assert step_program.tree_bytes(made)["gradients"] == expected


SIZES = {
    "gradients": 200, "params": 200, "mutable": 8, "gradients int8": 55, "changes int8": 60, "message int8": 52,
    "params int8": 210,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "sent", "received"),
    [
        (("bsp", "gradients"), 55, 52),
        (("ssp", "gradients"), 55, 208),  # messages of four updates
        (("diloco", "deltas"), 68, 60),
        (("async_diloco", "deltas"), 68, 218),  # all that the servers hold
    ],
)  # fmt: skip
def test_bytes_in_few_bits_are_those_of_pushes_and_messages(keys: tuple[str, str], sent: int, received: int):
    strategy, key = keys
    overrides = (f"sync.strategy={strategy}", f"sync.compress.{key}=int8", "sync.every=100", "steps=1000")
    found = island_plan(*overrides, plan=fitting(tree_bytes=SIZES)).islands
    assert (found.own.sent, found.own.received) == (sent, received)
    loosest = found.choices[-1]
    expected = " sync.compress.gradients=none" if key == "gradients" else ""
    assert loosest.keys == f"sync.strategy=diloco sync.every=256 steps=1024{expected}"
    assert loosest.sent == (208 if key == "gradients" else 68)


@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "int2"])
def test_bytes_in_few_bits_are_those_that_travel(form: str):
    made_for, made = program("sync.strategy=diloco", "precision=fp32")
    sizes, params = step_program.tree_bytes(made), made.one["params"]
    zeros = jax.tree.map(lambda p: jax.device_put(jnp.zeros(p.shape, jnp.float32), p.sharding), params)
    specs = tensors(made_for, made)
    flat, _ = ShardEncoder(flatten_dict({"params": params}), BITS[form])(flatten_dict({"params": zeros}), None)
    (parts,) = partition(specs, 1)
    pushed = sum(piece.values.nbytes for pieces in pieces_of(flat, parts).values() for piece in pieces)
    assert sizes[f"changes {form}"] == sizes[f"gradients {form}"] == pushed
    server = ServerProcess(ExchangeRule(made_for.sync, of_changes=True), specs, BITS[form])
    values = {path: np.asarray(x) for path, x in flatten_dict({"params": zeros}).items()}
    state, *_ = server.begin(values)
    whole, message = server.update(state, Header((0,), (1.0,), (1.0,), 0, 1.0, (True,)), values)[3]
    assert (sizes[f"params {form}"], sizes[f"message {form}"]) == (whole, message)
    assert message < pushed < {"int8": 0.29, "fp8": 0.29, "int4": 0.17, "int2": 0.11}[form] * sizes["params"]


class Normalised(nnx.Module):
    """A layer behind a batch norm, and an integer that counts passes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 4, rngs=rngs)
        self.passes = nnx.Variable(jnp.zeros((), jnp.int32))

    def loss(self, batch: Any, key: Any) -> Any:
        self.passes.set_value(self.passes[...] + 1)
        return jnp.mean(jnp.square(self.head(self.norm(batch["x"])) - batch["y"]))


@pytest.mark.parametrize(("strategy", "mutable"), [("diloco", 32), ("bsp", 0)])
def test_bytes_of_what_the_servers_hold(strategy: str, mutable: int):
    changes = {"model": {"type": "test_plan_islands:Normalised"}, "rules": {"batch": []}}
    found = tiny_net.config(sync={"strategy": strategy}, islands={"count": 2}, **changes)
    made = build_program(program_config(found), None, jax.devices()[:1], tiny_net.rows(0))
    sizes = step_program.tree_bytes(made)
    assert sizes.pop("mutable") == 32  # mean and variance
    assert sizes.pop("mutable mean") == 32
    assert sizes.pop("mean") == 4 * sum(leaf.size for leaf in jax.tree.leaves(made.one["params"]))
    assert set(sizes.values()) == {4 * 28}  # scale, bias, 16 + 4: too small for blocks
    assert {"gradients", "params", "changes int8", "message fp8"} <= set(sizes)
    assert sizes["params"] + mutable == sum(spec.nbytes for spec in tensors(found, made).values())


def test_a_real_plan_of_an_island():
    plan = jaxtrain.plan(TINY, "simulate:2", "islands.count=2", "sync.strategy=ssp", dcn="1Gbit", server_dcn="100Gbit")
    count = sum(leaf.size for leaf in jax.tree.leaves(program()[1].one["params"]))
    assert plan.islands is not None
    assert plan.islands.own.sent == plan.islands.own.received == 4 * count
    assert plan.tokens == 4 * 64  # half of the rows
    wait = plan.islands.own.wait_seconds
    assert wait is not None
    assert wait == pytest.approx(8 * count / RATE)  # of its own link alone
    assert plan.islands.server_rate == 100 * RATE
    assert plan.step_seconds == pytest.approx(plan.compute_seconds + plan.exposed_seconds)


def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(json.dumps(TINY))
    words = ["plan", "my.yaml", "--target", "simulate:2", "islands.count=3", "data.global_batch=8"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data.global_batch" in line
    with pytest.raises(UserError, match="--server-dcn: the run has no server"):
        jaxtrain.plan(TINY, "simulate:2", server_dcn="1Gbit")
    with pytest.raises(UserError, match="--server-dcn fast: no rate"):
        jaxtrain.plan(TINY, "simulate:2", "islands.count=2", server_dcn="fast")
    with pytest.raises(UserError, match=r"islands\.count: a search is of one program, and there are 2 islands"):
        jaxtrain.search(TINY, "h100:1x2", "islands.count=2")
