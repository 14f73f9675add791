# SPDX-License-Identifier: Apache-2.0
"""Stays in intensive care as FCFL (NeurIPS 2021) takes them: a client per hospital, race as the sensitive attribute.

The files are ``patient.csv.gz`` and ``apacheApsVar.csv.gz`` of the eICU Collaborative Research Database 2.0, for which
people need permission (https://eicu-crd.mit.edu). :func:`write_made_up` makes files of the same format: eleven
hospitals of different sizes and shares of races, with a known law for long stays and deaths. In some hospitals people
who are not white are measured as more ill than they are, so that a model has a disparity there.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.papers.adult import Adult

Outcome = Literal["long stay", "death"]
FILES = ("patient.csv.gz", "apacheApsVar.csv.gz")
HOSPITALS, WEEK = 11, 7 * 24 * 60  # minutes
KINDS = ("gender", "unittype", "unitadmitsource")
MEASURED = ("heartrate", "meanbp", "temperature", "respiratoryrate", "wbc", "creatinine", "bun", "glucose", "albumin")


def load(folder: Path, outcome: Outcome) -> Adult:
    """Stays of the largest hospitals.

    Args:
        folder: of the two files.
        outcome: a stay of more than a week, or death in the hospital.

    Returns:
        In ``positions`` what a model sees, ``[n, width]`` float32: what is measured, standardised, 0 where it is
        missing; then the kinds, one-hot. Group 1 are white people.
    """
    patients = _rows(folder / FILES[0])
    measured = {row["patientunitstayid"]: row for row in _rows(folder / FILES[1])}
    patients = [row for row in patients if row["patientunitstayid"] in measured and row["ethnicity"]]
    sizes = dict[str, int]()
    for row in patients:
        sizes[row["hospitalid"]] = sizes.get(row["hospitalid"], 0) + 1
    chosen = sorted(sorted(sizes, key=lambda name: (-sizes[name], name))[:HOSPITALS])
    patients = [row for row in patients if row["hospitalid"] in chosen]
    numbers = [
        _standardised([_number(row["age"].replace("> 89", "90")) for row in patients]),
        *(_standardised([_number(measured[row["patientunitstayid"]][name]) for row in patients]) for name in MEASURED),
    ]
    seen = torch.stack(numbers + [column for name in KINDS for column in _one_hot(patients, name)], 1)
    if outcome == "long stay":
        labels = [float(row["unitdischargeoffset"]) > WEEK for row in patients]
    else:
        labels = [row["hospitaldischargestatus"] == "Expired" for row in patients]
    return Adult(
        seen,
        torch.tensor(labels).float(),
        torch.tensor([int(row["ethnicity"] == "Caucasian") for row in patients]),
        torch.tensor([chosen.index(row["hospitalid"]) for row in patients]),
        torch.tensor([int(_number(row["age"].replace("> 89", "90"))) for row in patients]),
        seen.shape[1],
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> float:
    value = float(text) if text else -1.0
    return torch.nan if value == -1 else value  # -1 stands for what is missing, too


def _standardised(values: Sequence[float]) -> Tensor:
    column = torch.tensor(values)
    known = column[~column.isnan()]
    return ((column - known.mean()) / known.std().clamp_min(1e-6)).nan_to_num(0.0)


def _one_hot(rows: Sequence[Mapping[str, str]], name: str) -> list[Tensor]:
    return [torch.tensor([float(row[name] == value) for row in rows]) for value in sorted({row[name] for row in rows})]


def write_made_up(folder: Path, seed: int = 0) -> None:
    """Writes the two files for eleven hospitals that do not exist."""
    generator = torch.Generator().manual_seed(seed)
    patients, measured = list[dict[str, object]](), list[dict[str, object]]()
    for hospital in range(HOSPITALS):
        size = 250 + 50 * hospital
        white = torch.rand(size, generator=generator) < 0.5 + 0.04 * hospital
        ill = torch.randn(size, generator=generator)
        noise = torch.randn(size, len(MEASURED), generator=generator)
        shown = ill + (0.15 * (hospital % 6)) * ~white  # what is measured, of people who are not white too much
        values = shown[:, None] * torch.linspace(0.2, 1.0, len(MEASURED)) + 0.7 * noise
        long, dead = (
            torch.rand(size, generator=generator) < torch.sigmoid(1.2 * ill + shift + 0.05 * hospital)
            for shift in (-0.8, -3.5)
        )
        for person in range(size):
            stay = 1000 * hospital + person
            patients.append(
                {
                    "patientunitstayid": stay,
                    "hospitalid": 100 + hospital,
                    "age": "> 89" if person % 20 == 0 else 40 + person % 50,
                    "ethnicity": "Caucasian" if white[person] else "African American",
                    "gender": ("Female", "Male")[person % 2],
                    "unittype": ("MICU", "SICU", "CCU-CTICU")[person % 3],
                    "unitadmitsource": ("Emergency Department", "Operating Room")[person % 5 == 0],
                    "unitdischargeoffset": 2 * WEEK if long[person] else WEEK // 2,
                    "hospitaldischargestatus": "Expired" if dead[person] else "Alive",
                }
            )
            row = dict(zip(MEASURED, (round(float(value), 3) for value in values[person]), strict=True))
            row |= {"albumin": -1} if person % 7 == 0 else {}
            measured.append({"patientunitstayid": stay, **row})
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(FILES, (patients, measured), strict=True):
        _write(folder / name, rows)


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
