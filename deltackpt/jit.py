"""The kernels compiled by numba: same interface and same bytes as the numpy ones in `kernels`.

One pass over memory: compare, extract, fingerprint. Rows are runs of elements given by address, so one call
serves any number of tensors, at any alignment. Compiled once per machine and cached on disk. Never bounds-checks
columns: `kernels.check` must have passed. Longer than most modules: the compiled functions call each other inline.
"""

from __future__ import annotations

import logging
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.extending import intrinsic

from deltackpt.layout import TILE

_log = logging.getLogger("deltackpt")
_U = np.uint64
_BLOCK = 64  # bytes compared at once


class _Announce(event.Listener):
    """Says once that compilation has begun, since the first call on a machine takes seconds."""

    said = False

    def on_start(self, _event: event.Event) -> None:
        if not self.said:
            self.said = True
            _log.info("compiling kernels for this machine (once; they are cached on disk)")

    def on_end(self, _event: event.Event) -> None:
        """Nothing to do: only the start is of interest."""


event.register("numba:compile", _Announce())


@intrinsic
def _width(_typing: Any, unit: Any) -> Any:
    """Bytes of the type of `unit`, as a compile-time constant."""
    nbytes = unit.bitwidth // 8

    def emit(context: Any, _builder: Any, _sig: Any, _args: Any) -> Any:
        return context.get_constant(types.uint64, nbytes)

    return types.uint64(unit), emit


@intrinsic
def _load(_typing: Any, address: Any, unit: Any) -> Any:
    """Read one element of the type of `unit` at any alignment."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        kind = ir.IntType(unit.bitwidth)
        value = builder.load(builder.inttoptr(args[0], kind.as_pointer()))
        value.align = 1
        return value

    return unit(types.uint64, unit), emit


@intrinsic
def _store(_typing: Any, address: Any, value: Any) -> Any:
    """Write one element at any alignment."""

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        kind = ir.IntType(value.bitwidth)
        builder.store(args[1], builder.inttoptr(args[0], kind.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.uint64, value), emit


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    """Turn an address into a pointer to bytes."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(types.uint64), emit


@intrinsic
def _differs(_typing: Any, left: Any, right: Any, unit: Any) -> Any:
    """Compare one block; bit i of the result is set where element i differs."""
    count = _BLOCK * 8 // unit.bitwidth

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(unit.bitwidth), count)
        loaded = []
        for address in args[:2]:
            value = builder.load(builder.inttoptr(address, vector.as_pointer()))
            value.align = 1
            loaded.append(value)
        mask = builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(count))
        return mask if count == 64 else builder.zext(mask, ir.IntType(64))

    return types.uint64(types.uint64, types.uint64, unit), emit


@intrinsic
def _prefetch(_typing: Any, address: Any) -> Any:
    """Ask for a cache line that is about to be written."""

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], pointer), word(1), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), emit


@intrinsic
def _lowest_bit(_typing: Any, mask: Any) -> Any:
    """Index of the lowest set bit of a mask that is not 0."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.uint64(types.uint64), emit


@intrinsic
def _count_bits(_typing: Any, mask: Any) -> Any:
    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), emit


_jit = numba.njit(nogil=True, cache=True, error_model="numpy", inline="never")
_inner = numba.njit(nogil=True, cache=True, error_model="numpy")


@_inner
def _key(word):  # type: ignore[no-untyped-def]  # compiled
    z = word + _U(0x9E3779B97F4A7C15)
    z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
    return (z ^ (z >> _U(31))) | _U(1)


@_inner
def _change(unit, element, old, new):  # type: ignore[no-untyped-def]  # compiled
    """What turning `old` into `new` adds to the fingerprint. Both zero-extended before the difference."""
    if _width(unit) == _U(8):
        half = _U(0xFFFFFFFF)
        word = element * _U(2)
        low = (new & half) - (old & half)
        high = (new >> _U(32)) - (old >> _U(32))
        return low * _key(word) + high * _key(word + _U(1))
    offset = element * _width(unit)
    return ((new - old) << ((offset & _U(3)) << _U(3))) * _key(offset >> _U(2))


@_inner
def _compare(unit, left, right, length, masks, where):  # type: ignore[no-untyped-def]  # compiled
    """Masks of the blocks of a tile that differ, and their first elements; returns (blocks, changes)."""
    per = _U(_BLOCK) // _width(unit)
    used, changes = 0, _U(0)
    blocks = length // per
    for i in range(blocks):
        mask = _differs(left + _U(_BLOCK) * i, right + _U(_BLOCK) * i, unit)
        masks[used] = mask
        where[used] = per * i
        used += mask != _U(0)
        changes += _count_bits(mask)
    mask = _U(0)
    for e in range(blocks * per, length):
        at = e * _width(unit)
        if _load(left + at, unit) != _load(right + at, unit):
            mask |= _U(1) << (e - blocks * per)
            changes += _U(1)
    masks[used] = mask
    where[used] = blocks * per
    used += mask != _U(0)
    return used, changes


@_inner
def _sum_changes(unit, element, at, old, new, n):  # type: ignore[no-untyped-def]  # compiled
    """What n changes add to the fingerprint. A loop of its own, so that it becomes vector code."""
    total = _U(0)
    for i in range(n):
        total += _change(unit, element + at[i], old[i], new[i])
    return total


@_inner
def _sum_bytes(address, nbytes, offset):  # type: ignore[no-untyped-def]  # compiled
    """Fingerprint of nbytes that begin at a byte of their tensor; what their first and last word lack counts as 0."""
    total = _U(0)
    while offset & _U(3) and nbytes > 0:
        total += (_U(_load(address, np.uint8(0))) << ((offset & _U(3)) << _U(3))) * _key(offset >> _U(2))
        address, offset, nbytes = address + _U(1), offset + _U(1), nbytes - 1
    word = offset >> _U(2)
    for i in range(nbytes >> 2):
        total += _U(_load(address + (_U(i) << _U(2)), np.uint32(0))) * _key(word + _U(i))
    last = _U(0)
    for i in range(nbytes & ~3, nbytes):
        last |= _U(_load(address + _U(i), np.uint8(0))) << _U((i & 3) << 3)
    return total + last * _key(word + _U(nbytes >> 2))


@_inner
def _bytes(address, nbytes):  # type: ignore[no-untyped-def]  # compiled
    return numba.carray(_pointer(address), nbytes)


@_inner
def _split_tile(unit, planes, d, left, right, length):  # type: ignore[no-untyped-def]  # compiled
    """Write the byte planes of a whole tile's XOR."""
    width = _width(unit)
    a, b = _bytes(left, length * np.int64(width)), _bytes(right, length * np.int64(width))
    for i in range(width):
        plane = planes[np.int64(i), d : d + length]
        for e in range(_U(length)):
            plane[e] = a[e * width + i] ^ b[e * width + i]


@_inner
def _put_tile(unit, mode, planes, d, address, length):  # type: ignore[no-untyped-def]  # compiled
    """Apply the byte planes of a whole tile, mode XOR or SET."""
    width = _width(unit)
    memory = _bytes(address, length * np.int64(width))
    for i in range(width):
        plane = planes[np.int64(i), d : d + length]
        if mode == 1:
            for e in range(_U(length)):
                memory[e * width + i] = plane[e]
        else:
            for e in range(_U(length)):
                memory[e * width + i] ^= plane[e]


@_inner
def _split(unit, planes, k, old, new, n):  # type: ignore[no-untyped-def]  # compiled
    """Write the bytes of old ^ new to the planes from k on."""
    for b in range(_width(unit)):
        plane = planes[np.int64(b), k : k + n]
        shift = _U(8) * b
        for i in range(n):
            plane[i] = ((old[i] ^ new[i]) >> shift) & _U(255)


@_jit
def extract(unit, old, new, count, start, counts, gaps, values, dense, fp, changed, masks, where, at, before, after):  # type: ignore[no-untyped-def]  # compiled
    """Fill the columns of all tiles of all rows; returns how many sparse changes and dense elements."""
    width = _width(unit)
    k, d, tile = np.int64(0), np.int64(0), 0
    for row in range(len(count)):
        total, row_changes = _U(0), _U(0)
        for first in range(0, count[row], TILE):
            length = min(TILE, count[row] - first)
            left, right = old[row] + _U(first) * width, new[row] + _U(first) * width
            used, changes = _compare(unit, left, right, _U(length), masks, where)
            row_changes += changes
            n = np.int64(changes)
            element = _U(start[row] + first)
            if 4 * n > length:
                counts[tile] = 0xFFFF
                _split_tile(unit, dense, d, left, right, length)
                d += length
                nbytes, offset = length * np.int64(width), element * width
                total += _sum_bytes(right, nbytes, offset) - _sum_bytes(left, nbytes, offset)
            else:
                counts[tile] = n
                i = 0
                for m in range(used):
                    mask, base = masks[m], where[m]
                    while mask != _U(0):
                        at[i] = base + _lowest_bit(mask)
                        mask &= mask - _U(1)
                        i += 1
                for i in range(n):
                    before[i] = _load(left + at[i] * width, unit)
                    after[i] = _load(right + at[i] * width, unit)
                low, high = gaps[0, k : k + n], gaps[1, k : k + n]
                if n != 0:
                    low[0], high[0] = at[0] & _U(255), at[0] >> _U(8)
                for i in range(1, n):
                    gap = at[i] - at[i - 1] - _U(1)
                    low[i], high[i] = gap & _U(255), gap >> _U(8)
                _split(unit, values, k, before, after, n)
                k += n
                total += _sum_changes(unit, element, at, before, after, n)
            tile += 1
        fp[row] = total
        changed[row] = row_changes
    return k, d


@_inner
def _put(unit, mode, address, element, planes, k, n, at, before, after):  # type: ignore[no-untyped-def]  # compiled
    """Apply n changes of a tile; returns what they add to the fingerprint. Modes: see kernels.apply."""
    width = _width(unit)
    for i in range(n):
        place = address + at[i] * width
        old = _U(_load(place, unit))
        new = _U(planes[0, k + i])
        for b in range(_U(1), width):
            new |= _U(planes[np.int64(b), k + i]) << (_U(8) * b)
        if mode != 1:
            new ^= old
        if mode != 2:
            _store(place, type(unit)(new))
        before[i], after[i] = old, new
    if mode == 2:
        for b in range(width):
            for i in range(n):
                planes[np.int64(b), k + i] = (after[i] >> (_U(8) * b)) & _U(255)
    return _sum_changes(unit, element, at, before, after, n)


@_inner
def _pass_over(counts, tile, k, d, count):  # type: ignore[no-untyped-def]  # compiled
    """Return where the columns go on after a row of `count` elements."""
    for first in range(0, count, TILE):
        changes = np.int64(counts[tile])
        tile += 1
        if changes == 0xFFFF:
            d += min(TILE, count - first)
        else:
            k += changes
    return tile, k, d


@_jit
def apply(unit, mode, target, count, start, counts, tile, gaps, values, k, dense, d, fp, at, before, after):  # type: ignore[no-untyped-def]  # compiled
    """Apply the columns from tile, k, d on to all rows. fp: the fingerprint differences, per row, added to.

    Rows at address 0 are passed over. Positions of a tile are summed up, and their cache lines asked for, before the
    tile ahead of it is written, so that memory latency overlaps. Two rows of `at` take turns.
    """
    width = _width(unit)
    n, half, k_waiting, row_waiting = np.int64(0), 0, k, 0
    address_waiting, element_waiting = _U(0), _U(0)
    for row in range(len(count)):
        if target[row] == _U(0):
            tile, k, d = _pass_over(counts, tile, k, d, count[row])
            continue
        for first in range(0, count[row], TILE):
            address = target[row] + _U(first) * width
            element = _U(start[row] + first)
            changes = np.int64(counts[tile])
            tile += 1
            if changes == 0xFFFF:
                length = min(TILE, count[row] - first)
                if mode == 2:
                    every = at[2]
                    for i in range(length):
                        every[i] = i
                    fp[row] += _put(unit, mode, address, element, dense, d, length, every, before, after)
                else:
                    nbytes, offset = length * np.int64(width), element * width
                    old = _sum_bytes(address, nbytes, offset)
                    _put_tile(unit, mode, dense, d, address, length)
                    fp[row] += _sum_bytes(address, nbytes, offset) - old
                d += length
                continue
            here = at[half]
            p = _U(0)
            for i in range(changes):
                p += _U(gaps[0, k + i]) + (_U(gaps[1, k + i]) << _U(8))
                here[i] = p
                _prefetch(address + p * width)
                p += _U(1)
            there = at[1 - half]
            fp[row_waiting] += _put(
                unit, mode, address_waiting, element_waiting, values, k_waiting, n, there, before, after
            )
            n, half, k_waiting, row_waiting = changes, 1 - half, k, row
            address_waiting, element_waiting = address, element
            k += changes
    if n:
        there = at[1 - half]
        fp[row_waiting] += _put(
            unit, mode, address_waiting, element_waiting, values, k_waiting, n, there, before, after
        )


@_jit
def scatter(unit, mode, address, element0, levels, count, start, counts, tile, gaps, values, k, dense, d, fp):  # type: ignore[no-untyped-def]  # compiled
    """Apply the columns from tile, k, d on to rows that are boxes. fp: as in apply. Rows at address 0 are passed over.

    levels: extent, stride, step, low and high of kernels.Place; element0: its `first`. A run of the innermost level is
    found once, and then followed.
    """
    width = _width(unit)
    extent, stride, step, low, high = levels[0], levels[1], levels[2], levels[3], levels[4]
    inner = extent.shape[1] - 1
    for row in range(len(count)):
        if address[row] == _U(0):
            tile, k, d = _pass_over(counts, tile, k, d, count[row])
            continue
        total = _U(0)
        # Elements of the box in the run at hand, those of them that are here, and where its element 0 would be.
        end, here, gone = np.int64(-1), np.int64(0), np.int64(0)
        place, element = _U(0), _U(0)
        for begin in range(start[row], start[row] + count[row], TILE):
            changes = np.int64(counts[tile])
            tile += 1
            is_dense = changes == 0xFFFF
            n = min(TILE, start[row] + count[row] - begin) if is_dense else changes
            planes, at = (dense, d) if is_dense else (values, k)
            e = np.int64(begin - 1)
            for i in range(n):
                e += 1
                if not is_dense:
                    e += np.int64(gaps[0, k + i]) + (np.int64(gaps[1, k + i]) << 8)
                if e >= end:
                    rest = e // extent[row, inner]
                    run = rest * extent[row, inner]
                    end = run + extent[row, inner]
                    offset, moved, inside = element0[row], np.int64(0), True
                    for level in range(inner - 1, -1, -1):
                        over = rest // extent[row, level]
                        c = rest - over * extent[row, level]
                        rest = over
                        offset += c * stride[row, level]
                        moved += c * step[row, level]
                        inside = inside and low[row, level] <= c and c < high[row, level]
                    here, gone = (run + low[row, inner], run + high[row, inner]) if inside else (end, end)
                    element = _U(offset - run * stride[row, inner])
                    place = address[row] + _U(moved - run * step[row, inner]) * width
                if e < here or e >= gone:
                    continue
                where = place + _U(e * step[row, inner]) * width
                old, new = _U(_load(where, unit)), _U(0)
                for b in range(width):
                    new |= _U(planes[np.int64(b), at + i]) << (_U(8) * b)
                if mode != 1:
                    new ^= old
                if mode == 2:
                    for b in range(width):
                        planes[np.int64(b), at + i] = (new >> (_U(8) * b)) & _U(255)
                elif mode != 3:
                    _store(where, type(unit)(new))
                total += _change(unit, element + _U(e * stride[row, inner]), old, new)
            if is_dense:
                d += n
            else:
                k += n
        fp[row] += total


@_jit
def fingerprint(address, nbytes, offset, fp):  # type: ignore[no-untyped-def]  # compiled
    """Fingerprint of the bytes of each row. offset: bytes of the tensor before the row."""
    for row in range(len(nbytes)):
        fp[row] = _sum_bytes(address[row], nbytes[row], _U(offset[row]))


@_jit
def fingerprint_boxes(width, address, element0, extent, stride, step, fp):  # type: ignore[no-untyped-def]  # compiled
    """Fingerprint of the elements of each box; see kernels.Place."""
    inner = extent.shape[1] - 1
    for row in range(len(address)):
        runs = extent[row].prod() // extent[row, inner]
        length = extent[row, inner] if stride[row, inner] == 1 and step[row, inner] == 1 else np.int64(1)
        total = _U(0)
        for run in range(runs):
            rest, offset, moved = np.int64(run), element0[row], np.int64(0)
            for level in range(inner - 1, -1, -1):
                over = rest // extent[row, level]
                c = rest - over * extent[row, level]
                rest = over
                offset += c * stride[row, level]
                moved += c * step[row, level]
            for c in range(0, extent[row, inner], length):
                where = address[row] + _U((moved + c * step[row, inner]) * width)
                total += _sum_bytes(where, length * width, _U((offset + c * stride[row, inner]) * width))
        fp[row] = total


@_jit
def check(length, counts, gaps, k):  # type: ignore[no-untyped-def]  # compiled
    """Return the first tile whose last position is outside it, or -1. Counts were checked before."""
    for tile in range(len(length)):
        n = np.int64(counts[tile])
        if n == 0xFFFF:
            continue
        low, high = np.int64(0), np.int64(0)
        for i in range(n):
            low += gaps[0, k + i]
            high += gaps[1, k + i]
        if low + 256 * high + n > length[tile]:
            return tile
        k += n
    return -1
