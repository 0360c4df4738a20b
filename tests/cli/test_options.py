"""Options are read from text as their defaults have them, and a mistake gets a sentence."""

import pytest

from heedful.cli.options import read_options, read_pattern
from heedful.mechanisms import CATALOG


def test_options_are_read_by_the_type_of_their_default():
    read = read_options
    assert read(CATALOG["bigbird"], ["tokens=0,7", "size=8"]) == {"tokens": (0, 7), "size": 8}
    assert read(CATALOG["blocks"], ["causal=False", "temperature=2"]) == {"causal": False, "temperature": 2.0}
    assert read(CATALOG["softmax"], ["softcap=30"]) == {"softcap": 30.0}
    assert read(CATALOG["softmax"], ["softcap=none"]) == {"softcap": None}
    assert repr(read(CATALOG["l2"], ["pattern=window(2) | Global((0,))"])["pattern"]) == (
        "(Window(before=2, after=0, sinks=0) | Global(indices=(0,)))"
    )


@pytest.mark.parametrize(
    ("name", "setting", "sentence"),
    [
        ("window", "before", "expected NAME=VALUE"),
        ("window", "before=1.5", "expected a whole number"),
        ("window", "d=8", "sizes have flags of their own"),
        ("softmax", "sink=1", "can be set from Python only"),
    ],
)
def test_what_can_not_be_read_is_refused_in_a_sentence(name, setting, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_options(CATALOG[name], [setting])


SAMPLES = {name: entry.sample(d=8, heads=1, length=32).pattern for name, entry in CATALOG.items()}
PUBLIC = {name: pattern for name, pattern in SAMPLES.items() if type(pattern).__name__ != "_Aligned"}


@pytest.mark.parametrize("pattern", PUBLIC.values(), ids=list(PUBLIC))
def test_a_pattern_is_read_as_python_writes_it(pattern):
    assert read_pattern(repr(pattern)) == pattern


@pytest.mark.parametrize("text", ["", "1", "Causal() + Causal()", "Causal().mT", "open('x')", "[Causal()]"])
def test_nothing_but_patterns_is_read(text):
    with pytest.raises(ValueError, match="is no pattern"):
        read_pattern(text)
