"""The loss of answers over KV that is moved or packed, on the reference model."""

from cacheblend_lab.kv_loss import MANUAL_PAGES, kv_loss
from cacheblend_lab.reference import load_model, load_tokenizer


def test_moving_costs_nothing_in_float32_and_fewer_bits_cost_more() -> None:
    loss = kv_loss(load_model(), load_tokenizer(), MANUAL_PAGES[:2])
    assert list(loss) == ["moved", "int8", "int4"]
    assert abs(loss["moved"]) < 1e-5
    assert loss["moved"] < loss["int8"] < loss["int4"] < 0.1
