"""Settings files that somebody wrote to do harm."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_attachments.calibration import write_settings
from cacheblend_rag import BlendConfig, EngineConfig
from cacheblend_rag.errors import ConfigError
from tests.limits import within

SAMPLES = [pytest.param(40, id="sampled"), pytest.param(1000, marks=pytest.mark.full, id="all")]
READERS: list[Callable[[Path], Any]] = [
    EngineConfig.from_yaml,
    BlendConfig.from_yaml,
    lambda path: write_settings(path, {"recompute_ratio": 0.1}),
]


def laughs(levels: int, width: int, form: str) -> str:
    """Return a value that aliases make `width` times larger at every level."""
    lines = ["a0: &a0 [x, x]" if form != "<<: [{}]" else "a0: &a0 {x: y}"]
    for level in range(1, levels + 1):
        lines.append(f"a{level}: &a{level} {{{form.format(', '.join([f'*a{level - 1}'] * width))}}}")
    return "\n".join([*lines, f"preamble: *a{levels}", ""])


SIZES = st.integers(100, 60_000)
HOSTILE = st.one_of(
    st.builds(laughs, st.integers(5, 40), st.integers(8, 40), st.sampled_from(["k: [{}]", "<<: [{}]"])),
    st.builds(
        lambda opening, depth, closes: opening * depth + ("]" * depth if closes else ""),
        st.sampled_from(["[", "{a: ", "- ", "? ", "a: [", "!!str [", "&a [", "[[[]],"]),
        SIZES,
        st.booleans(),
    ),
    st.builds(
        lambda piece, times: "a: [" + piece * times + "]",
        st.sampled_from(["x, ", "1, ", "{a: b}, ", "[], ", "1.5, "]),
        SIZES,
    ),
    st.builds(
        lambda start, piece, times: start + piece * times,
        st.sampled_from(
            [
                "a: 1",
                "a: 1.5",
                "a: !",
                "? ",
                "a: !!binary ",
                "a: &",
                "*",
                "%",
                "a: ",
                "a: 0x1",
                "a: |\n ",
                "a: >\n ",
                'a: "',
            ]
        ),
        st.sampled_from(["1", ":1", "x", "ü", "_", "!", "x\n\n ", "\\U0001f600", "\\x00"]),
        SIZES,
    ),
    st.builds(
        lambda line, times: "".join(line.format(number) for number in range(times)),
        st.sampled_from(
            ["--- {}\n", "%TAG !t{}! x\n", "a: &a{} x\n", "a{0}: &a{0} !!set {{x}}\n", "<<: {{a{}: b}}\n", "? a{}\n"]
        ),
        st.integers(1000, 20_000),
    ),
    st.integers(500, 20_000).map(lambda times: "".join(f"unknown{n}: {n}\n" for n in range(times))),
    st.integers(1000, 20_000).map(lambda times: "".join(f"a{n}: &a{n} x\nb{n}: *a{n}\n" for n in range(times))),
    st.integers(300_000, 2_000_000).map(lambda times: "#" * times),
    st.sampled_from(
        [
            "!!timestamp x",
            "!!bool x",
            "!!int ''",
            "!!float ''",
            "!!binary x",
            "&a [*a]",
            "&a {b: *a}",
            "{[a]: 1}",
            "!!set [1]",
            "!!python/object/apply:os.system [ls]",
            "!!python/name:os.system",
            "!!binary /w==",
            "!!int " + "9" * 5000,
            "0b" + "1" * 150,
            "0x" + "f" * 150,
            "\0",
            "\ufeff\ud800",
        ]
    ).map("a: {}".format),
)


@pytest.mark.parametrize("samples", SAMPLES)
def test_hostile_settings_are_refused(tmp_path: Path, samples: int) -> None:
    path = tmp_path / "blend.yaml"

    @settings(max_examples=samples, suppress_health_check=list(HealthCheck))
    @given(HOSTILE, st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-16"]), st.sampled_from(READERS))
    def refused(text: str, encoding: str, read: Callable[[Path], Any]) -> None:
        data = text.encode(encoding, "surrogatepass")
        path.write_bytes(data)
        with within(200_000_000, 1.0), pytest.raises(ConfigError) as caught:
            read(path)
        assert len(str(caught.value)) < 4000
        assert path.read_bytes() == data

    refused()


@settings(max_examples=300)
@given(st.binary(max_size=80) | st.text("ab:-[]{}&*!?|>'\"%@, \n#<1.0x_~", max_size=60).map(str.encode))
def test_whatever_a_file_holds_no_other_error_is_raised(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("settings") / "blend.yaml"
    for read in READERS:
        path.write_bytes(data)
        with suppress(ConfigError):
            read(path)


def test_what_settings_need_is_read(tmp_path: Path) -> None:
    path = tmp_path / "blend.yaml"
    numbers = list(range(3000))
    path.write_text(f"preamble: {numbers}\n")
    assert EngineConfig.from_yaml(path).preamble == tuple(numbers)
    path.write_text("recompute_ratio: &r 1\nttl_s: *r\n")
    assert EngineConfig.from_yaml(path).ttl_s == 1
    path.write_text("preamble: '" + "text " * 20_000 + "'\n")
    assert len(str(EngineConfig.from_yaml(path).preamble)) > 90_000
