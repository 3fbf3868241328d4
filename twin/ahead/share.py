"""One worker under its share of the demand: steps whose cost is a straight line, first come first served.

The batch, chunked prompts and leaps over decode steps are those of the simulated engines. Left out are blocks and
preemption (a prompt waits until its tokens fit), prefix contents (a hit rate shortens prompts), step costs that bend.
Times in seconds, on the question's own clock. It is run many times for one question: hot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from policies.planner.step_model import StepCoefficients


class Engine(NamedTuple):
    """What bounds a batch, and what a step costs. `sequences`: the cost counts sequences, as of a decode worker, and
    prompts come computed; else it counts prompt tokens."""

    cost: StepCoefficients
    max_num_seqs: int
    max_batched_tokens: int
    max_kv_tokens: int
    sequences: bool


class Share(NamedTuple):
    """Requests of one worker, in order of arrival: when, prompt tokens to compute and to hold, tokens to make."""

    at_s: Sequence[float]
    compute: Sequence[int]
    hold: Sequence[int]
    make: Sequence[int]


class Begun(NamedTuple):
    """What the worker has when it is looked at: tokens of its decodes, and outputs that each has still to make."""

    held: Sequence[int]
    left: Sequence[int]


class Served(NamedTuple):
    """When each request had its first and its last token (infinite: not by the end), and the tokens made by the end."""

    first_s: list[float]
    last_s: list[float]
    made: list[int]
    end_s: float


def serve(engine: Engine, share: Share, begun: Begun, until_s: float) -> Served:
    """Serve a share until `until_s`; a request that is under way then has made what it has."""
    at_s, compute, hold, make = share
    n = len(at_s)
    first = [math.inf] * n
    last = [math.inf] * n
    base, per_x, per_kv = engine.cost.base_s, engine.cost.per_x_s, engine.cost.per_kv_s
    most_seqs, most_tokens, most_kv = engine.max_num_seqs, engine.max_batched_tokens, engine.max_kv_tokens
    by_sequence = engine.sequences
    now = 0.0
    step = batch = kv = 0
    ends: list[tuple[int, int]] = []  # (step of the last token, request; below 0: of before)
    sizes: dict[int, int] = {}  # tokens of a running request when it began to decode, less the step it did so at
    for held, left in zip(begun.held, begun.left, strict=True):
        batch += 1
        kv += held
        sizes[-batch] = held
        heappush(ends, (max(1, left), -batch))
    head = 0  # who is next to be computed
    left_tokens = compute[0] if n else 0
    while now < until_s:
        arrived = head < n and at_s[head] <= now
        fits = batch < most_seqs and (not batch or (head < n and kv + hold[head] <= most_kv))
        if arrived and fits:
            tokens = 0
            entering: list[int] = []
            room = max(1, most_tokens - batch)
            kv_new = 0
            while head < n and at_s[head] <= now and room > 0:
                if batch + len(entering) >= most_seqs or (batch + len(entering) and kv + kv_new + hold[head] > most_kv):
                    break
                if by_sequence:
                    entering.append(head)
                    kv_new += hold[head]
                else:
                    take = left_tokens if left_tokens <= room else room
                    tokens += take
                    room -= take
                    left_tokens -= take
                    if left_tokens > 0:
                        break
                    entering.append(head)
                    kv_new += hold[head]
                head += 1
                if head < n:
                    left_tokens = compute[head]
            if by_sequence:
                for one in entering:  # the prompt is here: it decodes with this step
                    first[one] = at_s[one]
                    sizes[one] = hold[one] - step
                    heappush(ends, (step + max(1, make[one] - 1), one))
                batch += len(entering)
                kv += kv_new
                continue
            now += max(1e-6, base + per_x * tokens + per_kv * kv)
            step += 1
            kv += batch
            while ends and ends[0][0] <= step:
                one = heappop(ends)[1]
                batch -= 1
                kv -= sizes.pop(one) + step
                if one >= 0:
                    last[one] = now
            for one in entering:
                first[one] = now
                if make[one] <= 1:
                    last[one] = now
                    continue
                batch += 1
                kv += hold[one] + 1
                sizes[one] = hold[one] + 1 - step
                heappush(ends, (step + make[one] - 1, one))
        elif batch:
            one_s = base + per_kv * kv + (per_x * batch if by_sequence else 0.0)
            slope = per_kv * batch
            steps = ends[0][0] - step
            took = steps * one_s + slope * (steps * (steps - 1) / 2)
            stop = at_s[head] if head < n and fits and at_s[head] > now else math.inf
            if until_s < stop:
                stop = until_s
            if now + took > stop:
                steps = _steps_to(stop - now, one_s, slope, steps)
                took = steps * one_s + slope * (steps * (steps - 1) / 2)
            now += max(1e-6, took)
            step += steps
            kv += steps * batch
            while ends and ends[0][0] <= step:
                one = heappop(ends)[1]
                batch -= 1
                kv -= sizes.pop(one) + step
                if one >= 0:
                    last[one] = now
        elif head < n:
            now = max(now, at_s[head])
        else:
            break
    made = list(make)
    for one, since in sizes.items():
        if one >= 0:
            made[one] = step + since - hold[one]
    return Served(first, last, made, max(now, until_s))


def _steps_to(seconds: float, one_s: float, slope: float, most: int) -> int:
    """The fewest steps that last at least so long, 1 to `most`; step j from 0 lasts one_s + j · slope."""
    if slope > 0.0:
        b = one_s - slope / 2
        steps = math.ceil((-b + math.sqrt(b * b + 2 * slope * max(0.0, seconds))) / slope)
    else:
        steps = math.ceil(seconds / max(one_s, 1e-9))
    return 1 if steps < 1 else most if steps > most else steps
