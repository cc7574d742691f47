"""Reference for schedules: checks, memory and simulated times from a table's arrays, without the package's helpers."""

from __future__ import annotations

from itertools import pairwise

F, B, W, BW = "F", "B", "W", "BW"
LETTERS = ["", F, B, W, BW]


def cells(table):
    """Returns {(tick, stage): (letter, microbatch, chunk)}."""
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
    """Returns (stage, chunk) of each virtual stage, in the order of the layers."""
    order = []
    for chunk in range(chunks):
        is_forward = placement == "loop" or chunk % 2 == 0
        order += [(stage, chunk) for stage in (range(stages) if is_forward else reversed(range(stages)))]
    return order


def faults(table):
    """Returns everything that is wrong with a table, as text; empty for a valid schedule."""
    problems, ticks, grid = [], {}, cells(table)
    for (tick, stage), (letter, microbatch, chunk) in grid.items():
        for part in letter:
            key = part, stage, chunk, microbatch
            if key in ticks:
                problems.append(f"{key} twice")
            ticks[key] = tick
    locations = path(table.placement, table.stages, table.chunks)
    expected = {(part, *place, i) for part in "FBW" for place in locations for i in range(table.microbatches)}
    problems += [f"{key} missing" for key in expected - set(ticks)] + [f"{key} extra" for key in set(ticks) - expected]
    if problems:
        return problems
    for i in range(table.microbatches):
        chain = [ticks[(F, *place, i)] for place in locations] + [
            ticks[(B, *place, i)] for place in reversed(locations)
        ]
        if any(later <= earlier for earlier, later in pairwise(chain)):
            problems.append(f"microbatch {i} goes through the stages at {chain}")
        for place in locations:
            weight, gradient = ticks[(W, *place, i)], ticks[(B, *place, i)]
            is_one = grid[gradient, place[0]][0] == BW
            if not (weight == gradient if is_one else weight > gradient):
                problems.append(f"W of {place}, microbatch {i}, at {weight}; its B at {gradient}")
    return problems


def peak_activations(table):
    """Returns the most chunk activations that each stage holds, from F to W."""
    in_flight, peak = [0] * table.stages, [0] * table.stages
    for (_, stage), (letter, _, _) in sorted(cells(table).items()):
        in_flight[stage] += {F: 1, B: 0, W: -1, BW: -1}[letter]
        peak[stage] = max(peak[stage], in_flight[stage])
    return peak


def simulate(table, costs):
    """Returns (makespan, longest stage) of asynchronous stages, by a simulation of events instead of ticks."""
    cost = dict(zip((F, B, W), costs))
    cost[BW] = cost[B] + cost[W]
    locations = path(table.placement, table.stages, table.chunks)
    index = {place: k for k, place in enumerate(locations)}
    queues = [[] for _ in range(table.stages)]
    for (_, stage), cell in sorted(cells(table).items()):
        queues[stage].append(cell)
    now, first, done = [0.0] * table.stages, [None] * table.stages, {}

    def ready(stage, letter, microbatch, chunk):
        k = index[stage, chunk]
        before = {F: [(F, k - 1)] if k else [], W: [(B, k)]}.get(letter)
        if before is None:
            before = [(F, k)] + ([(B, k + 1)] if k + 1 < len(locations) else [])
        times = [done.get((part, at, microbatch)) for part, at in before]
        return None if None in times else max(times, default=0.0)

    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue and (time := ready(stage, *queue[0])) is not None:
                letter, microbatch, chunk = queue.pop(0)
                start = max(time, now[stage])
                first[stage] = start if first[stage] is None else first[stage]
                now[stage] = start + cost[letter] / table.chunks
                for part in letter:
                    done[part, index[stage, chunk], microbatch] = now[stage]
                moved = True
        assert moved, "deadlock"
    return max(now), max(end - start for start, end in zip(first, now))
