"""The inner loop of packing on arrays, compiled by numba: a million chunks in a third of a second.

All of it is integers, so what is compiled and what Python would compute are the same rows. packing.py says what the
rule is; planner.py, what the queue is for.

    state     int64 [4]: chunks that wait, their tokens, the next serial number, rows finished since the beginning
    waiting   int64 [slots, 6]: epoch, document, start, length, rows finished before it came, serial number
    order     int64 [2 * slots]: slots of the waiting chunks, oldest first; then free slots; then room to move them
    by_length int64 [slots]: length, serial number and slot in one integer, sorted: by length, then by age
    rule      int64 [8]: row_tokens, window, max_wait, special_tokens, tolerance, bulk; bits of a slot; bits of a
              slot and a serial number
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
N, TOKENS, SERIAL, FINISHED = range(4)
ROW_TOKENS, WINDOW, MAX_WAIT, SPECIAL, TOLERANCE, BULK, SLOT_BITS, LOW_BITS = range(8)
_njit: Any = njit(cache=True, nogil=True)


@_njit
def _find(by_length: Ints, code: int, low: int, high: int) -> int:
    """The first place of by_length[low:high] whose code is not below this one."""
    while low < high:
        middle = (low + high) >> 1
        if by_length[middle] < code:
            low = middle + 1
        else:
            high = middle
    return low


@_njit
def _code(need: int, serial: int, slot: int, rule: Ints) -> int:
    return (need << rule[LOW_BITS]) | (serial << rule[SLOT_BITS]) | slot


@_njit
def wait(chunk: Ints, born: int, state: Ints, waiting: Ints, order: Ints, by_length: Ints, rule: Ints) -> None:
    """Add a chunk (epoch, document, start, length) to those that wait."""
    number = state[N]
    slot = order[number]
    for column in range(4):
        waiting[slot, column] = chunk[column]
    waiting[slot, 4] = born
    waiting[slot, 5] = state[SERIAL]
    need = chunk[3] + rule[SPECIAL]
    code = _code(need, state[SERIAL], slot, rule)
    at = _find(by_length, code, 0, number)
    for place in range(number, at, -1):
        by_length[place] = by_length[place - 1]
    by_length[at] = code
    state[SERIAL] += 1
    state[N] += 1
    state[TOKENS] += need


@_njit
def _give_out(slot: int, out: Ints, num_out: int, state: Ints, waiting: Ints, by_length: Ints, rule: Ints) -> int:
    """Write a waiting chunk into a row, and take it out of by_length, not out of order; returns its tokens."""
    for column in range(4):
        out[num_out, column] = waiting[slot, column]
    need = waiting[slot, 3] + rule[SPECIAL]
    number = state[N]
    at = _find(by_length, _code(need, waiting[slot, 5], slot, rule), 0, number)
    for place in range(at, number - 1):
        by_length[place] = by_length[place + 1]
    state[N] -= 1
    state[TOKENS] -= need
    return need


@_njit
def _leave_order(slot: int, order: Ints, waiting: Ints, number: int) -> None:
    """Free a slot among the first `number` of the order; the others keep theirs."""
    serial = waiting[slot, 5]
    low, high = 0, number
    while low < high:  # serial numbers rise with the order
        middle = (low + high) >> 1
        if waiting[order[middle], 5] < serial:
            low = middle + 1
        else:
            high = middle
    for place in range(low, number - 1):
        order[place] = order[place + 1]
    order[number - 1] = slot


@_njit
def finish_row(out: Ints, num_out: int, state: Ints, waiting: Ints, order: Ints, by_length: Ints, rule: Ints) -> int:
    """Make one row of waiting chunks, the oldest first; returns how many chunks `out` then has."""
    room, special = rule[ROW_TOKENS], rule[SPECIAL]
    # in order of arrival, as long as much room is left
    total = state[N]
    tokens, number, at, kept = state[TOKENS], total, 0, 0
    first_out = num_out
    while at < total:
        if num_out > first_out and room * number <= rule[BULK] * tokens:
            break
        slot = order[at]
        need = waiting[slot, 3] + special
        if need <= room:
            _give_out(slot, out, num_out, state, waiting, by_length, rule)
            room, tokens, number = room - need, tokens - need, number - 1
            num_out += 1
        else:  # passed over; it moves up to where the order begins
            order[kept], order[at] = slot, order[kept]
            kept += 1
        at += 1
    _close(order, kept, at, total)
    smallest = 1 + special
    while room >= smallest:
        first, second = _best_fit(room, state[N], by_length, rule)
        if first < 0:
            break
        for slot in (first, second):
            if slot >= 0:
                before = state[N]
                room -= _give_out(slot, out, num_out, state, waiting, by_length, rule)
                _leave_order(slot, order, waiting, before)
                num_out += 1
    state[FINISHED] += 1
    return num_out


@_njit
def _close(order: Ints, kept: int, at: int, total: int) -> None:
    """Let order[at:total] follow order[:kept]; the slots between, which are free, go to its end."""
    gap = at - kept
    if gap == 0:
        return
    freed = order[len(order) // 2 :]
    for place in range(gap):
        freed[place] = order[kept + place]
    for place in range(at, total):
        order[place - gap] = order[place]
    for place in range(gap):
        order[total - gap + place] = freed[place]


@_njit
def _best_fit(room: int, number: int, by_length: Ints, rule: Ints) -> tuple[int, int]:
    """The one or two waiting chunks that leave the least room, or at most the tolerance; -1 where there is none.

    Long chunks are tried first: what is short is easier to place later. As they get shorter, what fits beside them
    gets longer, so that both ends of the search move towards each other.
    """
    low_bits, mask = rule[LOW_BITS], (1 << rule[SLOT_BITS]) - 1
    first, second = -1, -1
    least, tolerance = room, rule[TOLERANCE]
    at = _find(by_length, (room + 1) << low_bits, 0, number) - 1
    beside = -1  # the longest that fits beside it
    while at >= 0 and least > tolerance:
        need = by_length[at] >> low_bits
        if 2 * need < room - least:
            break  # two of this length or less leave more room
        left = room - need
        if left < least:
            first, second, least = at, -1, left
        if beside < 0:
            beside = _find(by_length, (left + 1) << low_bits, 0, at) - 1
        else:
            while beside + 1 < at and by_length[beside + 1] >> low_bits <= left:
                beside += 1
        other = min(beside, at - 1)
        if other >= 0:
            left -= by_length[other] >> low_bits
            if left < least:
                first, second, least = at, other, left
        at -= 1
    if first >= 0:
        first = by_length[first] & mask
    if second >= 0:
        second = by_length[second] & mask
    return first, second


@_njit
def count(chunks_C4: Ints, firsts: Ints, tokens: Ints, documents: Ints) -> None:
    """Add up the tokens of each stream's chunks, and the documents that begin; `firsts` are the streams' first ones."""
    for at in range(len(chunks_C4)):
        stream = len(firsts) - 1
        while chunks_C4[at, 1] < firsts[stream]:
            stream -= 1
        tokens[stream] += chunks_C4[at, 3]
        documents[stream] += chunks_C4[at, 2] == 0


@_njit
def place(
    chunk: Ints,
    out: Ints,
    ends: Ints,
    done: Ints,
    state: Ints,
    waiting: Ints,
    order: Ints,
    by_length: Ints,
    rule: Ints,
) -> None:
    """Take one chunk, no longer than a row; finish rows as they fall due.

    Args:
        chunk: epoch, document, start, length.
        out: rows' chunks, one after the other.
        ends: how many chunks `out` has at the end of each row.
        done: chunks and rows that are in `out`; changed.
        state, waiting, order, by_length, rule: see above.
    """
    if chunk[3] + rule[SPECIAL] + 1 + rule[SPECIAL] > rule[ROW_TOKENS]:
        for column in range(4):
            out[done[0], column] = chunk[column]
        done[0] += 1
        ends[done[1]] = done[0]
        done[1] += 1
        state[FINISHED] += 1
    else:
        wait(chunk, state[FINISHED], state, waiting, order, by_length, rule)
        if state[N] <= rule[WINDOW]:
            return  # no row was finished, so none has become overdue
    while state[N] > rule[WINDOW] or (state[N] > 0 and state[FINISHED] - waiting[order[0], 4] >= rule[MAX_WAIT]):
        done[0] = finish_row(out, done[0], state, waiting, order, by_length, rule)
        ends[done[1]] = done[0]
        done[1] += 1


@_njit
def place_many(
    chunks: Ints,
    epoch: int,
    first_document: int,
    wanted: int,
    out: Ints,
    ends: Ints,
    done: Ints,
    state: Ints,
    waiting: Ints,
    order: Ints,
    by_length: Ints,
    rule: Ints,
) -> int:
    """Take chunks (document, start, length) until so many rows are done; returns how many were taken."""
    chunk = np.empty(4, np.int64)
    chunk[0] = epoch
    taken = 0
    while taken < len(chunks) and done[1] < wanted:
        chunk[1] = chunks[taken, 0] + first_document
        chunk[2] = chunks[taken, 1]
        chunk[3] = chunks[taken, 2]
        place(chunk, out, ends, done, state, waiting, order, by_length, rule)
        taken += 1
    return taken


@_njit
def _less(a: int, b: int, c: int, d: int) -> bool:
    """Whether a * b < c * d, for any a and c, and b and d above 0; the products have 126 bits."""
    if (a < 0) != (c < 0):
        return a < 0
    negative = a < 0
    one, other = np.uint64(abs(a)), np.uint64(abs(c))
    high, low = _product(one, np.uint64(b))
    high_other, low_other = _product(other, np.uint64(d))
    if high == high_other and low == low_other:
        return False
    smaller = high < high_other or (high == high_other and low < low_other)
    return smaller != negative


@_njit
def _product(a: np.uint64, b: np.uint64) -> tuple[np.uint64, np.uint64]:
    """The upper and lower 64 bits of a product."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    low = a_low * b_low
    middle = a_high * b_low + (low >> half)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (other >> half), (other << half) | (low & mask)


@_njit
def mix_many(
    chunks: Ints,
    firsts: Ints,
    limits: Ints,
    epochs: Ints,
    first_documents: Ints,
    by_documents: bool,
    weights: Ints,
    lag: Ints,
    wanted: int,
    out: Ints,
    ends: Ints,
    done: Ints,
    state: Ints,
    waiting: Ints,
    order: Ints,
    by_length: Ints,
    rule: Ints,
) -> None:
    """Take chunks of several streams in turn (mixing.FairQueue) until so many rows are done or a stream has none left.

    Args:
        chunks: of all streams, one stream after the other; document, start, length.
        firsts: the next chunk of each stream; changed.
        limits: where its chunks end. No stream that has a weight is at its end.
        epochs, first_documents: of each stream.
        by_documents: sizes are documents that begin, and not tokens.
        weights, lag: of the queue; lag is changed.
        wanted: see `place_many`; and all that follows.
    """
    total = weights.sum()
    chunk = np.empty(4, np.int64)
    while done[1] < wanted:
        chosen, finish, scale = -1, 0, 1
        for stream in range(len(weights)):
            if weights[stream] > 0 and lag[stream] >= 0:
                at = firsts[stream]
                size = (1 if chunks[at, 1] == 0 else 0) if by_documents else chunks[at, 2]
                end = total * size - lag[stream]
                if chosen < 0 or _less(end, scale, finish, weights[stream]):
                    chosen, finish, scale = stream, end, weights[stream]
        at = firsts[chosen]
        size = (1 if chunks[at, 1] == 0 else 0) if by_documents else chunks[at, 2]
        for stream in range(len(weights)):
            lag[stream] += weights[stream] * size
        lag[chosen] -= total * size
        chunk[0] = epochs[chosen]
        chunk[1] = chunks[at, 0] + first_documents[chosen]
        chunk[2] = chunks[at, 1]
        chunk[3] = chunks[at, 2]
        place(chunk, out, ends, done, state, waiting, order, by_length, rule)
        firsts[chosen] += 1
        if firsts[chosen] == limits[chosen]:
            return
