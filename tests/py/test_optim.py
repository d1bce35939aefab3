"""bastile.optim and its operators: against float64, no worse than torch.optim.AdamW, whose place they take."""

import copy
import math
import pickle

import pytest
import torch

from bastile.ops.optim import AdamWLists, adamw_, grad_norm, scale_
from bastile.optim import AdamW, clip_grad_norm_
from bastile.optim.moments import decode, encode
from oracle import DTYPES, EMULATED, LUCK, assert_same_bits, devices, numbers, random_tensor

HYPER = {"lr": 0.02, "betas": (0.9, 0.97), "eps": 1e-8, "weight_decay": 0.1}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Below a vector, a vector and more, a block of 8-bit moments and more, several units of work; and nothing.
SIZES = [(3,), (5, 7), (300,), (0,), (33, 129), (2 if EMULATED else 40, 2048)]

each_device = pytest.mark.parametrize("device", devices())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def parameters(device, dtype, sizes=SIZES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(random_tensor(size, dtype, device)) for size in sizes]


def give_gradients(*lists: list[torch.nn.Parameter], scale: float = 1.0) -> None:
    """The same to each list, of different sizes of numbers."""
    for at, first in enumerate(lists[0]):
        gradient = random_tensor(first.shape, first.dtype, first.device, scale=scale * 0.3**at)
        for those in lists:
            those[at].grad = gradient.to(those[at].dtype).clone()


def twins(those: list[torch.nn.Parameter], dtype=None) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(dtype or p.dtype).clone()) for p in those]


def stepped(optimizer, states: list[torch.Tensor], p: torch.nn.Parameter, steps: int = 9) -> dict[str, torch.Tensor]:
    """A step from moments that are given."""
    optimizer.state[p] = {"step": torch.tensor(float(steps), device=p.device), **dict(states)}
    optimizer.step()
    return {"parameter": p.detach(), **{name: optimizer.state[p][name] for name, _ in states}}


@each_device
@each_dtype
@pytest.mark.parametrize("from_zero", [False, True])
def test_errors_are_no_larger_than_torchs(device, dtype, from_zero):
    """Pooled, as in oracle.py. From zero all elements share the errors of the factors lr, 1 - beta and what is made of
    them: those of a draw are then one."""
    draws, n = (64, 1024) if from_zero else (4, 65536)
    draws, n = (draws // 4, n // 16) if EMULATED else (draws, n)
    errors: dict[tuple[str, str], float] = {}
    for _ in range(draws):
        lr, *rests = (torch.rand(3, generator=numbers.generator) * 0.2 + 0.001).tolist()
        hyper = HYPER | {"lr": lr, "betas": tuple(1 - rest for rest in rests)}
        p, g = random_tensor((n,), dtype, device), random_tensor((n,), dtype, device, scale=0.1)
        m, v = random_tensor((n,), dtype, device, scale=0.03), random_tensor((n,), dtype, device, scale=0.1).square()
        if from_zero:
            p, m, v = p * 0, m * 0, v * 0
        results = {}
        for name, kind in (("ours", AdamW), ("torch", torch.optim.AdamW), ("exact", torch.optim.AdamW)):
            q = torch.nn.Parameter(p.to(torch.float64 if name == "exact" else dtype).clone())
            q.grad = g.to(q.dtype)
            optimizer = kind([q], **hyper, **({"fused": True} if name != "exact" else {"foreach": False}))
            states = [("exp_avg", m.to(q.dtype).clone()), ("exp_avg_sq", v.to(q.dtype).clone())]
            results[name] = stepped(optimizer, states, q, 0 if from_zero else 9)
        for key, exact in results["exact"].items():
            for name in ("ours", "torch"):
                # Relative, so that no draw of large factors counts for all.
                square = (results[name][key].double() - exact).square().sum() / exact.square().sum()
                errors[name, key] = errors.get((name, key), 0.0) + square.item()
    luck = math.exp(LUCK / math.sqrt(draws if from_zero and dtype is F32 else draws * n))
    for key in ("parameter", "exp_avg", "exp_avg_sq"):
        assert math.sqrt(errors["ours", key]) <= math.sqrt(errors["torch", key]) * luck, key


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbours of a type at each of these numbers."""
    info = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(info.tiny)))) * info.eps


@each_device
@each_dtype
@pytest.mark.parametrize("moments", [None, "float32", torch.bfloat16, "8bit"])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_kind_of_state(device, dtype, moments, master, rounding):
    """A step from the same state in float64, where all that is kept is a neighbour of what it should be."""
    if rounding == "stochastic" and dtype is F16 and not master:
        pytest.skip("refused: test_what_is_refused")
    those = parameters(device, dtype)
    optimizer = AdamW(those, **HYPER, moments=moments, master_weights=master, rounding=rounding)
    for _ in range(2):
        before = [copy.deepcopy(optimizer.state.get(p)) or {} for p in those]
        values = [before[i].get("master", p).detach().double() for i, p in enumerate(those)]
        give_gradients(those)
        optimizer.step()
        for p, value, state in zip(those, values, before, strict=True):
            exact = torch.nn.Parameter(value.clone())
            exact.grad = p.grad.double()
            stock = torch.optim.AdamW([exact], **HYPER, foreach=False)
            read = {
                name: decoded(state, name, p) if state else torch.zeros_like(value)
                for name in ("exp_avg", "exp_avg_sq")
            }
            want = stepped(stock, list(read.items()), exact, int(state["step"]) if state else 0)
            now = optimizer.state[p]
            change = value.abs() + (want["parameter"] - value).abs()
            full, rounded = now.get("master"), rounding == "nearest" or dtype is not BF16
            if full is not None:
                assert_neighbours(full.double(), want["parameter"], F32, 1, change)
                assert_same_bits(p.detach(), full.to(dtype))
            else:
                assert_neighbours(p.detach().double(), want["parameter"], dtype, 0.5 if rounded else 1, change)
            for name in ("exp_avg", "exp_avg_sq"):
                if moments == "8bit":
                    assert_codes_near(now, name, want[name])
                else:
                    kept = now[name].dtype
                    drawn = rounding == "stochastic" and kept is BF16
                    terms = read[name].abs() + (exact.grad.abs() if name == "exp_avg" else exact.grad.square())
                    assert_neighbours(now[name].double(), want[name], kept, 1 if drawn else 0.5, terms)


def decoded(state, name, p):
    if state[name].dtype is not torch.uint8:
        return state[name].double()
    return decode(name, state[name], state[f"{name}_scale"], p.numel()).view(p.shape).double()


def assert_neighbours(got, want, dtype, ulps, terms):
    """Within so many units in the last place of a type, and of what float32 is short of for terms of this size: four
    roundings."""
    short = (got - want).abs() - ulps * ulp(want, dtype) - 4 * 2**-24 * (terms.abs() + HYPER["lr"])
    assert short.numel() == 0 or short.max() <= 0, short.max()


def assert_codes_near(state, name, want):
    """Each code is one of the two around the number that it stands for."""
    power, levels = (2, 127) if name == "exp_avg" else (4, 255)
    codes = (state[name].view(torch.int8) if name == "exp_avg" else state[name]).double().flatten()
    flat = want.double().flatten()
    scale = state[f"{name}_scale"].double().repeat_interleave(256)
    assert (codes[flat.numel() :] == 0).all()
    codes, scale = codes[: flat.numel()], scale[: flat.numel()]
    share = (flat.abs() / scale.clamp_min(1e-300)).clamp(max=1).pow(1 / power) * levels
    off = (codes.abs() - share).abs()
    assert off.numel() == 0 or off.max() <= 1.001
    assert (codes * flat >= 0).all()
    assert name == "exp_avg" or (codes >= 1).all()  # it is divided by


@each_device
def test_stochastic_rounding_is_unbiased(device):
    """Equal elements whose exact results lie between two neighbours: as many go up as leave the mean as it is, within
    four standard deviations; and each seed, step and tensor has its own."""
    n, draws = 4096 if EMULATED else 1 << 16, {}
    for seed, share in ((1, 0.25), (2, 0.03), (1, 0.5)):
        # From 1 an update of that share of a unit, 2^-8 below 1 for bfloat16.
        p = torch.nn.Parameter(torch.ones(n, dtype=BF16, device=device))
        q = torch.nn.Parameter(p.detach().clone())
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        lr = share * 2**-8
        AdamW([p, q], lr=lr, weight_decay=0, eps=0, moments=F32, rounding="stochastic", seed=seed).step()
        down = (p == 1 - 2**-8).double()
        assert ((p == 1) | (down == 1)).all()
        assert abs(down.mean().item() - share) < 4 * math.sqrt(share * (1 - share) / n)
        draws[seed, share] = down
        # Another tensor: independent of the first one.
        other = (q != 1).double()
        assert abs((down * other).mean().item() - share**2) < 4 * math.sqrt(share**2 / n)
    # What goes down with a smaller share goes down with a larger one, of the same seed.
    assert (draws[1, 0.25] <= draws[1, 0.5]).all()


@each_device
def test_moments_of_8_bits_are_unbiased(device):
    """The mean of many decoded numbers is theirs, at small and large shares of a block's scale; and they forget, though
    a step changes them by less than the code's."""
    n = 256 * (16 if EMULATED else 256)
    value = torch.linspace(0.0005, 1, 255, device=device)
    g = torch.cat([value, value.new_tensor([1.0])]).repeat(n // 256)
    p = torch.nn.Parameter(torch.zeros(n, device=device))
    p.grad = g.clone()
    optimizer = AdamW([p], betas=(0.5, 0.5), moments="8bit")
    optimizer.step()
    for name, want in (("exp_avg", g * 0.5), ("exp_avg_sq", g * g * 0.5)):
        power, levels = (2, 127) if name == "exp_avg" else (4, 255)
        got, want = decoded(optimizer.state[p], name, p).view(-1, 256), want.double().view(-1, 256)[0]
        low = ((want / want.max()).pow(1 / power) * levels).floor().clamp(max=levels - 1)
        low, high = ((low + at).div(levels).pow(power) * want.max() for at in (0, 1))
        share, draws = (want - low) / (high - low), len(got)
        # 256 means of so many draws, 4.5 standard deviations; where few go up, of at least four.
        allowed = 4.5 * (high - low) * ((share * (1 - share)).clamp_min(4 / draws) / draws).sqrt()
        assert ((got.mean(0) - want).abs() <= allowed).all(), name
    steps = 30 if EMULATED else 200
    p.grad = None
    again = AdamW([p], betas=(0.9, 0.99), moments="8bit", lr=0.0)
    again.load_state_dict(optimizer.state_dict())
    again.param_groups[0]["betas"], again.param_groups[0]["lr"] = (0.99, 0.99), 0.0
    start = decoded(again.state[p], "exp_avg_sq", p).mean()
    p.grad = torch.zeros_like(p)
    p.grad.view(-1, 256)[:, -1] = 0.7071  # which keeps the scale where it is
    for _ in range(steps):
        again.step()
    got = decoded(again.state[p], "exp_avg_sq", p).view(-1, 256)[:, 100:200].mean()
    want = (g * g * 0.5).view(-1, 256)[:, 100:200].double().mean() * 0.99**steps
    assert start > 0
    assert abs(got / want - 1) < 0.05


@each_device
def test_lists_of_every_length(device):
    """As tables in the kernels' arguments are long: each result is that of the tensor alone."""
    for length in (1, 2, 52, 53, 430) if not EMULATED else (1, 53):
        sizes = [(1 + 7 * i % 61,) for i in range(length)]
        those = parameters(device, BF16, sizes)
        alone = twins(those)
        give_gradients(those, alone)
        AdamW(those, **HYPER).step()
        for p in alone:
            AdamW([p], **HYPER).step()
        for p, q in zip(those, alone, strict=True):
            assert_same_bits(p.detach(), q.detach())
        norm, _ = grad_norm([p.grad for p in those])
        want = torch.stack([p.grad.double().square().sum() for p in those]).sum().sqrt()
        assert abs(norm.item() / want.item() - 1) < 1e-6


@each_device
@each_dtype
def test_types_of_one_group(device, dtype):
    """A group of several types: each has its own kernel, all are of one call."""
    those = [p for t in (dtype, F32, BF16) for p in parameters(device, t, [(40,), (3, 5)])]
    other = twins(those)
    give_gradients(those, other)
    AdamW(those, **HYPER, master_weights=True).step()
    for p, q in zip(those, other, strict=True):
        AdamW([q], **HYPER, master_weights=True).step()
        assert_same_bits(p.detach(), q.detach())


@each_device
@pytest.mark.parametrize("moments", [None, "8bit"])
def test_layouts(device, moments):
    """Views that begin anywhere, transposed ones, gradients that lie in another order."""
    memory = random_tensor((5000,), BF16, device)
    those = [memory[1:1500].detach(), memory[1503:3503].view(40, 50).t().detach(), memory[3600:3600].detach()]
    those = [torch.nn.Parameter(t) for t in those]
    packed = [
        torch.nn.Parameter(p.detach().t().contiguous().t() if p.dim() == 2 else p.detach().clone()) for p in those
    ]
    give_gradients(those, packed)
    those[1].grad = those[1].grad.contiguous()
    packed[1].grad = packed[1].grad.t().contiguous().t()
    for mine in (those, packed):
        optimizer = AdamW(mine, **HYPER, moments=moments)
        optimizer.step()
        optimizer.step()
    for p, q in zip(those, packed, strict=True):
        assert_same_bits(p.detach().contiguous(), q.detach().contiguous())
    gap = torch.nn.Parameter(memory[::2].detach())
    gap.grad = torch.ones_like(gap)
    with pytest.raises(RuntimeError, match="has gaps"):
        AdamW([gap]).step()


@each_device
def test_the_same_seed_gives_the_same_bits(device):
    runs = []
    for seed in (3, 3, 4):
        numbers.seed(1)
        those = parameters(device, BF16)
        optimizer = AdamW(those, **HYPER, rounding="stochastic", moments="8bit", seed=seed, max_grad_norm=1.0)
        for _ in range(3):
            give_gradients(those)
            optimizer.step()
        runs.append([*those, *(optimizer.state[p]["exp_avg_sq"] for p in those), optimizer.last_grad_norm])
    for a, b in zip(*runs[:2], strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, c) for a, c in zip(runs[0], runs[2], strict=True))


# ---- in the place of torch's -----------------------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("fused", [None, True])
def test_checkpoints_pass_either_way(device, fused):
    """Three steps by one and three by the other are six of either; the state has torch's keys and shapes."""
    for first, second in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW)):
        those = parameters(device, F32)
        other = twins(those)
        a, b = first(those, **HYPER, fused=fused), torch.optim.AdamW(other, **HYPER, fused=True)
        for at in range(6):
            give_gradients(those, other)
            a.step()
            b.step()
            if at == 2:
                saved = copy.deepcopy(a.state_dict())
                assert {"step", "exp_avg", "exp_avg_sq"} == set(saved["state"][0])
                assert set(saved["param_groups"][0]) == set(b.state_dict()["param_groups"][0])
                a = second(those, lr=1.0)
                a.load_state_dict(saved)
                assert a.param_groups[0]["lr"] == HYPER["lr"]
        for p, q in zip(those, other, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=2e-6)
            assert float(a.state[p]["step"]) == 6


@each_device
@pytest.mark.parametrize("kind", [{"moments": "8bit"}, {"moments": F32}, {"master_weights": True}, {"moments": BF16}])
def test_a_save_a_reload_the_same_run(device, kind):
    """Whatever the moments: a reloaded, a copied and an unpickled optimiser go on as the first does."""
    those = parameters(device, BF16)
    first = AdamW(those, **HYPER, **kind, seed=5)
    for _ in range(2):
        give_gradients(those)
        first.step()
    saved = copy.deepcopy(first.state_dict())
    others = [twins(those) for _ in range(2)]
    reloaded = AdamW(others[0], **HYPER, **kind, seed=5)
    reloaded.load_state_dict(saved)
    copied, those_copied = copy.deepcopy((first, those))
    unpickled, those_unpickled = pickle.loads(pickle.dumps((first, those)))
    give_gradients(those, others[0], those_copied, those_unpickled)
    for optimizer in (first, reloaded, copied, unpickled):
        optimizer.step()
    for those_too in (others[0], those_copied, those_unpickled):
        for p, q in zip(those, those_too, strict=True):
            assert_same_bits(p.detach(), q.detach())


def test_moments_change_their_type_when_loaded():
    those = parameters("cpu", BF16)
    first = AdamW(those, **HYPER, moments=F32)
    give_gradients(those)
    first.step()
    eight = AdamW(twins(those), **HYPER, moments="8bit")
    eight.load_state_dict(first.state_dict())
    back = AdamW(twins(those), **HYPER, moments=F32)
    back.load_state_dict(eight.state_dict())
    for p, q in zip(those, back.param_groups[0]["params"], strict=True):
        for name, share in (("exp_avg", 0.01), ("exp_avg_sq", 0.02)):
            want, got = first.state[p][name], back.state[q][name]
            assert got.dtype is F32
            assert got.shape == p.shape
            assert p.numel() == 0 or (got - want).abs().max() <= share * want.abs().max()


def test_codes_and_their_inverse():
    values = torch.cat([torch.zeros(256), torch.linspace(-1, 1, 500)])
    for name, those in (("exp_avg", values), ("exp_avg_sq", values.abs())):
        codes, scale = encode(name, those)
        assert codes.shape == (3, 256)
        assert scale[0] == 0
        back = decode(name, codes, scale, len(those))
        assert (back - those).abs().max() < 0.009
        again, _ = encode(name, back)
        assert torch.equal(codes, again)


@each_device
def test_groups_closure_and_options(device):
    those, other = parameters(device, F32, [(30,), (40,), (50,)]), None
    other = twins(those)
    ours = AdamW(those[:2], **HYPER, maximize=True)
    torchs = torch.optim.AdamW(other[:2], **HYPER, maximize=True)
    rate = torch.tensor(0.004, device=device)
    for optimizer, last in ((ours, those[2]), (torchs, other[2])):
        optimizer.add_param_group({"params": [last], "lr": rate, "weight_decay": 0.0})
    for at in range(3):
        give_gradients(those, other)
        if at == 1:
            those[1].grad = other[1].grad = None
        assert ours.step(lambda: 5) == torchs.step(lambda: 5) == 5
        rate.mul_(0.5)
    for p, q in zip(those, other, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    assert [float(ours.state[p]["step"]) for p in those] == [3, 2, 3]
    ours.zero_grad()
    assert all(p.grad is None for p in those)
    ours.step()


@each_device
def test_grad_scaler(device):
    """torch's scaler hands over its scale and what it found; the gradients are unscaled afterwards, as torch's are."""
    those = parameters(device, F32, [(300,), (5,)])
    other = twins(those)
    for mine, kind in ((those, AdamW), (other, torch.optim.AdamW)):
        numbers.seed(4)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=100)
        optimizer = kind(mine, **HYPER, fused=True)
        for at in range(3):
            optimizer.zero_grad()
            loss = sum((p * random_tensor(p.shape, F32, device)).sum() for p in mine)
            scaler.scale(loss).backward()
            if at == 1:
                mine[0].grad[7] = math.inf
            scaler.step(optimizer)
            scaler.update()
    for p, q in zip(those, other, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-6)


def test_the_version_of_a_parameter_says_that_it_changed():
    p = torch.nn.Parameter(torch.ones(3))
    saved = p.square().sum()
    p.grad = torch.ones(3)
    AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_what_is_refused():
    p = torch.nn.Parameter(torch.ones(3, dtype=F16))
    p.grad = torch.ones_like(p)
    for options, sentence in (
        ({"amsgrad": True}, "amsgrad is True; torch.optim.AdamW alone has it"),
        ({"differentiable": True}, "differentiable is True"),
        ({"moments": "4bit"}, "moments is '4bit'; torch.float32"),
        ({"rounding": "up"}, "rounding is 'up'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"max_grad_norm": 1.0, "in_backward": True}, "does not go with max_grad_norm"),
        ({"lr": -1.0}, "Invalid learning rate"),
    ):
        with pytest.raises(ValueError, match=sentence):
            AdamW([p], **options)
    with pytest.raises(RuntimeError, match="only bfloat16 is rounded stochastically"):
        AdamW([p], rounding="stochastic").step()
    with pytest.raises(ValueError, match="amsgrad is True"):
        AdamW([p]).add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "amsgrad": True})
    with pytest.raises(ValueError, match="amsgrad is True"):
        AdamW([p]).load_state_dict(torch.optim.AdamW([p], amsgrad=True).state_dict())
    double = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    double.grad = torch.ones_like(double)
    with pytest.raises(TypeError, match=r"is torch\.float64 on cpu"):
        AdamW([double]).step()
    with pytest.raises(RuntimeError, match="lists of 1 and of 0 tensors"):
        adamw_(AdamWLists([p], [], [p], [p], [p], [], [], []), lr=1, betas=(0, 0), eps=0, weight_decay=0)


@each_device
def test_in_the_backward_pass(device):
    """Each parameter as its gradient is complete, shared ones once, and no gradient is left; as `step` does."""
    results = []
    for in_backward in (False, True):
        numbers.seed(2)
        shared, own = parameters(device, F32, [(16, 16), (16, 16)])
        optimizer = AdamW([own, shared], **HYPER, in_backward=in_backward)
        assert optimizer.has_exactly([shared, own]) is not in_backward  # else a clip would wait for a step
        for _ in range(3):
            x = random_tensor((4, 16), F32, device)
            (x @ shared @ own @ shared).square().mean().backward()
            assert (own.grad is None) is in_backward
            optimizer.step()
            optimizer.zero_grad()
        results.append((shared.detach(), own.detach()))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


# ---- clipping --------------------------------------------------------------------------------------------------------


@each_device
@each_dtype
def test_clipping_is_torchs(device, dtype):
    for max_norm in (0.5, 1e4):
        those = parameters(device, dtype)
        doubles = twins(those, torch.float64)
        give_gradients(those)
        for p, q in zip(those, doubles, strict=True):
            q.grad = p.grad.double()
        before = [p.grad.clone() for p in those]
        norm = clip_grad_norm_(those, max_norm)
        want = torch.nn.utils.clip_grad_norm_(doubles, max_norm)
        assert norm.dtype is F32
        assert abs(norm.item() / want.item() - 1) < 1e-6
        for p, q, g in zip(those, doubles, before, strict=True):
            if max_norm > 1:
                assert_same_bits(p.grad, g)
            else:
                assert_neighbours(p.grad.double(), q.grad, dtype, 0.5, g.double())


@each_device
def test_clipping_within_the_step(device):
    """By max_grad_norm, by `optimizer=` and in place first: the same parameters, up to the gradients' rounding, which
    float32 does not show; and only the last changes gradients."""
    results = []
    for how in ("in place", "optimizer", "max_grad_norm"):
        numbers.seed(6)
        those = parameters(device, F32)
        optimizer = AdamW(those, **HYPER, max_grad_norm=0.7 if how == "max_grad_norm" else None)
        for _ in range(2):
            give_gradients(those)
            before = [p.grad.clone() for p in those]
            if how != "max_grad_norm":
                norm = clip_grad_norm_(those, 0.7, optimizer=optimizer if how == "optimizer" else None)
            optimizer.step()
            norm = optimizer.last_grad_norm if how == "max_grad_norm" else norm
            assert all(torch.equal(p.grad, g) for p, g in zip(those, before, strict=True)) is (how != "in place")
        results.append([p.detach() for p in those] + [norm])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_clip_is_of_the_gradients_that_were_there():
    p, q = parameters("cpu", F32, [(4,), (4,)])
    optimizer = AdamW([p], lr=0.1)
    for x in (p, q):
        x.grad = torch.full_like(x, 100.0)
    clip_grad_norm_([p, q], 1.0, optimizer=optimizer)  # not its parameters: at once
    assert p.grad.max() < 1
    p.grad.fill_(100.0)
    clip_grad_norm_([p], 1.0, optimizer=optimizer)
    assert p.grad.max() == 100
    optimizer.zero_grad()
    p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full_like(p, 1e-4))


def test_other_norms_and_gradients_are_torchs():
    for options in ({"norm_type": 1.0}, {"norm_type": math.inf}):
        those = parameters("cpu", F32, [(3,), (50, 7)])  # torch refuses an empty one
        other = twins(those)
        give_gradients(those, other)
        assert torch.equal(
            clip_grad_norm_(those, 0.1, **options), torch.nn.utils.clip_grad_norm_(other, 0.1, **options)
        )
        for p, q in zip(those, other, strict=True):
            assert torch.equal(p.grad, q.grad)
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0) == 0
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([math.nan, 1.0])
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    assert math.isnan(clip_grad_norm_(p, 1.0))
    assert p.grad.isnan().all()


@each_device
def test_scaling_by_one_reads_nothing(device):
    g = random_tensor((1000,), BF16, device)
    same = g.clone()
    scale_([g], torch.ones((), device=device))
    assert_same_bits(g, same)
    scale_([g], torch.tensor(0.25, device=device))
    assert_same_bits(g, same * 0.25)
