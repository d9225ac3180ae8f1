"""A strict reader of the text format of Prometheus."""

from __future__ import annotations

import re

NAME, LABEL = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*"), re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\["\\n])*)"')
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
Sample = tuple[str, dict[str, str], float]


def parse(text: str) -> list[Sample]:
    """A strict reader of the format: a family is announced once, its samples stand together, no sample comes twice."""
    samples: list[Sample] = []
    family, announced = "", set()
    assert not text or text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
            assert family not in announced
            announced.add(family)
            continue
        if line.startswith("# TYPE "):
            assert line.split()[2] == family and line.split()[3] in ("gauge", "counter")
            assert family.endswith("_total") == (line.split()[3] == "counter")
            continue
        name = NAME.match(line)
        assert name is not None and name[0] == family
        labels, place = {}, name.end() + 1
        assert line[name.end()] == "{"
        while line[place] != "}":
            label = LABEL.match(line, place)
            assert label is not None, line
            labels[label[1]] = re.sub(r"\\.", lambda found: ESCAPES[found[0]], label[2])
            place = label.end() + (line[label.end()] == ",")
        samples.append((family, labels, float(line[place + 2 :])))
    keys = [(name, tuple(labels.items())) for name, labels, _ in samples]
    assert len(keys) == len(set(keys))
    return samples
