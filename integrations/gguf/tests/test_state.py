"""States of sequences: taken apart and put together again, whatever the form of the model."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_gguf.state import Rows, StateForm, join_state, split_state
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.kv import LayerKV

ROWS = st.builds(Rows, st.sampled_from([0, 1, 2, 8, 30]), st.integers(1, 6).map(lambda count: 4 * count))
CACHES = st.lists(st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=3).map(tuple), min_size=1, max_size=2).map(tuple)
FORMS = st.builds(StateForm, CACHES, st.just(7))


def random_layers(form: StateForm, count: int) -> list[LayerKV]:
    def tensor(rows: Rows) -> torch.Tensor:
        return torch.randint(0, 255, (1, count, rows.nbytes), dtype=torch.uint8).view(rows.dtype)

    return [LayerKV(tensor(keys), tensor(values)) for keys, values in form.layers]


def bits(layers: list[LayerKV]) -> list[bytes]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for layer in layers for tensor in layer]


@given(FORMS, st.integers(1, 5), st.integers(0, 9000))
def test_there_and_back(form: StateForm, count: int, first: int) -> None:
    layers = random_layers(form, count)
    found, again = split_state(join_state(form, layers, first), first, count)
    assert found == form
    assert bits(again) == bits(layers)


@given(FORMS, st.integers(2, 5), st.data())
def test_tokens_may_lie_in_any_cells(form: StateForm, count: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(count)))
    layers = random_layers(form, count)
    state = join_state(form, [LayerKV(*(tensor[:, order] for tensor in layer)) for layer in layers], 3)
    cells, moved = (b"".join(struct.pack("<iIi", 3 + n, 1, 0) for n in each) for each in (range(count), order))
    assert bits(split_state(state.replace(cells, moved), 3, count)[1]) == bits(layers)


@given(FORMS, st.integers(1, 5), st.data())
def test_what_is_no_state_of_the_tokens_is_refused(form: StateForm, count: int, data: st.DataObject) -> None:
    state = join_state(form, random_layers(form, count), 3)
    end = data.draw(st.integers(9, len(state) - 1))
    with pytest.raises(UnsupportedModelError, match="cannot be taken apart"):
        split_state(state[:end], 3, count)
    with pytest.raises(UnsupportedModelError, match="cannot be taken apart"):
        split_state(state, 3, count + 1)


@given(FORMS, st.integers(2, 5))
def test_kv_of_another_form_never_becomes_a_state(form: StateForm, count: int) -> None:
    layers = random_layers(form, count)
    wrong = [
        layers[1:],
        [*layers, layers[0]],
        [layers[0]._replace(values=layers[0].values[:, 1:]), *layers[1:]],
        [layers[0]._replace(keys=layers[0].keys[..., :-1]), *layers[1:]],
        [layers[0]._replace(keys=layers[0].keys.to(torch.float64)), *layers[1:]],
    ]
    for each in wrong:
        with pytest.raises(ValueError, match="of the model"):
            join_state(form, each, 0)
