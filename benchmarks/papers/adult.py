# SPDX-License-Identifier: Apache-2.0
"""UCI Adult as FCFL (NeurIPS 2021) divides it: one client of doctorates, one of everybody else.

Inputs are the eight categorical columns, one-hot; a value that is not known gives no one. The columns of the sensitive
attributes are left out. Label 1 means an income above 50,000 dollars. Training and test data are the official files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Attribute = Literal["race", "sex"]

COLUMNS: dict[str, tuple[int, str]] = {
    "workclass": (
        1,
        "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, Never-worked",
    ),
    "education": (
        3,
        "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, Masters, "
        "1st-4th, 10th, Doctorate, 5th-6th, Preschool",
    ),
    "marital-status": (
        5,
        "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, Married-AF-spouse",
    ),
    "occupation": (
        6,
        "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, Handlers-cleaners, "
        "Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, Priv-house-serv, Protective-serv, "
        "Armed-Forces",
    ),
    "relationship": (7, "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried"),
    "race": (8, "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black"),
    "sex": (9, "Female, Male"),
    "native-country": (
        13,
        "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, Japan, "
        "Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, "
        "Ireland, France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, "
        "Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands",
    ),
}
"""Position in a row, and the values in the order of the data set's own description."""

GROUP_1: dict[Attribute, str] = {"race": "White", "sex": "Female"}


class Adult(NamedTuple):
    """One file.

    Attributes:
        positions: ``[n, 7]`` int64, which inputs are one; ``width`` stands for a value that is not known.
        labels: ``[n]`` float32, 0 or 1.
        groups: ``[n]`` int64, 1 for white or female people. With both attributes, the second one counts 2: of race and
            sex, 0 for men who are not white, 1 for white men, 2 for women who are not white, 3 for white women.
        clients: ``[n]`` int64, 0 for doctorates, 1 for all others.
        ages: ``[n]`` int64, in years.
        width: number of inputs.
    """

    positions: Tensor
    labels: Tensor
    groups: Tensor
    clients: Tensor
    ages: Tensor
    width: int


def load(path: Path, *attributes: Attribute) -> Adult:
    """Reads ``adult.data`` or ``adult.test``, with the groups of one or both attributes.

    Raises:
        ValueError: a row has an unknown value.
    """
    places: dict[tuple[int, str], int] = {}
    for name, (column, values) in COLUMNS.items():
        for value in values.split(", ") if name not in attributes else ():
            places[column, value] = len(places)
    used = [column for name, (column, _) in COLUMNS.items() if name not in attributes]
    rows = [[cell.strip() for cell in line.rstrip(".\n").split(",")] for line in path.read_text().splitlines()]
    rows = [row for row in rows if len(row) == 15]  # the test file begins with a comment
    for row in rows:
        strange = [row[column] for column in used if row[column] != "?" and (column, row[column]) not in places]
        if strange:
            raise ValueError(f"{path.name} must hold the values of the original data set, found {strange}")
    groups = [
        sum((row[COLUMNS[each][0]] == GROUP_1[each]) << place for place, each in enumerate(attributes)) for row in rows
    ]
    return Adult(
        torch.tensor([[places.get((column, row[column]), len(places)) for column in used] for row in rows]),
        torch.tensor([float(row[14] == ">50K") for row in rows]),
        torch.tensor(groups),
        torch.tensor([int(row[3] != "Doctorate") for row in rows]),
        torch.tensor([int(row[0]) for row in rows]),
        len(places),
    )
