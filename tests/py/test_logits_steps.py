"""Logits that have been made, and what is taken of them a step further."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from bastile.models.logits.pending import Call
from test_logits import Net, put_off


def test_a_step_further_is_made_of_values_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As entropies are: of probabilities and of their logarithms."""
    products: list[int] = []
    stock = Call.product
    monkeypatch.setattr(Call, "product", lambda call, rows: (products.append(1), stock(call, rows))[1])
    for before in (False, True):
        found = []
        for served in (False, True):
            net = Net()
            net.served = served
            z = net()
            log = z.log_softmax(-1) if before else None
            p = F.softmax(z, -1)
            entropy = -(p * (z.log_softmax(-1) if log is None else log)).sum(-1)
            entropy.sum().backward()
            found.append([entropy.detach(), net.head.weight.grad, net.body.weight.grad])
        assert len(products) == 1
        products.clear()
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    z, net = put_off()
    log, _ = z.log_softmax(-1), z.exp()
    with torch.no_grad():
        z.mul_(2)  # of the values: what was taken before has them as they were
    net.served = False
    torch.testing.assert_close(log.exp(), net().softmax(-1))
