"""Products of rows that are sorted into groups, and what adapters add to them, against float64; the yardstick is a
product a group, rounded, to which the adapter's, rounded, is added: what PEFT's layers do."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bastile.ops._grouped import grouped_rows
from oracle import (
    DTYPES,
    EMULATED,
    Case,
    assert_no_worse,
    assert_no_worse_pooled,
    assert_same_bits,
    devices,
    few_examples,
    random_tensor,
)

SCALE = 0.75
#: Rows of each group: fewer than a half of a tile and more, a tile and a row, none, more than eight tiles.
ROWS = [30, 0, 64, 65, 129, 0] if EMULATED else [30, 0, 64, 65, 129, 1100, 0]


def ends_of(rows, device):
    return torch.tensor(rows).cumsum(0).int().to(device)


def matrices_of(experts, outer, inner, turned, dtype, device):
    """turned: a linear layer's weight, whose columns these are."""
    shape = (experts, inner, outer) if turned else (experts, outer, inner)
    made = random_tensor(shape, dtype, device, scale=max(outer, 1) ** -0.5)
    return made.transpose(1, 2) if turned else made


def one_by_one(ends, rows, matrices, thin=None, b=None):
    parts = []
    starts = [0, *ends.tolist()]
    for group, (start, end) in enumerate(pairwise(starts)):
        y = rows[start:end] @ matrices[group]
        parts.append(y if thin is None else y + SCALE * (thin[start:end] @ b[group]))
    return torch.cat(parts)


def case(rows, sizes, rank, turned, dtype, device):
    outer, inner = sizes
    count, experts = sum(rows), len(rows)
    inputs = {
        "rows": random_tensor((count, outer), dtype, device),
        "matrices": matrices_of(experts, outer, inner, turned[0], dtype, device),
    }
    if rank:
        inputs["thin"] = random_tensor((count, rank), dtype, device)
        inputs["b"] = matrices_of(experts, rank, inner, turned[1], dtype, device)
    ends = ends_of(rows, device)

    def ours(zeros, *tensors):
        given = dict(zip(inputs, tensors, strict=True))
        return zeros + grouped_rows(given["rows"], given["matrices"], ends, given.get("thin"), given.get("b"), SCALE)

    def stock(zeros, *tensors):
        return zeros + one_by_one(ends, *tensors)

    zeros = torch.zeros(count, inner, dtype=dtype, device=device)  # what is judged are outputs: there is one gradient
    return Case(ours=ours, stock=stock, exact=stock, inputs={"zeros": zeros}, constants=inputs)


TURNED = [(True, False), (False, False), (True, True), (False, True)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 8, 16, 40, 64, 72])
@pytest.mark.parametrize("turned", TURNED)
def test_matches_float64_as_well_as_a_product_a_group(turned, rank, dtype, device):
    """Columns of a tile and a few of the next, and of nearly two: without adapters the first are PyTorch's."""
    for columns in (264, 504):
        assert_no_worse_pooled(lambda n=columns: case(ROWS, (200, n), rank, turned, dtype, device), draws=2)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(8, 8), (64, 16), (1, 8), (96, 255), (33, 17), (512, 1000)], ids=str)
def test_sizes(sizes, dtype, device):
    for turned in TURNED:
        assert_no_worse(case(ROWS, sizes, 16, turned, dtype, device))


@few_examples
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=9),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.integers(0, 3),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(DTYPES),
    st.sampled_from(devices()),
)
def test_any_shape(rows, sizes, rank, turned, dtype, device):
    if sum(rows):
        assert_no_worse(case(rows, (8 * sizes[0], 8 * sizes[1]), 8 * rank, turned, dtype, device))


@pytest.mark.parametrize("device", devices())
def test_many_groups_and_one(device):
    many = [(7 * i) % 5 for i in range(1023)]
    assert_no_worse(case(many, (64, 32), 8, (True, False), torch.bfloat16, device))
    assert_no_worse(case([300], (64, 32), 8, (True, False), torch.bfloat16, device))
    assert_no_worse(case([0, 0], (64, 32), 8, (True, False), torch.bfloat16, device))


@pytest.mark.parametrize("device", devices())
def test_rows_apart_and_not_aligned(device):
    """Rows with gaps; from an address that 16 bytes do not divide; matrices with gaps between experts."""
    wide = random_tensor((100, 96), torch.bfloat16, device)
    matrices = random_tensor((3, 80, 40), torch.bfloat16, device)
    ends = ends_of([40, 0, 60], device)
    for rows in (wide[:, :64], wide[:, 8:72], wide[:, 1:65]):
        of = matrices[:, :64]
        assert_same_bits(grouped_rows(rows, of, ends), grouped_rows(rows, of, ends))
        want = one_by_one(ends, rows.double(), of.double())
        torch.testing.assert_close(grouped_rows(rows, of, ends).double(), want, rtol=2**-8, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_not_a_number_stays_in_its_row():
    """Tiles read rows of other groups, and matrices beyond their columns. On CPU products are the framework's, whose
    own in bfloat16 was seen to make NaN of a neighbour."""
    device = "cuda"
    made = case([30, 40], (72, 24), 16, (False, False), torch.bfloat16, device).constants
    made["rows"][35, 3] = float("nan")
    made["thin"][65, 3] = float("inf")
    got = grouped_rows(made["rows"], made["matrices"], ends_of([30, 40], device), made["thin"], made["b"], SCALE)
    assert (~got.isfinite().all(1)).nonzero().flatten().tolist() == [35, 65]
    made["matrices"][1] = float("nan")
    made["b"][1] = float("inf")
    got = grouped_rows(made["rows"], made["matrices"], ends_of([30, 40], device), made["thin"], made["b"], SCALE)
    assert got[:30].isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_is_not_waited_for_on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a Hopper GPU's kernel")
    for dtype in (torch.bfloat16, torch.float16):
        made = case(ROWS, (200, 504), 16, (True, False), dtype, "cuda").constants
        ends = ends_of(ROWS, "cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            want = grouped_rows(made["rows"], made["matrices"], ends, made["thin"], made["b"], SCALE)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = grouped_rows(made["rows"], made["matrices"], ends, made["thin"], made["b"], SCALE)
            got.zero_()
            graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(got, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_than_2_to_the_31_elements():
    count, columns = 2**31 // 4096 + 300, 4096
    rows = torch.randn(count, 64, device="cuda", dtype=torch.bfloat16)
    matrices = torch.randn(3, 64, columns, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([100, count - 100, count], device="cuda", dtype=torch.int32)
    got = grouped_rows(rows, matrices, ends)
    for at, group in ((0, 0), (99, 0), (100, 1), (count - 101, 1), (count - 100, 2), (count - 1, 2)):
        want = rows[at].double() @ matrices[group].double()
        torch.testing.assert_close(got[at].double(), want, rtol=2**-8, atol=1e-3)
