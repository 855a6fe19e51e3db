"""Methods by their names."""

import pytest

from cacheblend_lab.eval import EvalMethod, EvalSetting, grid_methods, parse_method, parse_methods
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.selection import selector_names


def test_names_and_settings() -> None:
    assert parse_method("full").way == "full"
    assert parse_method("reuse").overrides == {"selector": "none", "recompute_ratio": 0.0}
    hkvd = parse_method("  hkvd   0.15 deviation=key check_layers=[1,2] ")
    assert hkvd.name == "hkvd 0.15 deviation=key check_layers=[1,2]"
    assert hkvd.overrides == {"selector": "hkvd", "recompute_ratio": 0.15, "deviation": "key", "check_layers": [1, 2]}
    assert (parse_method("hkvd @0.1").charge, parse_method("random = hkvd @0.1").equal_to) == (0.1, "hkvd @0.1")
    for name in selector_names():
        assert parse_method(f"{name} 0.3").overrides["selector"] == name
    listed = parse_methods("full, hkvd 0.15 check_layers=[1,2] deviation=both, reuse,")
    assert [method.way for method in listed] == ["full", "blend", "blend"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("best 0.1", "method 'best 0.1' is unknown; write full, no_context, prefix"),
        ("", "is unknown"),
        ("hkvd", "wants a ratio or a charge"),
        ("hkvd 0.1 0.2", "wants a ratio or a charge"),
        ("hkvd 1.5", "'1.5' must be a number from 0"),
        ("hkvd @nan", "'nan' must be a number from 0"),
        ("hkvd @much", "'much' must be a number"),
        ("hkvd 0.1 depth=3", "the unknown setting 'depth'"),
        ("full deviation=key", "full blends nothing"),
        ("random = full", "full blends nothing"),
        ("random = best 0.1", "method 'best 0.1' is unknown"),
    ],
)
def test_what_is_no_method(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_method(text)


def test_the_order_in_which_they_are_asked() -> None:
    named = parse_methods("random = hkvd 0.3, reuse, hkvd 0.3, full, reuse")
    assert [method.name for method in EvalSetting(named).methods] == ["full", "reuse", "hkvd 0.3", "random = hkvd 0.3"]
    with pytest.raises(ConfigError, match=r"needs the charge of 'hkvd 0\.3', which is not among the methods"):
        EvalSetting(parse_methods("random = hkvd 0.3"))
    with pytest.raises(ConfigError, match="two methods are named 'reuse'"):
        EvalSetting((EvalMethod("reuse", overrides={"seed": 1}), parse_method("reuse")))
    circle = (EvalMethod("a", equal_to="b"), EvalMethod("b", equal_to="a"))
    with pytest.raises(ConfigError, match="a, b take their charge from each other"):
        EvalSetting(circle)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        EvalSetting((), max_new_tokens=0)


def test_a_grid_has_random_everywhere() -> None:
    names = [method.name for method in grid_methods(["hkvd", "random"], [0.1], [0.05], ["int8"])]
    wanted = ["random 0.1", "hkvd 0.1", "random = hkvd 0.1", "hkvd 0.1 ram_codec=int8", "random @0.05", "hkvd @0.05"]
    assert names == wanted
