"""The inner loop of packing on arrays, compiled by numba: a million chunks in a tenth of a second.

All decisions use integers, so compiled and pure-Python packing give identical rows. packing.py describes the rule,
planner.py the queue. A chunk's need is its tokens plus its special tokens. Waiting chunks are in two linked lists at
once: by age, and by need and then age. Adding or removing a chunk takes constant time, and a bitmap marks the needs
that occur.

    state     int64 [4]: number of waiting chunks, sum of their needs, rows finished since the start, first free slot
    waiting   int64 [slots + 1, 9]: for the chunk in a slot: epoch, document, start, length, and rows finished before
              it arrived; the next younger and next older slot by age; the next older and next younger of its need. The
              last slot is the sentinel at both ends of the lists; a free slot holds the next free one
    by_need   int32 [row_tokens + 1, 2]: slots of the oldest and the youngest chunk of a need
    bits      int64: a summary bit for each word with a bit set, then a bit for each need, 64 in a word
    rule      int64 [7]: row_tokens, window, max_wait, special_tokens, tolerance, bulk; words of `bits` before the needs
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Ints = NDArray[np.int64]
N, TOKENS, FINISHED, FREE = range(4)
EPOCH, DOCUMENT, START, LENGTH, BORN, AFTER, BEFORE, OLDER, YOUNGER = range(9)
OLDEST, YOUNGEST = range(2)
ROW_TOKENS, WINDOW, MAX_WAIT, SPECIAL, TOLERANCE, BULK, WORDS = range(7)
_CLOSE = 1e-14  # relative difference of two quotients above which floats compare them reliably
_njit: Any = njit(cache=True, nogil=True)
_inline: Any = njit(cache=True, nogil=True, inline="always")  # a call would pass nine numbers for each array


def _count_zeros(_: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


_leading_zeros: Any = intrinsic(_count_zeros)  # of a 64-bit integer, by the processor's instruction


@_inline
def _highest(bits: Ints, max_need: int, words: int) -> int:
    """Return the largest need up to `max_need` among waiting chunks; -1 without one."""
    if max_need < 0:
        return -1
    word = max_need >> 6
    # the bits up to `max_need`; for bit 63 the shift overflows to 0, and 0 - 1 has all bits set
    bits_below = bits[words + word] & ((2 << (max_need & 63)) - 1)
    if bits_below == 0:
        above = word >> 6
        some = bits[above] & ((1 << (word & 63)) - 1)
        while some == 0:
            above -= 1
            if above < 0:
                return -1
            some = bits[above]
        word = (above << 6) + 63 - _leading_zeros(some)
        bits_below = bits[words + word]
    return (word << 6) + 63 - _leading_zeros(bits_below)


@_inline
def wait(chunk: Ints, born: int, state: Ints, waiting: Ints, by_need: Ints, bits: Ints, rule: Ints) -> None:
    """Add a chunk (epoch, document, start, length) to the waiting ones."""
    # free slots form a stack, linked by the column that is unused in them: nothing is allocated or moved
    slot, last = state[FREE], len(waiting) - 1
    state[FREE] = waiting[slot, AFTER]
    for column in range(4):
        waiting[slot, column] = chunk[column]
    waiting[slot, BORN] = born
    # list by age, which is circular through the sentinel: an empty list needs no special case
    before = waiting[last, BEFORE]
    waiting[slot, BEFORE], waiting[slot, AFTER] = before, last
    waiting[before, AFTER] = waiting[last, BEFORE] = slot
    # list of its need: with its two ends in by_need, best fit takes the youngest of a need without a search
    need = chunk[3] + rule[SPECIAL]
    word, words = need >> 6, rule[WORDS]
    waiting[slot, YOUNGER] = last
    if bits[words + word] >> (need & 63) & 1:
        older = by_need[need, YOUNGEST]
        waiting[slot, OLDER] = older
        waiting[older, YOUNGER] = slot
    else:
        waiting[slot, OLDER] = last
        by_need[need, OLDEST] = slot
        # the first of its need: set its bit, and its word's in the summary, where a word lets `_highest` skip 4,096
        bits[words + word] |= 1 << (need & 63)
        bits[word >> 6] |= 1 << (word & 63)
    by_need[need, YOUNGEST] = slot
    state[N] += 1
    state[TOKENS] += need


@_inline
def _give_out(
    slot: int, out: Ints, num_out: int, state: Ints, waiting: Ints, by_need: Ints, bits: Ints, rule: Ints
) -> int:
    """Write a waiting chunk into a row; return its need."""
    last = len(waiting) - 1
    for column in range(4):
        out[num_out, column] = waiting[slot, column]
    need = waiting[slot, LENGTH] + rule[SPECIAL]
    # by age: the neighbours, one of which may be the sentinel, are joined
    waiting[waiting[slot, BEFORE], AFTER] = waiting[slot, AFTER]
    waiting[waiting[slot, AFTER], BEFORE] = waiting[slot, BEFORE]
    # by need: the sentinel is shared by all needs and cannot hold their ends, so by_need does
    older, younger = waiting[slot, OLDER], waiting[slot, YOUNGER]
    if older != last:
        waiting[older, YOUNGER] = younger
    else:
        by_need[need, OLDEST] = younger
    if younger != last:
        waiting[younger, OLDER] = older
    else:
        by_need[need, YOUNGEST] = older
    if older == last and younger == last:  # the last of its need; its ends in by_need are stale until `wait` sets them
        word, words = need >> 6, rule[WORDS]
        bits[words + word] &= ~(1 << (need & 63))
        if bits[words + word] == 0:  # the summary's bit stands for 64 needs: it is cleared with the last of them
            bits[word >> 6] &= ~(1 << (word & 63))
    waiting[slot, AFTER] = state[FREE]
    state[FREE] = slot
    state[N] -= 1
    state[TOKENS] -= need
    return need


@_njit
def finish_row(out: Ints, num_out: int, state: Ints, waiting: Ints, by_need: Ints, bits: Ints, rule: Ints) -> int:
    """Finish one row from waiting chunks, starting with the oldest; return the number of chunks in `out`."""
    room, special = rule[ROW_TOKENS], rule[SPECIAL]
    last, first_out = len(waiting) - 1, num_out
    # in order of arrival while there is room for more than BULK average chunks (written without a division); chunks
    # that do not fit are skipped. The oldest comes first whatever the room: that is what bounds every chunk's wait
    slot = waiting[last, AFTER]
    while slot != last:
        if num_out > first_out and room * state[N] <= rule[BULK] * state[TOKENS]:
            break
        after = waiting[slot, AFTER]  # read now: `_give_out` makes it a link between free slots
        if waiting[slot, LENGTH] + special <= room:
            room -= _give_out(slot, out, num_out, state, waiting, by_need, bits, rule)
            num_out += 1
        slot = after
    while room > special:  # a chunk has at least one token
        first, second = _best_fit(room, waiting, by_need, bits, rule)
        if first < 0:
            break
        room -= _give_out(first, out, num_out, state, waiting, by_need, bits, rule)
        num_out += 1
        if second >= 0:
            room -= _give_out(second, out, num_out, state, waiting, by_need, bits, rule)
            num_out += 1
    state[FINISHED] += 1
    return num_out


@_inline
def _best_fit(room: int, waiting: Ints, by_need: Ints, bits: Ints, rule: Ints) -> tuple[int, int]:
    """Return the one or two waiting chunks that leave the least room, or at most the tolerance; -1 if none fits.

    Long chunks are tried first, since short ones are easier to place later. Among equal needs the youngest is taken.
    """
    words, tolerance = rule[WORDS], rule[TOLERANCE]
    first, second, min_left = -1, -1, room
    need = _highest(bits, room, words)
    while need >= 0 and min_left > tolerance:
        if 2 * need < room - min_left:
            break  # two chunks of this need or less leave more room
        left = room - need
        if left < min_left:
            first, second, min_left = need, -1, left
        partner = _highest(bits, min(left, need), words)  # not above `need`: that pair was tried with the longer first
        if partner == need and by_need[need, OLDEST] == by_need[need, YOUNGEST]:
            partner = _highest(bits, need - 1, words)  # only one chunk has this need
        if partner >= 0 and left - partner < min_left:
            first, second, min_left = need, partner, left - partner
        need = _highest(bits, need - 1, words)
    if first < 0:
        return -1, -1
    slot = by_need[first, YOUNGEST]
    if second < 0:
        return slot, -1
    return slot, waiting[slot, OLDER] if second == first else by_need[second, YOUNGEST]


@_njit
def take(chunks: Ints, row_ends: Ints, firsts: Ints, counts: Ints, out: Ints, ends: Ints, done: Ints) -> None:
    """Take the first rows out of the finished ones.

    Args:
        chunks: of these rows; written.
        row_ends: number of chunks at the end of each row; written. Its length is the number of rows.
        firsts: number of each stream's first document.
        counts: tokens and starting documents of each stream; added to.
        out, ends, done: see `_place`; remaining rows move to the front.
    """
    taken, rows, streams = len(chunks), len(row_ends), len(firsts)
    for at in range(taken):
        for column in range(4):
            chunks[at, column] = out[at, column]
        stream = streams - 1
        while stream > 0 and out[at, 1] < firsts[stream]:
            stream -= 1
        counts[stream, 0] += out[at, 3]
        counts[stream, 1] += out[at, 2] == 0
    for row in range(rows):
        row_ends[row] = ends[row]
    for at in range(taken, done[0]):
        for column in range(4):
            out[at - taken, column] = out[at, column]
    for row in range(rows, done[1]):
        ends[row - rows] = ends[row] - taken
    done[0] -= taken
    done[1] -= rows


@_inline
def _place(
    chunk: Ints, out: Ints, ends: Ints, done: Ints, state: Ints, waiting: Ints, by_need: Ints, bits: Ints, rule: Ints
) -> None:
    """Place one chunk, no longer than a row; finish rows when they are due.

    Args:
        chunk: epoch, document, start, length.
        out: chunks of the rows, concatenated.
        ends: number of chunks in `out` at the end of each row.
        done: number of chunks and rows in `out`; changed.
        state, waiting, by_need, bits, rule: see the top of this file.
    """
    if chunk[3] + rule[SPECIAL] + 1 + rule[SPECIAL] > rule[ROW_TOKENS]:  # nothing fits beside it, not one token
        for column in range(4):
            out[done[0], column] = chunk[column]
        done[0] += 1
        ends[done[1]] = done[0]
        done[1] += 1
        state[FINISHED] += 1
    else:
        wait(chunk, state[FINISHED], state, waiting, by_need, bits, rule)
        if state[N] <= rule[WINDOW]:
            return  # no row was finished, so no chunk can be overdue
    last = len(waiting) - 1
    while state[N] > rule[WINDOW] or (
        state[N] > 0 and state[FINISHED] - waiting[waiting[last, AFTER], BORN] >= rule[MAX_WAIT]
    ):
        done[0] = finish_row(out, done[0], state, waiting, by_need, bits, rule)
        ends[done[1]] = done[0]
        done[1] += 1


@_njit
def place_many(
    chunks: Ints,
    epoch: int,
    first_document: int,
    num_rows: int,
    out: Ints,
    ends: Ints,
    done: Ints,
    state: Ints,
    waiting: Ints,
    by_need: Ints,
    bits: Ints,
    rule: Ints,
) -> int:
    """Place chunks (document, start, length) until `wanted` rows are finished; return the number of chunks placed."""
    chunk = np.empty(4, np.int64)
    chunk[0] = epoch
    taken = 0
    while taken < len(chunks) and done[1] < num_rows:
        chunk[1] = chunks[taken, 0] + first_document
        chunk[2] = chunks[taken, 1]
        chunk[3] = chunks[taken, 2]
        _place(chunk, out, ends, done, state, waiting, by_need, bits, rule)
        taken += 1
    return taken


@_njit
def _less(a: int, b: int, c: int, d: int) -> bool:
    """Return True if a * b < c * d, for any a and c, and positive b and d; the products have up to 126 bits."""
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
    """Return the upper and lower 64 bits of a product."""
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
    num_rows: int,
    out: Ints,
    ends: Ints,
    done: Ints,
    state: Ints,
    waiting: Ints,
    by_need: Ints,
    bits: Ints,
    rule: Ints,
) -> None:
    """Place chunks of several streams in fair order (mixing.FairQueue) until enough rows are done or a stream is empty.

    Two streams are compared by float quotients, and exactly if these are too close.

    Args:
        chunks: of all streams, concatenated; document, start, length.
        firsts: the next chunk of each stream; changed.
        limits: end of its chunks. No stream is at its end.
        epochs, first_documents: of each stream.
        by_documents: sizes count starting documents, not tokens.
        weights, lag: of the queue, each weight positive; lag is changed.
        num_rows: see `place_many`, like all that follow.
    """
    total, number = weights.sum(), len(weights)
    chunk, sizes, shares = np.empty(4, np.int64), np.empty(number, np.int64), np.empty(number, np.float64)
    for stream in range(number):
        at = firsts[stream]
        sizes[stream] = (1 if chunks[at, 1] == 0 else 0) if by_documents else chunks[at, 2]
        shares[stream] = 1.0 / weights[stream]
    while done[1] < num_rows:
        chosen, finish, when = -1, 0, 0.0
        for stream in range(number):
            if lag[stream] >= 0:  # eligible; lags sum to 0, so at least one stream is
                end = total * sizes[stream] - lag[stream]
                ends_at = end * shares[stream]
                nearer = ends_at < when
                if chosen >= 0 and abs(ends_at - when) <= _CLOSE * (abs(ends_at) + abs(when)):
                    nearer = _less(end, weights[chosen], finish, weights[stream])
                if chosen < 0 or nearer:
                    chosen, finish, when = stream, end, ends_at
        at, size = firsts[chosen], sizes[chosen]
        for stream in range(number):
            lag[stream] += weights[stream] * size
        lag[chosen] -= total * size
        chunk[0] = epochs[chosen]
        chunk[1] = chunks[at, 0] + first_documents[chosen]
        chunk[2] = chunks[at, 1]
        chunk[3] = chunks[at, 2]
        _place(chunk, out, ends, done, state, waiting, by_need, bits, rule)
        at += 1
        firsts[chosen] = at
        if at == limits[chosen]:
            return
        sizes[chosen] = (1 if chunks[at, 1] == 0 else 0) if by_documents else chunks[at, 2]
