"""The parser on small programs of every form that CPU, CUDA and TPU write, with figures worked out by hand."""

from __future__ import annotations

import pytest

from jaxtrain.hlo import collectives, device_groups, parse
from jaxtrain.sharding.layout import Layout

MESH = {"data": 2, "fsdp": 4}  # device = 4 * data + fsdp


def program(*lines: str, more: str = "") -> str:
    """A module whose entry computation holds these lines; computations that it calls come first."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule jit_step, is_scheduled=true\n\n{more}\n\nENTRY %main.1 (p: f32[8]) -> f32[] {{\n"
        f"  %p = f32[8]{{0}} parameter(0)\n{body}\n  ROOT %end = f32[] constant(0)\n}}\n"
    )


def rows(*lines: str, more: str = "", sizes: dict[str, int] = MESH) -> list[tuple]:
    """(op, where, count, bytes, dtype) of every row."""
    found = collectives.count_collectives(program(*lines, more=more), sizes)
    return [(row.op, row.axes_text, row.count, row.bytes, row.dtype) for row in found]


def over(listed: str) -> str:
    """Attributes of a collective with these groups."""
    return f"channel_id=1, replica_groups={listed}, use_global_device_ids=true"


OVER_FSDP = "replica_groups=[2,4]<=[8], use_global_device_ids=true"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16[2,64]{1,0}", 256),
        ("bf16[1,1024,8,128]{1,3,2,0:T(8,128)(2,1)S(1)}", 2097152),
        ("f32[]", 4),
        ("s4[5]{0}", 3),  # 20 bits
        ("f8e4m3fn[10]{0}", 10),
        ("pred[10]{0}", 10),
        ("c64[3]{0}", 24),
        ("f32[<=16]{0}", 64),
        ("token[]", 0),
        ("(f32[2], (bf16[3]{0:T(8)(2,1)}, u32[]), /*index=2*/s8[7])", 8 + 6 + 4 + 7),
        ("()", 0),
    ],
)
def test_bytes_of_shapes(text: str, expected: int):
    assert parse.parse_shape(text).bytes == expected


def test_unknown_element_type_is_named():
    with pytest.raises(ValueError, match="unknown element type `weird`"):
        _ = parse.parse_shape("weird[3]").bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[1,8]<=[8]", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['axis_0'=8] {'axis_0'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['axis_0'=2,'axis_1'=4,'axis_2'=1] {'axis_1'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh[a=2,b=2,c=2] {a,c}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        # The mesh counts 0,4,1,5,...: its first axis, of 4, is the second of the devices.
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),  # the outer half of the axis
        ("mesh['a'=8] {'a':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_replica_groups(text: str, expected: list[list[int]]):
    line = f", channel_id=1, replica_groups={text}, use_global_device_ids=true"
    assert device_groups.replica_groups_text(line) == text
    assert [list(group) for group in device_groups.replica_groups(text, 8)] == expected


def test_unknown_replica_groups_are_refused():
    with pytest.raises(ValueError, match="unknown form"):
        device_groups.replica_groups_text(", replica_groups=<something new>")


@pytest.mark.parametrize(
    ("members", "axes", "whole"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",), True),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], ("data",), True),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], ("data", "fsdp"), True),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], ("fsdp",), False),
        ([[0, 5], [1, 4]], ("data", "fsdp"), False),
        ([[0, 1, 2, 3], [4, 5], [6], [7]], ("fsdp",), False),
        ([[0], [1]], (), True),
    ],
)
def test_axes_of_groups(members, axes, whole):
    assert device_groups.group_axes(members, MESH) == (axes, whole)


def test_ring_bytes_of_every_operation():
    assert sorted(
        rows(
            f"%a = bf16[8,64]{{1,0}} all-gather(%p), {OVER_FSDP}, dimensions={{0}}",  # 1024 bytes, 3 of 4 arrive
            f"%b = f32[16]{{0}} reduce-scatter(%p), {OVER_FSDP}, dimensions={{0}}, to_apply=%add",  # 256 bytes in all
            f"%c = f32[16]{{0}} all-reduce(%p), {OVER_FSDP}, to_apply=%add",
            f"%d = (f32[2], f32[2], f32[2], f32[2]) all-to-all(%p, %p, %p, %p), {OVER_FSDP}",
            f"%e = f32[100]{{0}} ragged-all-to-all(%p, %o, %i, %i, %i, %i), {OVER_FSDP}",  # of the operand's 32
            f"%h = f32[4]{{0}} ragged-all-to-all(%p, %o, %i, %i, %i, %i), {OVER_FSDP}",  # of the result's 16
            "%f = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3}}",
            "%g = f32[16]{0} collective-broadcast(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}",
        )
    ) == [
        ("all-gather", "fsdp", 1, 768, "bf16"),
        ("all-reduce", "fsdp", 1, 96, "f32"),
        ("all-to-all", "fsdp", 1, 24, "f32"),
        ("collective-broadcast", "data", 1, 32, "f32"),
        ("collective-permute", "fsdp", 1, 64, "f32"),
        ("ragged-all-to-all", "fsdp", 2, 36, "f32"),
        ("reduce-scatter", "fsdp", 1, 192, "f32"),
    ]


def test_started_and_done_count_once():
    assert sorted(
        rows(
            f"%a = (bf16[2,64]{{1,0}}, bf16[8,64]{{1,0}}) all-gather-start(%p), {OVER_FSDP}, dimensions={{0}}",
            "%a.done = bf16[8,64]{1,0} all-gather-done(%a)",
            # Two gathers combined into one: 1024 + 2048 bytes.
            "%b = ((bf16[2,64], f32[2,64]), (bf16[8,64]{1,0}, /*index=1*/f32[8,64]{1,0})) all-gather-start(%p, %p), "
            f"{OVER_FSDP}, dimensions={{0}}",
            "%b.done = (bf16[8,64]{1,0}, f32[8,64]{1,0}) all-gather-done(%b)",
            f"%c = ((f32[64]{{0}}), f32[16]{{0}}) reduce-scatter-start(%p), {OVER_FSDP}, to_apply=%add",
            "%c.done = f32[16]{0} reduce-scatter-done(%c)",
            f"%d = f32[16]{{0}} all-reduce-start(%p), {OVER_FSDP}, to_apply=%add",
            "%d.done = f32[16]{0} all-reduce-done(%d)",
            f"%d2 = (f32[16]{{0}}, f32[48]{{0}}) all-reduce-start(%p, %p), {OVER_FSDP}, to_apply=%add",
            "%d2.done = (f32[16]{0}, f32[48]{0}) all-reduce-done(%d2)",
            f"%e = ((f32[64]{{0}}), f32[64]{{0}}) all-to-all-start(%p), {OVER_FSDP}",
            "%e.done = f32[64]{0} all-to-all-done(%e)",
            "%f = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,4}}",
            "%f.done = f32[16]{0} collective-permute-done(%f)",
        )
    ) == [
        ("all-gather", "fsdp", 1, 768, "bf16"),
        ("all-gather", "fsdp", 1, 768 + 1536, "bf16+f32"),
        ("all-reduce", "fsdp", 2, 96 + 384, "f32"),
        ("all-to-all", "fsdp", 1, 192, "f32"),
        ("collective-permute", "data", 1, 64, "f32"),
        ("reduce-scatter", "fsdp", 1, 192, "f32"),
    ]


def test_within_a_device_nothing_is_sent():
    assert not rows(
        "%a = f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
        "%b = f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}",
        "%c = f32[8]{0} all-gather(%p), replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_1'}, dimensions={0}",
    )


def known(trips: int) -> str:
    return f'backend_config={{"known_trip_count":{{"n":"{trips}"}},"known_init_step":{{"init":"0","step":"1"}}}}'


GATHER = f"  %g = f32[16]{{0}} all-gather(%q), {OVER_FSDP}, dimensions={{0}}"  # 48 bytes
INNER = f"""
%inner_body (q: f32[4]) -> f32[4] {{
  %q = f32[4]{{0}} parameter(0)
{GATHER}, metadata={{op_name="jit(step)/while/body/inner"}}
}}

%inner_condition (q: f32[4]) -> pred[] {{
  ROOT %c = pred[] parameter(0)
}}

%fused (q: f32[4]) -> f32[16] {{
  %q = f32[4]{{0}} parameter(0)
{GATHER}
}}

%body (s: f32[4]) -> f32[4] {{
  %s = f32[4]{{0}} parameter(0)
  %w = f32[4]{{0}} while(%s), condition=%inner_condition, body=%inner_body, {known(3)}
  %f = f32[16]{{0}} fusion(%s), kind=kCustom, calls=%fused, metadata={{op_name="jit(step)/while/body/fused"}}
  ROOT %k = f32[16]{{0}} call(%s), to_apply=%fused, metadata={{op_name="jit(step)/while/body/called"}}
}}
"""


def test_loops_multiply_and_calls_are_followed():
    loop = f"%w = f32[4]{{0}} while(%p), condition=%inner_condition, body=%body, {known(5)}"
    found = collectives.count_collectives(program(loop, more=INNER), MESH)
    assert [(row.scope.rsplit("/")[-1], row.count, row.bytes, row.note) for row in found] == [
        ("inner", 15, 15 * 48, ""),
        ("called", 5, 5 * 48, ""),
        ("fused", 5, 5 * 48, ""),
    ]
    assert collectives.totals_by_axes(found) == {("fsdp", "all-gather"): (25, 25 * 48)}


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    (row,) = collectives.count_collectives(
        program("%w = f32[4]{0} while(%p), condition=%inner_condition, body=%inner_body", more=INNER), MESH
    )
    assert (row.count, row.note) == (1, "at least")


def counted(limit: int, step: int, first: int, direction: str = "LT") -> str:
    """A loop as TPU writes it: no trip count, the counter first in the tuple, copied on its way."""
    more = f"""
%cond (t: (s32[], f32[4])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant({limit})
  %t = (s32[]{{:T(128)}}, f32[4]{{0:T(256)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i, %limit), direction={direction}
}}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %t = (s32[]{{:T(128)}}, f32[4]{{0:T(256)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  %i.copy = s32[]{{:T(128)S(6)}} copy(%i)
  %q = f32[4]{{0:T(256)}} get-tuple-element(%t), index=1
{GATHER}
  %one = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)}} add(%i.copy, %one)
  ROOT %out = (s32[]{{:T(128)}}, f32[4]{{0:T(256)}}) tuple(%next, %q)
}}
"""
    return program(
        f"%zero = s32[]{{:T(128)}} constant({first})",
        "%start = s32[]{:T(128)} copy(%zero)",
        "%tuple = (s32[]{:T(128)}, f32[8]{0}) tuple(%start, %p)",
        "%w = (s32[]{:T(128)}, f32[4]{0}) while(%tuple), condition=%cond, body=%body",
        more=more,
    )


@pytest.mark.parametrize(
    ("limit", "step", "first", "direction", "trips"),
    [(4, 1, 0, "LT", 4), (8, 2, 0, "LT", 4), (7, 2, 0, "LT", 4), (8, 1, 3, "LT", 5), (4, 1, 0, "LE", 5)],
)
def test_trip_count_from_condition_step_and_start(limit, step, first, direction, trips):
    (row,) = collectives.count_collectives(counted(limit, step, first, direction), MESH)
    assert (row.count, row.note) == (trips, "")


def test_a_counter_that_goes_down_is_unknown():
    (row,) = collectives.count_collectives(counted(4, -1, 0), MESH)
    assert (row.count, row.note) == (1, "at least")


def test_reduce_scatter_as_tpu_writes_it():
    more = """
%all-reduce-scatter.1 (input.1: bf16[8,64]) -> bf16[2,64] {
  %input.1 = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.1 = bf16[8,64]{1,0:T(8,128)(2,1)} all-reduce(%input.1), replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %slice = bf16[2,64]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={2,64}
}
"""
    line = '%f = bf16[2,64]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="a/b"}'
    assert rows(line, more=more) == [("reduce-scatter", "fsdp", 1, 768, "bf16")]


def test_generic_asynchronous_calls_count_once():
    started = "((f32[4]), f32[16]) async-start(%p), calls=%fused"
    lines = (f"%a = {started}", "%u = ((f32[4]), f32[16]) async-update(%a), calls=%fused",
             "%d = f32[16]{0} async-done(%u), calls=%fused")  # fmt: skip
    assert rows(*lines, more=INNER) == [("all-gather", "fsdp", 1, 48, "f32")]


BRANCHES = """
%forward (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %s = f32[4]{0} all-reduce(%q), replica_groups=[2,4]<=[8], to_apply=%add
}

%shift (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %hop = f32[4]{0} collective-permute(%q), source_target_pairs={{0,1}}, metadata={op_name="jit(step)/cond/roll"}
}

%backward (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %k = f32[4]{0} call(%q), to_apply=%shift
}
"""


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%forward, %backward}", "true_computation=%forward, false_computation=%backward"],
)
def test_divergent_permutes_are_found(branches: str):
    text = program(f"%c = f32[4]{{0}} conditional(%i, %p, %p), {branches}", more=BRANCHES)
    assert collectives.divergent_permutes(text) == ["hop in computation shift (jit(step)/cond/roll)"]
    assert [(row.op, row.note) for row in collectives.count_collectives(text, MESH)] == [
        ("all-reduce", "at most"),
        ("collective-permute", "at most"),
    ]


def test_a_permute_in_a_loop_that_may_not_run_is_found():
    more = """
%body (c: (pred[], f32[4])) -> (pred[], f32[4]) {
  %c = (pred[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%c), index=1
  %hop = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1}}
  %off = pred[] constant(false)
  ROOT %t = (pred[], f32[4]{0}) tuple(%off, %hop)
}

%is_on (c: (pred[], f32[4])) -> pred[] {
  %c = (pred[], f32[4]{0}) parameter(0)
  ROOT %flag = pred[] get-tuple-element(%c), index=0
}
"""
    text = program("%w = (pred[], f32[4]{0}) while(%p), condition=%is_on, body=%body", more=more)
    assert collectives.divergent_permutes(text) == ["hop in computation body"]


def test_permutes_elsewhere_are_fine():
    lines = ("%c = f32[4]{0} conditional(%i, %p, %p), branch_computations={%forward, %forward}",
             "%d = f32[4]{0} call(%p), to_apply=%backward")  # fmt: skip
    assert collectives.divergent_permutes(program(*lines, more=BRANCHES)) == []


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(f)/(transpose(jvp())/reduce_sum:jvp(cross_entropy)/reduce_sum)", "jit(f)/transpose(jvp())/reduce_sum"),
        ("jit(f)/while/(btd,dhk->bthk/dot_general:b)/sum", "jit(f)/while/btd,dhk->bthk/dot_general/sum"),
        ("jit(f)/(x)/y", "jit(f)/(x)/y"),
        ("jit(f)/(x:y", "jit(f)/(x:y"),
        ("jit(f)/transpose(jvp())/y", "jit(f)/transpose(jvp())/y"),
    ],
)
def test_the_first_of_several_scopes_counts(name: str, scope: str):
    line = f'%f = f32[] all-reduce(%p), metadata={{op_name="{name}"}}'
    module = parse.parse(f"ENTRY %main (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n  ROOT {line}\n}}\n")
    assert parse.root(module.computations["main"]).scope == scope


def test_scope_of_what_was_combined_comes_from_its_operands():
    (row,) = collectives.count_collectives(
        program(
            '%dot = f32[16]{0} dot(%p, %p), metadata={op_name="jit(step)/transpose(jvp())/while/body/dot_general"}',
            "%joined = f32[16]{0} bitcast(%dot)",
            f"%a = f32[16]{{0}} all-reduce(%joined), {OVER_FSDP}, to_apply=%add",
        ),
        MESH,
    )
    assert row.scope.endswith("dot_general")
    assert collectives.shorten_scope(row.scope) == "transpose(jvp())/dot_general"


def test_text_of_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives.count_collectives("nothing", MESH)


def test_a_collective_between_slices_is_a_send_that_says_so():
    send = (
        "%s = (bf16[64,8]{1,0}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true,"
        ' frontend_attributes={_xla_megascale_transfer_type="KIND"}'
    )
    text = program("%t = token[] after-all()", send.replace("KIND", "ALL_REDUCE"))
    (row,) = collectives.count_collectives(text, MESH, {"data": 2})
    assert (row.op, row.axes, row.spans_axes, row.bytes) == ("all-reduce", ("data",), True, 64 * 8 * 2)
    (part,) = collectives.count_collectives(text, MESH, {"fsdp": 2})
    assert (part.axes_text, part.bytes) == ("part of fsdp", 64 * 8 * 2)
    (gather,) = collectives.count_collectives(text.replace("ALL_REDUCE", "ALL_GATHER"), MESH, {"data": 2})
    assert (gather.op, gather.bytes) == ("all-gather", 64 * 8 * 2)  # half of two shards
    assert rows("%t = token[] after-all()", "%s = (f32[8]{0}, u32[], token[]) send(%p, %t)") == []


def test_a_program_of_slices_counts_the_devices_of_one():
    """Two slices of 4: `data` inside, `fsdp` of 4 over both. Devices 0, 1, 4 and 5 of the mesh are the first slice."""
    across = {"fsdp": 2}
    inside = f"%a = f32[16]{{0}} all-reduce(%p), {over('{{0,2},{1,3}}')}, to_apply=%add"
    (row,) = collectives.count_collectives(program(inside), MESH, across)
    assert (row.axes, row.spans_axes, row.bytes) == (("data",), True, 64)
    (found,) = collectives.locate_collectives(parse.parse(program(inside)), MESH, across)
    assert set(found.groups) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    (row,) = collectives.count_collectives(program(inside.replace("{{0,2},{1,3}}", "{{0,1},{2,3}}")), MESH, across)
    assert row.axes_text == "part of fsdp"
    (row,) = collectives.count_collectives(program(inside.replace("{{0,2},{1,3}}", "{{0,1,2,3}}")), MESH, across)
    assert row.axes_text == "part of data+fsdp"


def test_a_pods_program_on_the_mesh_it_stands_for():
    """2 replicas of 4 shards, compiled in place of 6; and over two slices instead of six."""
    pod, whole = Layout("hsdp", MESH, {}, {}), {"data": 6, "fsdp": 4}
    gather = "%a = f32[64]{0} all-gather(%p), OVER, dimensions={0}"
    reduce = "%a = f32[64]{0} all-reduce(%p), OVER, to_apply=%add"
    scatter = "%a = f32[8]{0} reduce-scatter(%p), OVER, dimensions={0}, to_apply=%add"
    replicas, shards = over("{{0,4},{1,5},{2,6},{3,7}}"), over("{{0,1,2,3},{4,5,6,7}}")
    expected = {
        (gather, shards): (("fsdp",), 64 * 4 * 3 / 4), (reduce, shards): (("fsdp",), 64 * 4 * 2 * 3 / 4),
        (reduce, replicas): (("data",), 64 * 4 * 2 * 5 / 6),
        (scatter, replicas): (("data",), 16 * 4 * 5 / 6),  # the whole is two results of the pod
    }  # fmt: skip
    for (line, groups_of), (axes, size) in expected.items():
        (row,) = collectives.count_collectives(program(line.replace("OVER", groups_of)), whole, None, pod)
        assert (row.axes, row.spans_axes, row.bytes) == (axes, True, round(size)), line
    (found,) = collectives.locate_collectives(parse.parse(program(reduce.replace("OVER", replicas))), whole, None, pod)
    assert set(found.groups) == {tuple(range(shard, 24, 4)) for shard in range(4)}

    sliced, across = Layout("hsdp", MESH, {}, {"data": 2}), {"data": 6}
    inside = over("{{0,1,2,3}}")  # of a slice
    (found,) = collectives.locate_collectives(
        parse.parse(program(gather.replace("OVER", inside))), whole, across, sliced
    )
    assert set(found.groups) == {tuple(range(first, first + 4)) for first in range(0, 24, 4)}

    hop = "%a = f32[64]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,4},{1,5},{2,6},{3,7}}"
    with pytest.raises(ValueError, match="a permute along data"):
        collectives.count_collectives(program(hop), whole, None, pod)


def test_devices_that_differ_in_the_outer_part_of_an_axis():
    assert device_groups.dcn_groups(MESH, {"data": 2}) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert device_groups.dcn_groups(MESH, {"fsdp": 2}) == ((0, 2), (1, 3), (4, 6), (5, 7))
