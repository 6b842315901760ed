"""Draft trees and their attention masks as standalone SVG, by string building alone.

The running example of `draft.py` with path cat, sat accepted, and the mask of its root and nodes::

    tree_svg(draft, words.__getitem__, path=[0, 2], root_label="the")
    mask_svg([-1, -1, 0, 0, 1, 2, 4], ["the", "cat", "dog", "sat", "is", "ran", "on", "to"])

Colours follow the reader's system, light or dark.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape

import torch
from torch import Tensor

from .draft import Draft, ancestors, depths, validate_draft
from .trace import one_line

_CHARACTER, _HEIGHT, _ROW, _COLUMN, _MARGIN = 8.5, 30, 44, 46, 18  # pixels
_CELL = 30

_STYLE = """
.specdec { font: 14px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  --card: #ffffff; --ink: #1b1f24; --soft: #737d8c; --line: #b9c1cb; --box: #f1f3f6;
  --path: #2c9f63; --path-box: #c9ecd6; --path-ink: #0b4a2b; }
@media (prefers-color-scheme: dark) { .specdec {
  --card: #181c22; --ink: #e6e9ee; --soft: #8f99a8; --line: #4a5360; --box: #252b33;
  --path: #37b576; --path-box: #12452c; --path-ink: #a9efc6; } }
.specdec .card { fill: var(--card); }
.specdec text { fill: var(--ink); }
.specdec .index { fill: var(--soft); font-size: 10px; }
.specdec .edge { fill: none; stroke: var(--line); stroke-width: 1.5; }
.specdec .node rect { fill: var(--box); stroke: var(--line); }
.specdec .root rect { stroke: var(--ink); stroke-width: 1.5; }
.specdec .edge.accepted { stroke: var(--path); stroke-width: 3; }
.specdec .node.accepted rect { fill: var(--path-box); stroke: var(--path); stroke-width: 2; }
.specdec .node.accepted text { fill: var(--path-ink); }
.specdec .cell { fill: var(--box); }
.specdec .cell.sees { fill: var(--path); }
.specdec .cell.self { fill: var(--path); opacity: .6; }
"""


def tree_svg(
    draft: Draft,
    labels: Callable[[int], str],
    path: Sequence[int] | None = None,
    row: int = 0,
    root_label: str = "root",
) -> str:
    """The draft tree of one row, root at the left; unused nodes are left out.

    Args:
        draft: a tree or a chain, tokens [B, N].
        labels: token id -> what to write on its node.
        path: accepted nodes in order, to be highlighted with the root; of a `Round` that is
            `r.path[row, : r.n_accepted[row]].tolist()`. None highlights nothing.
        row: which row of the batch.
        root_label: the root's text; a draft does not hold its root.

    Every node carries its index in small, and its depth and token id as a tooltip.

    Raises:
        ValueError: a row outside the batch, parents or `used` that are no tree, or a path
            that is none of used nodes.
    """
    if not 0 <= row < len(draft.tokens):
        raise ValueError(f"row: expected 0 <= row < {len(draft.tokens)}, the batch size, got {row}")
    largest = max((token for tokens in draft.tokens.tolist() for token in tokens), default=0)
    validate_draft(replace(draft, probs=None), len(draft.tokens), largest + 1)
    parents, used = draft.tree()[row].tolist(), draft.mask()[row].tolist()
    tokens, depth = draft.tokens[row].tolist(), [0, *depths(draft.tree())[row].tolist()]
    _check_path(path, parents, used)
    on_path = set() if path is None else {-1, *path}

    # node i of the draft is at i + 1 below, the root at 0
    nodes = [-1, *[i for i, is_used in enumerate(used) if is_used]]
    texts = [labels(token) if is_used else "" for token, is_used in zip(tokens, used, strict=True)]
    names = [one_line(text) for text in (root_label, *texts)]
    widths = [_width(name) + 20 for name in names]
    row_of = _rows_of(nodes, parents)
    left, x = {}, float(_MARGIN)
    for d in range(max(depth[i + 1] for i in nodes) + 1):
        left[d] = x
        x += max(widths[i + 1] for i in nodes if depth[i + 1] == d) + _COLUMN
    width = x - _COLUMN + _MARGIN
    height = 2 * _MARGIN + max(row_of.values()) * _ROW + _HEIGHT

    edges, boxes = [], []
    for i in nodes:
        mark = " accepted" if i in on_path else ""
        x0, y0 = left[depth[i + 1]], _MARGIN + row_of[i] * _ROW
        tip, index = "root", ""
        if i >= 0:
            tip = f"node {i}, depth {depth[i + 1]}, token {tokens[i]}"
            at = f'x="{x0 + widths[i + 1] + 3:g}" y="{y0 + _HEIGHT - 2:g}"'
            index = f'<text class="index" {at}>{i}</text>'
        boxes.append(
            f'<g class="node{" root" if i < 0 else ""}{mark}"><title>{tip}</title>'
            f'<rect x="{x0:g}" y="{y0:g}" width="{widths[i + 1]:g}" height="{_HEIGHT}" rx="8"/>'
            f'<text x="{x0 + widths[i + 1] / 2:g}" y="{y0 + _HEIGHT / 2 + 5:g}" '
            f'text-anchor="middle">{escape(names[i + 1])}</text>{index}</g>'
        )
        if i >= 0:
            above = parents[i]
            x1 = left[depth[above + 1]] + widths[above + 1]
            y1, y2 = _MARGIN + row_of[above] * _ROW + _HEIGHT / 2, y0 + _HEIGHT / 2
            bend = x0 - _COLUMN / 2
            edges.append(
                f'<path class="edge{mark}" d="M{x1:g} {y1:g} H{x0 - _COLUMN:g} '
                f'C{bend:g} {y1:g} {bend:g} {y2:g} {x0:g} {y2:g}"/>'
            )
    return _svg(width, height, "draft tree", sorted(edges, key=lambda e: "accepted" in e) + boxes)


def _check_path(path: Sequence[int] | None, parents: list[int], used: list[bool]) -> None:
    above = -1
    for i in path or ():
        if not 0 <= i < len(parents) or not used[i] or parents[i] != above:
            raise ValueError(
                f"path: expected used nodes, each a child of the one before, from a "
                f"child of the root on; got {list(path or ())}, where {i} is none"
            )
        above = i


def _rows_of(nodes: list[int], parents: list[int]) -> dict[int, float]:
    """Where each node stands from top to bottom: a leaf a row, parents midway of their children."""
    children: dict[int, list[int]] = {i: [] for i in nodes}
    for i in nodes[1:]:
        children[parents[i]].append(i)
    order, stack = [], [-1]
    while stack:
        order.append(stack.pop())
        stack += reversed(children[order[-1]])
    leaves = [i for i in order if not children[i]]
    row_of = {i: float(at) for at, i in enumerate(leaves)}
    for i in reversed(order):
        if children[i]:
            row_of[i] = (row_of[children[i][0]] + row_of[children[i][-1]]) / 2
    return row_of


def mask_svg(parents: Tensor | Sequence[int], labels: Sequence[str]) -> str:
    """The attention mask of a tree: row i sees column j where j is i or one of its ancestors.

    Args:
        parents: [N] index of each node's parent, -1 for the root; parents before children.
        labels: 1 + N texts, the root's first.

    Every node also sees the committed prefix, which is not drawn.

    Raises:
        ValueError: parents that name a later node, or another number of labels than 1 + N.
    """
    tree = torch.as_tensor(parents, dtype=torch.long, device="cpu")
    n = len(tree) + 1
    wrong = [i for i, parent in enumerate(tree.tolist()) if not -1 <= parent < i]
    if wrong:
        raise ValueError(
            f"parents: expected -1 (the root) or an earlier node, got "
            f"{int(tree[wrong[0]])} at node {wrong[0]}"
        )
    if len(labels) != n:
        raise ValueError(f"labels: expected {n}, one for the root and each node, got {len(labels)}")
    sees = ancestors(torch.cat([torch.tensor([-1]), tree + 1])[None])[0].tolist()

    names = [one_line(label) for label in labels]
    space = max(map(_width, names)) + 12
    left, top = _MARGIN + space, _MARGIN + space * 0.75
    parts = []
    for i, name in enumerate(names):
        middle = i * _CELL + _CELL / 2
        parts.append(
            f'<text x="{left - 10:g}" y="{top + middle + 5:g}" text-anchor="end">'
            f"{escape(name)}</text>"
        )
        parts.append(
            f'<text transform="translate({left + middle:g} {top - 8:g}) rotate(-45)">'
            f"{escape(name)}</text>"
        )
        for j, other in enumerate(names):
            mark = " self" if i == j else " sees" if sees[i][j] else ""
            tip = f"{name} {'sees' if sees[i][j] else 'does not see'} {other}"
            parts.append(
                f'<rect class="cell{mark}" x="{left + j * _CELL + 1:g}" '
                f'y="{top + i * _CELL + 1:g}" width="{_CELL - 2}" height="{_CELL - 2}" rx="4">'
                f"<title>{escape(tip)}</title></rect>"
            )
    width = left + n * _CELL + max(_MARGIN, space * 0.75 - _CELL / 2)
    return _svg(width, top + n * _CELL + _MARGIN, "attention mask: a row sees a column", parts)


def _width(text: str) -> float:
    """Pixels of `text` in a monospaced font; wide characters are two cells, combining ones none."""
    return _CHARACTER * sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" class="specdec" role="img" \
width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" \
style="max-width:100%;height:auto">
<title>{title}</title>
<style>{_STYLE}</style>
<rect class="card" width="100%" height="100%" rx="12"/>
{body}
</svg>
"""
