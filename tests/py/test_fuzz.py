"""Random calls of every PyTorch operator, drawn from the descriptions that the fakes read too (bastile/torch.h), as
tests/fuzz draws them in C. What a description does not say of a type, the operator's own error does: it is followed.

A call that is accepted returns what its fake returns, shapes, types and strides, leaves its inputs as they were but for
those that its schema says it writes, and gives the same bits again. One with a rule broken raises, by a sentence, and
writes nothing."""

from __future__ import annotations

import math
import os
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bastile.ops import _fakes
from oracle import EMULATED, devices

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TYPES |= {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}
WRONG_TYPES = (torch.float64, torch.int8, torch.bool, torch.complex64, torch.uint16)
SIZES = (1, 2, 8, 33) if EMULATED else (1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 130, 257)
FLOATS = (0.0, 1e-6, 0.5, 1.0, 2.0, 30.0)
OPERATORS = {text.split()[0]: text for _, text in _fakes._descriptions()}
#: Calls of each operator.
CALLS = int(os.environ.get("BASTILE_EXAMPLES", "3" if EMULATED else "25"))


@dataclass
class Argument:
    """A word of the description: a tensor with its shape, or an attribute without one."""

    name: str
    shape: str
    optional: bool
    kind: str
    written: bool


def arguments_of(operator: str) -> list[Argument]:
    words = _fakes._pairs(OPERATORS[operator].partition(" ->")[0].split()[1:])
    schema = getattr(torch.ops.bastile, operator).default._schema.arguments
    return [
        Argument(
            name, shape, str(s.type).startswith("Optional"), str(s.type), bool(s.alias_info and s.alias_info.is_write)
        )
        for (name, shape), s in zip(words, schema, strict=True)
    ]


class Draw:
    """The arguments of one call."""

    def __init__(self, operator: str, seed: int, device: str) -> None:
        self.random = random.Random(f"{operator} {seed}")
        self.generator = torch.Generator().manual_seed(seed)
        self.operator, self.device = operator, device
        self.arguments = arguments_of(operator)
        self.on_gpu = EMULATED or device == "cuda"
        self.aligned = False
        self.budget = 1 << self.random.randint(2, 11)
        self.sizes: dict[str, int] = {}
        self.leading: list[int] | None = None
        self.shapes: dict[str, list[int]] = {}
        #: Of each tensor: so many kinds of float that a call may mix them, and the common one.
        common = self.random.choice(list(TYPES.values())[:3])
        mixed = self.random.random() < 0.3
        self.types = {
            a.name: self.random.choice(list(TYPES.values())[:3]) if mixed else common for a in self.arguments if a.shape
        }
        self.attributes = {a.name: self.attribute(a) for a in self.arguments if not a.shape}
        self.given = {a.name for a in self.arguments if a.shape and (not a.optional or self.random.random() < 0.5)}
        self.relate()
        for argument in sorted(self.arguments, key=lambda a: a.shape[:1] in ("=", "#", "~")):
            if argument.shape and (argument.shape[0] != "=" or argument.shape[1:] in self.given):
                self.shapes[argument.name] = self.shape(argument.shape)
        self.given &= self.shapes.keys()

    def attribute(self, argument: Argument) -> Any:
        if argument.kind == "bool":
            return self.random.random() < 0.6
        return self.random.choice(FLOATS) if argument.kind == "float" else self.random.choice((0, 1, 1, 2, 5))

    def size(self) -> int:
        if self.random.random() < 0.02:
            return 0
        size = min(self.random.choice(SIZES), self.random.randint(1, self.budget))
        self.budget //= size
        return size

    def relate(self) -> None:
        """Sizes that would hardly ever fit together by chance, as tests/fuzz/draw.c has them."""
        names = {a.name for a in self.arguments}
        if "cos" in names:
            self.sizes["D"] = 2 + self.size()
            self.sizes["R"] = 2 * self.random.randint(1, self.sizes["D"] // 2)
        if names & {"order", "position"}:
            tokens, choices = self.size(), self.random.randint(1, 4)
            self.sizes |= {"T": tokens, "P": tokens, "K": choices, "Q": choices, "N": tokens * choices}
        if "teacher_indices" in names:
            classes = self.sizes["V"] = self.size()
            ways = [{"teacher_hidden", "teacher_weight"}, {"teacher_logits"}, {"teacher_logits", "teacher_indices"}]
            way = self.random.choice(ways)
            self.given -= set().union(*ways, () if "teacher_hidden" in way else ("teacher_bias",))
            self.given |= way | names & {"sums", "grad"}
            self.sizes["K"] = self.random.randint(min(1, classes), classes) if "teacher_indices" in way else classes
        for half in set(re.findall("-([A-Z])", OPERATORS[self.operator])):
            self.sizes[half] = 2 * self.size()
        if "blocksize" in names:
            rows, columns = self.size(), self.size()
            block, nested = 8 << self.random.randint(0, 3), 1 << self.random.randint(0, 3)
            blocks = -(rows * columns // -block)
            self.attributes |= {"rows": rows, "columns": columns, "blocksize": block, "nested_blocksize": nested}
            self.leading = [(rows * columns + 1) // 2]
            self.sizes |= {"A": blocks, "S": -(blocks // -nested), "C": 16, "D": 256}
        if "cu_seqlens" in names:
            self.given.discard("cu_seqlens")
            if self.random.random() < 0.5:
                self.sizes |= {"B": 1, "S": 2 + self.size()}
                self.given = (self.given | {"cu_seqlens"}) - {"initial", "dfinal"}
                self.attributes |= {name: False for name in ("want_final", "want_dinitial") if name in names}
        for weight, bias, into in [(f"weight_{i}", f"bias_{i}", f"into_{i}") for i in (1, 2)]:
            if into in names:
                self.given = self.given | {into} if weight in self.given else self.given - {bias, into}
        if {"weight_0", "a_0"} <= names:
            # An adapter is whole, of a layer that there is, and all are of one type, x's or float32.
            wide = self.random.random() < 0.5
            for i in range(3):
                pair = {f"a_{i}", f"b_{i}"}
                given = self.random.random() < 0.5 and f"weight_{i}" in self.given
                self.given = self.given | pair if given else self.given - pair
                self.types |= dict.fromkeys(pair, torch.float32 if wide else self.types["x"])
        if "cuts" in names:
            groups = self.random.randint(1, 3)
            self.sizes |= {"G": groups, "H": groups * self.random.randint(1, 3), "C": self.random.randint(2, 9)}
            self.sizes["D"] = self.random.choice((64, 128)) if self.on_gpu else self.random.randint(1, 130)
        if self.on_gpu and {"q", "k", "v"} <= names:
            # Attentions' kernels are of 16 bits, and read 16 bytes at a time.
            self.aligned = self.random.random() < 0.8
            self.sizes.setdefault("D", 8 * self.random.randint(1, 17))
            halves = self.random.choice((torch.bfloat16, torch.float16))
            self.types |= {name: halves for name, dtype in self.types.items() if dtype is torch.float32}
        if "experts" in names:
            self.leading = [self.size(), self.size()]
            self.attributes["experts"] = self.random.randint(1, 9)

    def shape(self, shape: str) -> list[int]:
        shape = shape.partition("+")[0]
        shape, _, reduced = shape.partition("/")
        if (reduced and self.attributes[reduced] != _fakes.NOT_REDUCED) or shape == ".":
            return [1] * self.random.randint(0, 2)
        if shape[0] == "=":
            return list(self.shapes[shape[1:]])
        if self.leading is None and shape[0] in "*#":
            self.leading = [self.size() for _ in range(self.random.randint(0, 3))]
        if shape[0] == "#":
            return [math.prod(self.leading or [])] + [int(c) for c in shape[1:]]
        sizes = list(self.leading or []) if shape[0] == "*" else []
        for symbol in re.findall("[~-]?.", shape.removeprefix("*")):
            if symbol.isdigit():
                sizes.append(int(symbol))
                continue
            size = self.sizes.setdefault(symbol[-1], 0) if symbol[-1] in self.sizes else None
            if size is None:
                size = self.sizes[symbol[-1]] = self.size()
            sizes.append(size // 2 if symbol[0] == "-" else self.random.choice((1, size)) if symbol[0] == "~" else size)
        return sizes

    # ---- numbers and layouts ----

    def numbers(self, name: str) -> torch.Tensor:
        shape, dtype = self.shapes[name], self.types[name]
        count = math.prod(shape)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=self.generator).to(dtype)
        if name in ("order", "position"):
            return torch.randperm(count, generator=self.generator).to(dtype).view(shape)
        if name == "ends":
            rows = self.sizes.get("N", 0)
            ends = torch.randint(rows + 1, (count,), generator=self.generator).sort().values
            ends[-1:] = rows
            return ends.to(dtype).view(shape)
        if name == "cu_seqlens":
            between = torch.randint(self.sizes["T"] + 1, (count - 2,), generator=self.generator).sort().values
            return torch.tensor([0, *between.tolist(), self.sizes["T"]], dtype=dtype)
        if name == "cuts":
            rows = [
                torch.randint(self.sizes[letter] + 1, (shape[1] - 2,), generator=self.generator).sort().values.tolist()
                for letter in "TS"
            ]
            return torch.tensor([[0, *row, self.sizes[of]] for row, of in zip(rows, "TS", strict=True)], dtype=dtype)
        if name == "teacher_indices":  # none twice in a row
            first = torch.randint(max(1, self.sizes["V"]), [*shape[:1], 1], generator=self.generator)
            return ((first + torch.arange(shape[1])) % max(1, self.sizes["V"])).to(dtype)
        if dtype is torch.uint8:
            return torch.randint(256, shape, generator=self.generator, dtype=dtype)
        classes = self.sizes.get("V") or self.sizes.get("E") or self.attributes.get("experts") or 1
        return torch.randint(classes, shape, generator=self.generator, dtype=dtype)

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers elsewhere: contiguous, in rows that lie apart, transposed, not at a vector's boundary."""
        way = self.random.choice((0, 0, 1, 1, 1, 3, 3, 2))
        if way == 1 and tensor.dim():
            wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + self.random.randint(1, 9))
            return wide[..., : tensor.shape[-1]].copy_(tensor)
        if way == 2 and tensor.dim() > 1:
            order = self.random.sample(range(tensor.dim()), tensor.dim())
            back = sorted(range(tensor.dim()), key=order.__getitem__)
            return tensor.permute(order).contiguous().permute(back)
        if way == 3:
            memory = tensor.new_empty(tensor.numel() + 8)
            return memory[self.random.randint(1, 7) :][: tensor.numel()].view(tensor.shape).copy_(tensor)
        return tensor

    def values(self) -> list[Any]:
        return [
            (self.place(a) if a.name in self.given else None) if a.shape else self.attributes[a.name]
            for a in self.arguments
        ]

    def place(self, argument: Argument) -> torch.Tensor:
        numbers = self.numbers(argument.name)
        # What is written must lie as the operator writes it, which no description here says.
        anyhow = not self.aligned and (not argument.written or self.random.random() < 0.2)
        return copies([(self.lay(numbers) if anyhow else numbers).to(self.device)])[0]

    def follow(self, error: str) -> bool:
        """Takes the type, or the attribute, that an error says is needed; False where it says something else."""
        said = re.search(r": (\w+) (?:has elements of type \w+|is \w+); (\w+)(?:,.*| or .*)? (?:is|are) needed", error)
        if said and said[1] in self.types and said[2] in TYPES and self.types[said[1]] != TYPES[said[2]]:
            self.types[said[1]] = TYPES[said[2]]
            return True
        said = re.search(r": (\w+) is [-\w.+]+; (.*) is needed", error)
        if said and said[1] in self.attributes:
            numbers = re.findall(r"\d+", said[2])
            kind = type(self.attributes[said[1]])
            self.attributes[said[1]] = kind(self.random.choice(numbers or ["1"]))
            return True
        said = re.search(r": (\w+) is NULL; a tensor is needed", error)
        if said and said[1] in self.shapes and said[1] not in self.given:
            self.given.add(said[1])
            return True
        return False


def copies(values: list[Any]) -> list[Any]:
    """Tensors of the same layout in memory of their own."""

    def copy(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage().clone()
        return t.new_empty(0).set_(storage, t.storage_offset(), t.shape, t.stride())

    return [copy(v) if isinstance(v, torch.Tensor) else v for v in values]


def bits(value: Any) -> Any:
    """What can be compared: NaN is NaN."""
    if not isinstance(value, torch.Tensor):
        return value
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    value = value.detach().contiguous().cpu()
    if value.is_floating_point():
        value = torch.where(value.isnan(), torch.full_like(value, float("nan")), value)
    return value.view(-1).view(as_integers).tolist() if value.numel() else []


def results_of(returned: Any) -> list[torch.Tensor]:
    return [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)


def call(operator: str, values: list[Any]) -> list[torch.Tensor]:
    return results_of(getattr(torch.ops.bastile, operator)(*values))


def fake(operator: str, values: list[Any]) -> list[torch.Tensor]:
    with FakeTensorMode() as mode:
        return call(operator, [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in values])


def is_refused(operator: str, values: list[Any]) -> str:
    """The sentence; "" where the call is accepted. Nothing has been written then."""
    before = [bits(v) for v in values]
    try:
        call(operator, values)
        return ""
    except RuntimeError as error:
        sentence = str(error).split("\n")[0]
    assert [bits(v) for v in values] == before, f"{sentence}, and an input has changed"
    assert re.match(r"bastile: \w+: .{12}", sentence), f"no sentence: {sentence!r}"
    return sentence


def accepted(operator: str, seed: int, device: str) -> tuple[Draw, list[Any]] | None:
    """A call that the operator serves; None where it needs what is not known here."""
    draw = Draw(operator, seed, device)
    for _ in range(12):
        values = draw.values()
        sentence = is_refused(operator, copies(values))
        if not sentence:
            return draw, values
        if not draw.follow(sentence):
            return None
    return None


def check_legal(draw: Draw, values: list[Any]) -> None:
    first, second = copies(values), copies(values)
    made = call(draw.operator, first)
    again = call(draw.operator, second)
    assert [bits(m) for m in made] == [bits(a) for a in again], "other bits when it is called again"
    for argument, value, before, repeated in zip(draw.arguments, first, values, second, strict=True):
        if argument.written:
            assert bits(value) == bits(repeated), f"{argument.name} is written otherwise when it is called again"
        else:
            assert bits(value) == bits(before), f"{argument.name} has been written"
    supposed = fake(draw.operator, values)
    assert len(supposed) == len(made)
    for number, (real, unreal) in enumerate(zip(made, supposed, strict=True)):
        assert real.shape == unreal.shape, (
            f"result {number}: the fake has {tuple(unreal.shape)}, not {tuple(real.shape)}"
        )
        assert real.dtype == unreal.dtype, f"result {number}: the fake has {unreal.dtype}, not {real.dtype}"
        if real.numel():
            wanted = [s for s, n in zip(unreal.stride(), unreal.shape, strict=True) if n > 1]
            strides = [s for s, n in zip(real.stride(), real.shape, strict=True) if n > 1]
            assert strides == wanted, f"result {number} has strides {strides}, not the fake's {wanted}"
        assert all(
            real.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
            for v in first
            if isinstance(v, torch.Tensor) and real.numel()
        ), f"result {number} lies in an input"


def spoil(draw: Draw, values: list[Any]) -> tuple[str, list[Any]]:
    """The name of what is wrong now, and the arguments."""
    values = copies(values)
    tensors = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
    at = draw.random.choice(tensors)
    argument, tensor = draw.arguments[at], values[at]
    ways = ["type"] if argument.optional or len(tensors) == 1 else ["type", "missing"]
    if argument.shape[0] not in "*#." and "/" not in argument.shape and tensor.dim() < 8:
        ways.append("rank")
    if argument.shape[0] == "=" and tensor.dim() and argument.shape != f"={argument.name}":
        ways.append("size")
    way = draw.random.choice(ways)
    if way == "type":
        values[at] = tensor.to(draw.random.choice(WRONG_TYPES))
    elif way == "missing":
        values[at] = None
    elif way == "rank":
        values[at] = tensor.unsqueeze(-1)
    else:
        values[at] = torch.cat((tensor, tensor[:1] if len(tensor) else tensor.new_zeros((1, *tensor.shape[1:]))))
    return argument.name, values


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_that_are_drawn(operator: str, device: str):
    legal = 0
    for seed in range(CALLS):
        found = accepted(operator, seed, device)
        if not found:
            continue
        legal += 1
        draw, values = found
        try:
            check_legal(draw, values)
            for _ in range(2):
                name, spoiled = spoil(draw, values)
                sentence = is_refused(operator, spoiled)
                assert sentence, f"{name} is wrong, and the call was accepted"
        except AssertionError as error:
            shown = {
                a.name: (tuple(v.shape), v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v
                for a, v in zip(draw.arguments, values, strict=True)
            }
            raise AssertionError(f"{operator}, seed {seed}: {error}\n{shown}") from error
    assert legal * 5 >= CALLS, f"{legal} of {CALLS} calls were accepted: what does {operator} need?"
