"""What a pipeline must do, written anew: from a table's plain cells, without the package's own helpers."""

from __future__ import annotations

from itertools import pairwise

F, B, W, BW = "F", "B", "W", "BW"
LETTERS = ["", F, B, W, BW]


def cells(table):
    """{(tick, stage): (letter, microbatch, chunk)}."""
    return {
        (tick, stage): (
            LETTERS[table.action[tick, stage]],
            int(table.microbatch[tick, stage]),
            int(table.chunk[tick, stage]),
        )
        for tick in range(len(table.action))
        for stage in range(len(table.action[tick]))
        if table.action[tick, stage]
    }


def path(placement, stages, chunks):
    """(stage, chunk) of each part of the model, in the order of its layers."""
    order = []
    for chunk in range(chunks):
        there = range(stages) if placement == "loop" or chunk % 2 == 0 else reversed(range(stages))
        order += [(stage, chunk) for stage in there]
    return order


def faults(table):
    """Everything that is wrong with a table, in words; empty for a schedule."""
    found, ticks, grid = [], {}, cells(table)
    for (tick, stage), (letter, microbatch, chunk) in grid.items():
        for part in letter:
            key = part, stage, chunk, microbatch
            if key in ticks:
                found.append(f"{key} twice")
            ticks[key] = tick
    places = path(table.placement, table.stages, table.chunks)
    wanted = {(part, *place, i) for part in "FBW" for place in places for i in range(table.microbatches)}
    found += [f"{key} missing" for key in wanted - set(ticks)] + [f"{key} extra" for key in set(ticks) - wanted]
    if found:
        return found
    for i in range(table.microbatches):
        chain = [ticks[(F, *place, i)] for place in places] + [ticks[(B, *place, i)] for place in reversed(places)]
        if any(later <= earlier for earlier, later in pairwise(chain)):
            found.append(f"microbatch {i} goes through the stages at {chain}")
        for place in places:
            weight, gradient = ticks[(W, *place, i)], ticks[(B, *place, i)]
            is_one = grid[gradient, place[0]][0] == BW
            if not (weight == gradient if is_one else weight > gradient):
                found.append(f"W of {place}, microbatch {i}, at {weight}; its B at {gradient}")
    return found


def most_kept(table):
    """Chunk activations that each stage keeps at most, from F to W."""
    kept, most = [0] * table.stages, [0] * table.stages
    for (_, stage), (letter, _, _) in sorted(cells(table).items()):
        kept[stage] += {F: 1, B: 0, W: -1, BW: -1}[letter]
        most[stage] = max(most[stage], kept[stage])
    return most


def run(table, costs):
    """(span, longest stage) where each stage goes on as soon as it can: a simulation by events, not by ticks."""
    cost = dict(zip((F, B, W), costs))
    cost[BW] = cost[B] + cost[W]
    places = path(table.placement, table.stages, table.chunks)
    index = {place: k for k, place in enumerate(places)}
    queues = [[] for _ in range(table.stages)]
    for (_, stage), cell in sorted(cells(table).items()):
        queues[stage].append(cell)
    now, begin, done = [0.0] * table.stages, [None] * table.stages, {}

    def ready(stage, letter, microbatch, chunk):
        k = index[stage, chunk]
        before = {F: [(F, k - 1)] if k else [], W: [(B, k)]}.get(letter)
        if before is None:
            before = [(F, k)] + ([(B, k + 1)] if k + 1 < len(places) else [])
        times = [done.get((part, at, microbatch)) for part, at in before]
        return None if None in times else max(times, default=0.0)

    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue and (time := ready(stage, *queue[0])) is not None:
                letter, microbatch, chunk = queue.pop(0)
                start = max(time, now[stage])
                begin[stage] = start if begin[stage] is None else begin[stage]
                now[stage] = start + cost[letter] / table.chunks
                for part in letter:
                    done[part, index[stage, chunk], microbatch] = now[stage]
                moved = True
        assert moved, "deadlock"
    return max(now), max(end - start for start, end in zip(begin, now))
