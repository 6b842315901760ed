"""Prompts of the embedded models, written for this library: what people ask of a code model.

Four kinds: code to complete, docstrings to finish, an edit that copies most of its input, and a
table that repeats itself. `CALIBRATION` is for taking times, so that a prediction is never made
from the run it is compared with.
"""

from __future__ import annotations

_COUNTER = '''class Inventory:
    """Keep count of the items on a shelf."""

    def __init__(self, name, items=None):
        self.name = name
        self.items = dict(items or {})

    def add(self, item, count=1):
        """Put an item on the shelf."""
        if count < 0:
            raise ValueError("count must not be negative")
        self.items[item] = self.items.get(item, 0) + count

    def remove(self, item, count=1):
        """Take an item off the shelf."""
'''

_READER = """import os
import sys


def read_settings(path, defaults=None):
    settings = dict(defaults or {})
    if not os.path.exists(path):
        return settings
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, value = line.split("=", 1)
            settings[key.strip()] = value.strip()
    return settings


def write_settings(path, settings):
"""

_DOC_QUEUE = '''def merge(first, second, key=None, reverse=False):
    """Merge two sorted lists into one.

    The *first* argument and the *second* argument must be sorted already.
    If *key* is given, it is a function of one argument that is used to
'''

_DOC_SOCKET = '''class Connection:
    """A connection to a server.

    A connection object has the following methods:

    open(host, port) -- open a connection to the given host
    close() -- close the connection
'''

_EDIT_FUNCTION = '''def scale_values(values, factor, minimum=None, maximum=None):
    """Return a list of scaled values."""
    result = []
    for value in values:
        value = value * factor
        if minimum is not None and value < minimum:
            value = minimum
        if maximum is not None and value > maximum:
            value = maximum
        result.append(value)
    return result


# The same function again, as a method.

def scale_values(values, factor, minimum=None, maximum=None):
    """Return a list of scaled values."""
    result = []
    for value in values:
'''

_EDIT_CLASS = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __eq__(self, other):
        if not isinstance(other, Point):
            return NotImplemented
        return self.x == other.x and self.y == other.y

    def __repr__(self):
        return "Point(%r, %r)" % (self.x, self.y)


class Point3(Point):
    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z

    def __eq__(self, other):
        if not isinstance(other, Point3):
"""

_TABLE_CODES = "_names = {\n" + "".join(
    f"    {code}: 'STATUS_{code}',\n" for code in range(100, 109)
)

_TABLE_TESTS = "class TestAdd(unittest.TestCase):\n" + "".join(
    f"    def test_add_{name}(self):\n        self.assertEqual(add({n}, {n}), {2 * n})\n\n"
    for n, name in ((1, "one"), (2, "two"), (3, "three"), (4, "four"))
)

PROMPTS: dict[str, list[str]] = {
    "code": [_COUNTER, _READER],
    "docstring": [_DOC_QUEUE, _DOC_SOCKET],
    "edit": [_EDIT_FUNCTION, _EDIT_CLASS],
    "table": [_TABLE_CODES, _TABLE_TESTS],
}

CALIBRATION: list[str] = [
    '''class Stack:
    """A stack of values, the last one in is the first one out."""

    def __init__(self):
        self.values = []

    def push(self, value):
        self.values.append(value)

    def pop(self):
''',
    "".join(
        f"    parser.add_option('--{name}', help='set the {name}')\n"
        for name in ("width", "height", "depth", "colour")
    ),
]
