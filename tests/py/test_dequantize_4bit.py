"""Weights out of codes of four bits, on every device at hand: to the bit what float32 arithmetic says, rounded once,
and what bitsandbytes makes."""

from __future__ import annotations

import pytest
import torch

from bastile.ops.dequantize_4bit import Nested, Quantised, dequantize_4bit, dequantize_4bit_group
from oracle import DTYPES, assert_same_bits, devices, numbers, random_tensor


def random_bytes(count: int, device: str) -> torch.Tensor:
    return torch.randint(256, (count,), generator=numbers.generator, dtype=torch.uint8).to(device)


def quantised(shape, blocksize, inner, device):
    """Random codes and scales: what no quantisation gives, too. inner: the blocks of absmax; 0: it is not nested."""
    count = shape[0] * shape[1]
    blocks = -(count // -blocksize)
    packed, code = random_bytes((count + 1) // 2, device), random_tensor((16,), torch.float32, device)
    if not inner:
        return packed, random_tensor((blocks,), torch.float32, device), code, None
    nested = Nested(
        random_tensor((256,), torch.float32, device),
        random_tensor((-(blocks // -inner),), torch.float32, device),
        random_tensor((), torch.float32, device),
        inner,
    )
    return packed, random_bytes(blocks, device), code, nested


def exact(packed, absmax, code, shape, dtype, blocksize, nested):
    """Element by element: one product, before it a product and a sum where absmax is nested, each rounded."""
    at = torch.arange(shape[0] * shape[1], device=packed.device)
    byte = packed[at // 2].long()
    number = torch.where(at % 2 == 0, byte >> 4, byte & 15)
    block = at // blocksize
    most = absmax[block]
    if nested is not None:
        product = nested.code[most.long()] * nested.absmax[block // nested.blocksize]
        most = product + nested.offset
    return (code[number] * most).to(dtype).view(shape)


# Whole vectors; an odd number of elements, whose last byte is half used; rows that end within a block; one element;
# more than a block of threads takes; none.
SHAPES = [((4, 256), 64), ((5, 33), 32), ((3, 100), 64), ((1, 1), 4096), ((70, 258), 128), ((0, 64), 64)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [0, 256, 2])
@pytest.mark.parametrize(("shape", "blocksize"), SHAPES)
def test_bits(shape, blocksize, inner, dtype, device):
    packed, absmax, code, nested = quantised(shape, blocksize, inner, device)
    want = exact(packed, absmax, code, shape, dtype, blocksize, nested)
    assert_same_bits(dequantize_4bit(packed, absmax, code, shape, dtype, blocksize=blocksize, nested=nested), want)
    # At an address that allows single bytes alone, and of another shape, as bitsandbytes has them.
    shifted = torch.cat([packed[:1], packed])[1:].view(-1, 1)
    assert_same_bits(dequantize_4bit(shifted, absmax, code, shape, dtype, blocksize=blocksize, nested=nested), want)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [32, 64, 256, 4096])
def test_bitsandbytes(blocksize, nested, kind, dtype, device):
    """Rows are multiples of a block: for others its own kernel for CPU gives other numbers than were quantised."""
    functional = pytest.importorskip("bitsandbytes").functional
    weight = random_tensor((6, 4096), dtype, device)
    packed, state = functional.quantize_4bit(weight, blocksize=blocksize, compress_statistics=nested, quant_type=kind)
    inner = state.state2
    given = Nested(inner.code, inner.absmax, state.offset, inner.blocksize) if nested else None
    made = dequantize_4bit(packed, state.absmax, state.code, weight.shape, dtype, blocksize=blocksize, nested=given)
    want = functional.dequantize_4bit(packed, state)
    if device == "cpu":  # where its kernel, if any, is of the processor's vectors, and may round twice
        torch.testing.assert_close(made, want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
    else:  # a zero may have either sign: in FP4, where bitsandbytes' kernels differ in it
        assert_same_bits(made + 0, want + 0)
    assert (made - weight).abs().max() < 0.35 * weight.abs().max()  # it is this weight


# Queries, keys and values; more than a launch takes, one of them of odd elements, so that the next begins at no access;
# one that has no rows.
GROUPS = [((40, 128), (8, 128), (8, 128)), ((3, 33), (5, 33), (1, 33), (2, 33), (70, 33)), ((4, 64), (0, 64), (2, 64))]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [0, 2])
@pytest.mark.parametrize("shapes", GROUPS)
def test_a_group_has_the_bits_of_each(shapes, inner, dtype, device):
    """And lies in one memory."""
    given = [quantised(shape, 32, inner, device) for shape in shapes]
    weights = [Quantised(*rest, shape, 32, nested) for (*rest, nested), shape in zip(given, shapes, strict=True)]
    made = dequantize_4bit_group(weights, dtype)
    for got, (packed, absmax, code, nested), shape in zip(made, given, shapes, strict=True):
        assert_same_bits(got, exact(packed, absmax, code, shape, dtype, 32, nested))
    starts = [t.storage_offset() for t in made]
    assert starts == [sum(t.numel() for t in made[:i]) for i in range(len(made))]
    assert len({t.untyped_storage().data_ptr() for t in made}) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (2, 128)},
        {"blocksize": 32, "absmax": torch.ones(8)},
        {"nested": Nested(torch.ones(256), torch.ones(1), torch.ones(())), "absmax": torch.zeros(4, dtype=torch.uint8)},
    ],
)
def test_weights_that_differ_are_made_one_by_one(other):
    packed, absmax, code, _ = quantised((4, 64), 64, 0, "cpu")
    one = Quantised(packed, absmax, code, (4, 64))
    made = dequantize_4bit_group([one, one._replace(**other)], torch.float32)
    assert_same_bits(made[0], exact(packed, absmax, code, (4, 64), torch.float32, 64, None))
    assert made[0].untyped_storage().data_ptr() != made[1].untyped_storage().data_ptr()


def test_none_are_none():
    assert list(dequantize_4bit_group([], torch.float32)) == []


def test_other_devices_and_transforms_run_the_original():
    packed, absmax, code, nested = quantised((4, 64), 64, 2, "cpu")
    want = dequantize_4bit(packed, absmax, code, (4, 64), torch.float32, nested=nested)
    many = torch.func.vmap(lambda c: dequantize_4bit(packed, absmax, c, (4, 64), torch.float32, nested=nested))
    torch.testing.assert_close(many(code[None])[0], want, rtol=0, atol=0)


def test_compiled_without_a_graph_break():
    packed, absmax, code, nested = quantised((4, 64), 64, 2, "cpu")

    def function(packed):
        return dequantize_4bit(packed, absmax, code, (4, 64), torch.bfloat16, nested=nested)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(packed), function(packed))

    def group(packed):
        weights = [Quantised(packed, absmax, code, shape, 64, nested) for shape in ((4, 64), (4, 64))]
        return dequantize_4bit_group(weights, torch.bfloat16)[1]

    assert_same_bits(torch.compile(group, fullgraph=True, backend="aot_eager")(packed), function(packed))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": torch.float64}, "dtype is torch.float64; float32, bfloat16 or float16 is needed"),
        ({"blocksize": 24}, "blocksize is 24; a power of two from 8 to 65536 is needed"),
        ({"shape": (4, 65)}, r"packed has shape \[128\]; 130 elements"),
        ({"shape": (-4, 64)}, "rows is -4; a number from 0"),
        ({"absmax": torch.ones(3)}, r"absmax has shape \[3\]; 4 elements"),
        ({"absmax": torch.ones(4, dtype=torch.uint8)}, "absmax is uint8; float32 is needed"),
        ({"code": torch.ones(15)}, r"code has shape \[15\]; 16 elements"),
        ({"packed": torch.ones(128)}, "packed has elements of type float32; uint8 is needed"),
    ],
)
def test_errors_name_the_argument(change, sentence):
    packed, absmax, code, _ = quantised((4, 64), 64, 0, "cpu")
    given = {"packed": packed, "absmax": absmax, "code": code, "shape": (4, 64), "dtype": torch.float32} | change
    with pytest.raises((RuntimeError, ValueError), match=f"dequantize_4bit: {sentence}"):
        dequantize_4bit(**given)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shape": (5, 64)}, r"quantised\[1\]: packed has shape \[128\]; 160 elements"),
        ({"shape": (-4, 64)}, r"rows\[1\] is -4; a number from 0"),
        ({"absmax": torch.ones(3)}, r"quantised\[1\]: absmax has shape \[3\]; 4 elements"),
        ({"absmax": torch.ones(4, dtype=torch.uint8)}, r"quantised\[1\]: absmax is uint8; float32 is needed"),
        ({"code": torch.ones(17)[1:].double()}, r"quantised\[1\]: code has elements of type float64"),
    ],
)
def test_errors_of_a_group_name_the_weight(change, sentence):
    packed, absmax, code, _ = quantised((4, 64), 64, 0, "cpu")
    good = Quantised(packed, absmax, code, (4, 64))
    with pytest.raises(RuntimeError, match=f"dequantize_4bit_group: {sentence}"):
        dequantize_4bit_group([good, good._replace(**change)], torch.float32)


def test_errors_of_a_group():
    packed, absmax, code, _ = quantised((4, 64), 64, 0, "cpu")
    good = Quantised(packed, absmax, code, (4, 64), 24)
    with pytest.raises(ValueError, match=r"dequantize_4bit_group: dtype is torch\.float64"):
        dequantize_4bit_group([good, good], torch.float64)
    with pytest.raises(RuntimeError, match=r"dequantize_4bit_group: quantised\[0\]: blocksize is 24; a power of two"):
        dequantize_4bit_group([good, good], torch.float32)
    operator = torch.ops.bastile.dequantize_4bit_group
    with pytest.raises(RuntimeError, match="dequantize_4bit_group: 5 tensors are given for 2 weights; three or six"):
        operator([packed, absmax, code, packed, absmax], [4, 4], 64, 64, 1, 0)
    with pytest.raises(RuntimeError, match="dequantize_4bit_group: type is 3; 0"):
        operator([packed, absmax, code], [4], 64, 64, 1, 3)
