# SPDX-License-Identifier: Apache-2.0
"""A builder of LLVM assembly that reads like the loops it stands for.

    k = KernelBuilder()
    x, out, scale = k.pointer("f32"), k.pointer("f32"), k.number("f32")
    with k.rows() as row:                    # the rows of the tasks that this thread draws
        total = k.variable(k.constant("f32", 0.0))
        with k.loop(row * 8, row * 8 + 8) as i:
            total.set(total.get() + x.load(i) * scale)
        out.store(row, total.get())
    text = k.finish()

Values are numbers or vectors of them ("lanes"); a vector may be longer than the machine's, LLVM then splits it.
Every kernel has the C signature `void kernel(int64_t *arguments)`: what `pointer`, `integer` and `number` declare, in
that order, after the three words that `rows` reads (see there).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["f32", "f64", "i1", "i16", "i32", "i64"]

CACHE_LINE_BYTES = 64
"""What a prefetch fetches; on machines with longer lines some prefetches are superfluous."""

_NAMES = {"f32": "float", "f64": "double", "i1": "i1", "i16": "i16", "i32": "i32", "i64": "i64"}
_BYTES = {"f32": 4, "f64": 8, "i16": 2, "i32": 4, "i64": 8}


@dataclass(frozen=True)
class Type:
    """A number, or a vector of `lanes` of them."""

    kind: Kind
    lanes: int = 1

    def __str__(self) -> str:
        return _NAMES[self.kind] if self.lanes == 1 else f"<{self.lanes} x {_NAMES[self.kind]}>"

    @property
    def is_float(self) -> bool:
        """Whether the numbers are floating."""
        return self.kind in ("f32", "f64")

    @property
    def suffix(self) -> str:
        """How LLVM's intrinsics name the type."""
        return self.kind if self.lanes == 1 else f"v{self.lanes}{self.kind}"

    def literal(self, value: float) -> str:
        """The constant with `value` in every lane."""
        if self.is_float:
            if self.kind == "f32":
                value = struct.unpack("f", struct.pack("f", value))[0]
            text = "0x" + struct.pack(">d", value).hex().upper()
        else:
            text = str(int(value))
        return text if self.lanes == 1 else "<" + ", ".join([f"{_NAMES[self.kind]} {text}"] * self.lanes) + ">"


class Value:
    """A number or vector that the kernel has computed; operators emit instructions on it."""

    __slots__ = ("builder", "ref", "type")

    def __init__(self, builder: KernelBuilder, type: Type, ref: str) -> None:
        self.builder, self.type, self.ref = builder, type, ref

    def like(self, other: Operand) -> Value:
        """`other` as a value of this type: Python numbers become constants, numbers fill the lanes of a vector."""
        if not isinstance(other, Value):
            return Value(self.builder, self.type, self.type.literal(other))
        if other.type.lanes == 1 and self.type.lanes > 1:
            return other.broadcast(self.type.lanes)
        assert other.type == self.type, f"{self.type} with {other.type}"
        return other

    def _binary(self, operation: str, other: Operand) -> Value:
        return self.builder.emit(self.type, f"{operation} {self.type} {self.ref}, {self.like(other).ref}")

    def _arithmetic(self, operation: str, other: Operand) -> Value:
        return self._binary(f"f{operation}" if self.type.is_float else operation, other)

    def __add__(self, other: Operand) -> Value:
        return self._arithmetic("add", other)

    def __sub__(self, other: Operand) -> Value:
        return self._arithmetic("sub", other)

    def __mul__(self, other: Operand) -> Value:
        return self._arithmetic("mul", other)

    def __truediv__(self, other: Operand) -> Value:
        return self._binary("fdiv", other)

    def __and__(self, other: Operand) -> Value:
        return self._binary("and", other)

    def __or__(self, other: Operand) -> Value:
        return self._binary("or", other)

    def __xor__(self, other: Operand) -> Value:
        return self._binary("xor", other)

    def __lshift__(self, other: Operand) -> Value:
        return self._binary("shl", other)

    def __rshift__(self, other: Operand) -> Value:
        """Shifts right and fills with zeros."""
        return self._binary("lshr", other)

    def divide(self, divisor: int) -> tuple[Value, Value]:
        """Quotient and remainder of an integer that is not negative."""
        quotient = self._binary("udiv", divisor)
        return quotient, self - quotient * divisor

    def compare(self, predicate: str, other: Operand) -> Value:
        """LLVM's `fcmp` or `icmp`: a bool per lane."""
        operation = "fcmp" if self.type.is_float else "icmp"
        return self.builder.emit(
            Type("i1", self.type.lanes), f"{operation} {predicate} {self.type} {self.ref}, {self.like(other).ref}"
        )

    def select(self, chosen: Operand, otherwise: Value) -> Value:
        """Per lane of these bools, `chosen` or `otherwise`."""
        return self.builder.emit(
            otherwise.type,
            f"select {self.type} {self.ref}, {otherwise.type} {otherwise.like(chosen).ref},"
            f" {otherwise.type} {otherwise.ref}",
        )

    def multiply_add(self, factor: Operand, addend: Value) -> Value:
        """`self * factor + addend`, in one rounding where the machine can."""
        return self.builder.intrinsic("fmuladd", self.type, self, self.like(factor), self.like(addend))

    def maximum(self, other: Operand) -> Value:
        """The larger one; NaN if either is (floating) and, for integers, as signed numbers."""
        if not self.type.is_float:
            return self.builder.intrinsic("smax", self.type, self, self.like(other))
        return self.compare("ugt", other).select(self, self.like(other))

    def broadcast(self, lanes: int) -> Value:
        """This number in every lane."""
        return self.shuffle([0] * lanes)

    def shuffle(self, lanes: Sequence[int]) -> Value:
        """The vector whose lane i is lane `lanes[i]` of this one."""
        if self.type.lanes == 1:
            if len(lanes) == 1:
                return self
            vector = Type(self.type.kind, len(lanes))
            first = self.builder.emit(vector, f"insertelement {vector} poison, {self.type} {self.ref}, i32 0")
            return first.shuffle([0] * len(lanes))
        if list(lanes) == list(range(self.type.lanes)):
            return self
        if len(lanes) == 1:
            return self.builder.emit(Type(self.type.kind), f"extractelement {self.type} {self.ref}, i32 {lanes[0]}")
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.builder.emit(
            Type(self.type.kind, len(lanes)),
            f"shufflevector {self.type} {self.ref}, {self.type} poison, <{len(lanes)} x i32> <{mask}>",
        )

    def join(self, other: Value, lanes: Sequence[int]) -> Value:
        """The vector whose lane i is lane `lanes[i]` of this one and `other`, of the same type, side by side."""
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.builder.emit(
            Type(self.type.kind, len(lanes)),
            f"shufflevector {self.type} {self.ref}, {self.type} {self.like(other).ref}, <{len(lanes)} x i32> <{mask}>",
        )

    def pad(self, lanes: int, fill: float) -> Value:
        """This vector with lanes of `fill` added behind it."""
        if self.type.lanes == lanes:
            return self
        vector = Type(self.type.kind, lanes)
        wide = self.shuffle([*range(self.type.lanes), *[0] * (lanes - self.type.lanes)])
        keep = ", ".join(f"i1 {'true' if lane < self.type.lanes else 'false'}" for lane in range(lanes))
        return self.builder.emit(
            vector, f"select <{lanes} x i1> <{keep}>, {vector} {wide.ref}, {vector} {vector.literal(fill)}"
        )

    def sum(self) -> Value:
        """The sum of the lanes, added as a tree."""
        if self.type.lanes == 1:
            return self
        scalar = Type(self.type.kind)
        name = f"@llvm.vector.reduce.fadd.{self.type.suffix}"
        self.builder.declare(f"declare {scalar} {name}({scalar}, {self.type})")
        return self.builder.emit(
            scalar, f"call reassoc {scalar} {name}({scalar} {scalar.literal(-0.0)}, {self.type} {self.ref})"
        )

    def fold_sum(self, lanes: int) -> Value:
        """Adds the halves until `lanes` are left; the number of lanes is `lanes` times a power of two."""
        value = self
        while (half := value.type.lanes // 2) >= lanes:
            value = value.shuffle(range(half)) + value.shuffle(range(half, 2 * half))
        return value

    def fold_maximum(self, lanes: int) -> Value:
        """The same with the larger one instead of the sum."""
        value = self
        while (half := value.type.lanes // 2) >= lanes:
            value = value.shuffle(range(half)).maximum(value.shuffle(range(half, 2 * half)))
        return value

    def bits(self, kind: Kind) -> Value:
        """The same bits read as another kind of number of the same size."""
        target = Type(kind, self.type.lanes)
        return self.builder.emit(target, f"bitcast {self.type} {self.ref} to {target}")

    def halved(self) -> Value:
        """The same bits of 32-bit integers read as twice as many of 16 bits, the lower halves first."""
        target = Type("i16", 2 * self.type.lanes)
        return self.builder.emit(target, f"bitcast {self.type} {self.ref} to {target}")

    def convert(self, kind: Kind) -> Value:
        """The same number as another kind of integer (sign kept), or as another float."""
        if kind == self.type.kind:
            return self
        target = Type(kind, self.type.lanes)
        wider = _BYTES[kind] > _BYTES[self.type.kind]
        operation = ("fpext" if wider else "fptrunc") if self.type.is_float else ("sext" if wider else "trunc")
        return self.builder.emit(target, f"{operation} {self.type} {self.ref} to {target}")


Operand = Value | float | int


class Variable:
    """A value that changes, as in a loop; LLVM keeps it in a register."""

    __slots__ = ("_address", "_builder", "type")

    def __init__(self, builder: KernelBuilder, type: Type, address: str) -> None:
        self._builder, self.type, self._address = builder, type, address

    def get(self) -> Value:
        """Its value here."""
        return self._builder.emit(self.type, f"load {self.type}, ptr {self._address}")

    def set(self, value: Operand) -> None:
        """Changes it from here on."""
        if isinstance(value, Value):
            assert value.type == self.type, f"{self.type} set to {value.type}"
        ref = value.ref if isinstance(value, Value) else self.type.literal(value)
        self._builder.line(f"store {self.type} {ref}, ptr {self._address}")


class Pointer:
    """An array of numbers; indices count numbers."""

    __slots__ = ("builder", "kind", "ref")

    def __init__(self, builder: KernelBuilder, kind: Kind, ref: str) -> None:
        self.builder, self.kind, self.ref = builder, kind, ref

    def at(self, index: Operand) -> Pointer:
        """The array from its element `index` on."""
        ref = index.ref if isinstance(index, Value) else str(index)
        address = self.builder.instruction(f"getelementptr {_NAMES[self.kind]}, ptr {self.ref}, i64 {ref}")
        return Pointer(self.builder, self.kind, address)

    def load(self, index: Operand = 0, lanes: int = 1) -> Value:
        """The number at `index`, or the vector that begins there."""
        type = Type(self.kind, lanes)
        return self.builder.emit(type, f"load {type}, ptr {self.at(index).ref}, align {_BYTES[self.kind]}")

    def address(self) -> Value:
        """Where it lies, as an int64."""
        return self.builder.emit(Type("i64"), f"ptrtoint ptr {self.ref} to i64")

    def load_some(self, count: Value, lanes: int) -> Value:
        """The vector of the first `count` numbers (int64), zeros behind them; nothing behind them is read."""
        type = Type(self.kind, lanes)
        bools = Type("i1", lanes)
        inside = self.builder.vector("i32", range(lanes)).compare("slt", count.convert("i32"))
        name = f"@llvm.masked.load.{type.suffix}.p0"
        self.builder.declare(f"declare {type} {name}(ptr, i32 immarg, {bools}, {type})")
        arguments = f"ptr {self.ref}, i32 {_BYTES[self.kind]}, {bools} {inside.ref}, {type} {type.literal(0)}"
        return self.builder.emit(type, f"call {type} {name}({arguments})")

    def store(self, index: Operand, value: Value, *, past_cache: bool = False) -> None:
        """Writes a number or a vector at `index`.

        Args:
            past_cache: Straight to memory, which is not read first: for what nobody reads soon. Only whole vectors of
                the machine's length where the address is a multiple of it. Seen by other threads once the task is over,
                since drawing the next one is an atomic operation, which such writes do not pass.
        """
        assert value.type.kind == self.kind, f"{value.type} stored among {self.kind}"
        size = _BYTES[self.kind]
        how = f"align {size}" if not past_cache else f"align {size * value.type.lanes}, {self.builder.no_reuse()}"
        self.builder.line(f"store {value.type} {value.ref}, ptr {self.at(index).ref}, {how}")

    def prefetch(self, index: Operand, count: int, *, level: int = 1) -> None:
        """Asks for the cache lines of `count` numbers from `index` on; they come as near as the cache of that level."""
        self.builder.declare("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        step = CACHE_LINE_BYTES // _BYTES[self.kind]
        for offset in range(0, count, step):
            address = self.at(index).at(offset)
            self.builder.line(f"call void @llvm.prefetch.p0(ptr {address.ref}, i32 0, i32 {4 - level}, i32 1)")


class KernelBuilder:
    """One kernel under construction; see the top of this file."""

    def __init__(self) -> None:
        self._declarations: dict[str, None] = {}
        self._prologue: list[str] = []
        self._body: list[str] = []
        self._count = 0
        self._arguments = 3  # the task bounds, their number, the counter
        self._metadata: dict[str, None] = {}

    # ---- instructions

    def instruction(self, text: str) -> str:
        """Emits an instruction and returns the name of its result."""
        self._count += 1
        self.line(f"%v{self._count} = {text}")
        return f"%v{self._count}"

    def emit(self, type: Type, text: str) -> Value:
        """Emits an instruction whose result has this type."""
        return Value(self, type, self.instruction(text))

    def line(self, text: str) -> None:
        """Emits an instruction without result."""
        self._body.append("  " + text)

    def declare(self, text: str) -> None:
        """States the signature of an intrinsic."""
        self._declarations[text] = None

    def no_reuse(self) -> str:
        """Says of a load or store that what it touches is not needed again soon."""
        self._metadata["!0 = !{i32 1}"] = None
        return "!nontemporal !0"

    def intrinsic(self, name: str, type: Type, *operands: Value) -> Value:
        """Calls an intrinsic whose operands and result have one type."""
        types = ", ".join([str(type)] * len(operands))
        self.declare(f"declare {type} @llvm.{name}.{type.suffix}({types})")
        arguments = ", ".join(f"{type} {operand.ref}" for operand in operands)
        return self.emit(type, f"call {type} @llvm.{name}.{type.suffix}({arguments})")

    def constant(self, kind: Kind, value: float, lanes: int = 1) -> Value:
        """A constant in every lane."""
        type = Type(kind, lanes)
        return Value(self, type, type.literal(value))

    def choose(self, condition: Value, chosen: Pointer, otherwise: Pointer) -> Pointer:
        """One of two arrays."""
        address = self.instruction(f"select i1 {condition.ref}, ptr {chosen.ref}, ptr {otherwise.ref}")
        return Pointer(self, chosen.kind, address)

    def pointer_to(self, kind: Kind, address: Value) -> Pointer:
        """The array at an address."""
        return Pointer(self, kind, self.instruction(f"inttoptr i64 {address.ref} to ptr"))

    def vector(self, kind: Kind, values: Sequence[int]) -> Value:
        """A constant of integers, lane by lane."""
        lanes = ", ".join(f"{_NAMES[kind]} {value}" for value in values)
        return Value(self, Type(kind, len(values)), f"<{lanes}>" if len(values) > 1 else str(values[0]))

    def variable(self, initial: Value) -> Variable:
        """A variable that holds `initial` from here on."""
        self._count += 1
        address = f"%a{self._count}"
        self._prologue.append(f"  {address} = alloca {initial.type}")
        variable = Variable(self, initial.type, address)
        variable.set(initial)
        return variable

    def scratch(self, kind: Kind, count: int) -> Pointer:
        """An array of this thread's own, on its stack, with any content."""
        self._count += 1
        self._prologue.append(f"  %a{self._count} = alloca [{count} x {_NAMES[kind]}], align {CACHE_LINE_BYTES}")
        return Pointer(self, kind, f"%a{self._count}")

    # ---- arguments

    def _argument(self, type: str) -> str:
        self._count += 1
        slot = f"%s{self._count}"
        self._prologue.append(f"  {slot} = getelementptr i64, ptr %arguments, i64 {self._arguments}")
        self._prologue.append(f"  %v{self._count} = load {type}, ptr {slot}")
        self._arguments += 1
        return f"%v{self._count}"

    def pointer(self, kind: Kind) -> Pointer:
        """The next argument: the address of an array."""
        return Pointer(self, kind, self._argument("ptr"))

    def integer(self) -> Value:
        """The next argument: an int64."""
        return Value(self, Type("i64"), self._argument("i64"))

    def number(self, kind: Kind) -> Value:
        """The next argument: a float64, converted to `kind`."""
        value = Value(self, Type("f64"), self._argument("double"))
        if kind == "f64":
            return value
        self._prologue.append(f"  {value.ref}f = fptrunc double {value.ref} to float")
        return Value(self, Type("f32"), value.ref + "f")

    # ---- control

    def _label(self, name: str) -> str:
        self._count += 1
        return f"{name}{self._count}"

    def _block(self, label: str) -> None:
        self.line(f"br label %{label}")
        self._body.append(f"{label}:")

    @contextmanager
    def loop(self, begin: Operand, end: Value, step: int = 1) -> Iterator[Value]:
        """Runs the body for begin, begin + step, ... below `end` (int64)."""
        head, body, done = self._label("head"), self._label("body"), self._label("done")
        counter = self.variable(begin if isinstance(begin, Value) else self.constant("i64", begin))
        self._block(head)
        index = counter.get()
        self.line(f"br i1 {index.compare('slt', end).ref}, label %{body}, label %{done}")
        self._body.append(f"{body}:")
        yield index
        counter.set(index + step)
        self.line(f"br label %{head}")
        self._body.append(f"{done}:")

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Runs the body if the bool holds."""
        body, done = self._label("then"), self._label("done")
        self.line(f"br i1 {condition.ref}, label %{body}, label %{done}")
        self._body.append(f"{body}:")
        yield
        self._block(done)

    @contextmanager
    def tasks(self) -> Iterator[tuple[Value, Value, Value]]:
        """Runs the body for the tasks that this thread draws: (task, first row, row behind the last).

        The first three arguments are the address of the tasks' bounds (int64, one more than tasks), the number of
        tasks, and the address of a counter that all threads of one call share. Which thread draws a task is left to
        chance, so no result may depend on it.
        """
        self._prologue += [
            "  %bounds = load ptr, ptr %arguments",
            "  %slot1 = getelementptr i64, ptr %arguments, i64 1",
            "  %num_tasks = load i64, ptr %slot1",
            "  %slot2 = getelementptr i64, ptr %arguments, i64 2",
            "  %counter = load ptr, ptr %slot2",
        ]
        draw, body, done = self._label("draw"), self._label("body"), self._label("done")
        self._block(draw)
        task = self.emit(Type("i64"), "atomicrmw add ptr %counter, i64 1 monotonic")
        more = task.compare("slt", Value(self, Type("i64"), "%num_tasks"))
        self.line(f"br i1 {more.ref}, label %{body}, label %{done}")
        self._body.append(f"{body}:")
        bounds = Pointer(self, "i64", "%bounds")
        yield task, bounds.load(task), bounds.load(task + 1)
        self.line(f"br label %{draw}")
        self._body.append(f"{done}:")

    @contextmanager
    def rows(self) -> Iterator[Value]:
        """Runs the body for each row of the tasks that this thread draws; see `tasks`."""
        with self.tasks() as (_, first, end), self.loop(first, end) as row:
            yield row

    def finish(self) -> str:
        """The module's assembly; the kernel is its one function, `kernel`."""
        return "\n".join(
            [
                *self._declarations,
                "define void @kernel(ptr %arguments) nounwind {",
                "entry:",
                *self._prologue,
                *self._body,
                "  ret void",
                "}",
                *self._metadata,
                "",
            ]
        )
