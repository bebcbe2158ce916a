"""The learned parts, method by method: as pictures, or as lists of their strongest features."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from partsong.evaluate.drawing import bar, key, picture
from partsong.evaluate.findings import Report
from partsong.evaluate.page import Markup, element, percent, significant
from partsong.evaluate.sections import styles

TOP_FEATURES = 10


def parts(report: Report) -> list[Markup]:
    """The components of each method, as pictures or as lists of their strongest features."""
    is_picture = report.image_shape is not None
    shown = (
        "Each part is a picture scaled to its own maximum: the more a pixel stands out from the page, the larger it is."
        if is_picture
        else f"Each part is a list of its {TOP_FEATURES} strongest features; bars are relative to the strongest."
    )
    note = f"{shown} The percentage is the share of the data that the part explains."
    content = [element("p", note, class_="note")]
    for method, style in zip(report.methods, styles(report.methods), strict=True):
        components = np.nan_to_num(method.components.astype(float), posinf=0.0).clip(min=0.0)
        figures = []
        for i, (values, share) in enumerate(zip(components, method.shares, strict=True), start=1):
            look = _portrait(values, f"Part {i} of {method.name}", report) if is_picture else _features(values, report)
            explains = element("span", percent(share) if values.any() else "empty")
            label = element("figcaption", element("b", str(i)), explains)
            figures.append(element("figure", *((look, label) if is_picture else (label, look)), class_="part"))
        content.append(element("h3", key(style), method.name))
        content.append(element("div", *figures, class_="parts" if is_picture else "parts lists"))
    return content


def _portrait(values: npt.NDArray[Any], alt: str, report: Report) -> Markup:
    return picture(values.reshape(report.image_shape), alt)


def _features(values: npt.NDArray[Any], report: Report) -> Markup:
    """The strongest features with bars; a part that is zero everywhere has none."""
    strongest = [int(i) for i in np.argsort(-values, kind="stable")[:TOP_FEATURES] if values[i] > 0]
    names = [f"column {i}" if report.feature_names is None else report.feature_names[i] for i in strongest]
    fractions = [float(values[i] / values[strongest[0]]) for i in strongest]
    items = [
        element("li", element("span", name, title=f"{name}: {significant(fraction)} of the strongest"), bar(fraction))
        for name, fraction in zip(names, fractions, strict=True)
    ]
    return element("ol", *items)
