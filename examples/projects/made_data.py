# SPDX-License-Identifier: Apache-2.0
"""Small files in the layout that the projects read, so that they run without a download. Nothing here is federated."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import pandas as pd

AUTHORS = (
    "the old ship sailed north with salt wind rope and tar on its deck",
    "a green garden grows beans roses mint and moss under warm rain",
    "my lord the court finds no debt owed by law or by deed today",
    "we saw nine bright stars turn slow over cold hills at night",
)


def text(path: Path, words: int = 700, seed: int = 0) -> Path:
    """Writes four authors one after the other, each with words of their own, as one text file of WikiText's form."""
    random = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for own in (sentence.split() for sentence in AUTHORS):
        for _ in range(words // 14):
            start = random.integers(len(own))
            lines.append(" ".join(own[(start + i) % len(own)] for i in range(13)))
    path.write_text("\n".join(lines) + "\n", encoding="utf8")
    return path


def digits(root: Path, train: int = 400, test: int = 80, seed: int = 0) -> Path:
    """Writes MNIST's four files with images of bars: the class says which row of the image is bright."""
    random = np.random.default_rng(seed)
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        images = random.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 + 2 * label : 6 + 2 * label, 4:24] += 180
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return root


_COLOURS = {1: (120, 120, 120), 2: (200, 60, 60), 4: (40, 80, 200), 6: (30, 110, 40), 7: (200, 200, 80)}
_OBJECTS = {"Urban": (1, (2, 2, 4)), "Rural": (7, (6, 6, 4))}


def land_cover(root: Path, scenes: int = 12, pixels: int = 32, seed: int = 0) -> Path:
    """Writes LoveDA's folders: urban scenes of buildings, rural scenes of forest, water in both, and their masks."""
    random = np.random.default_rng(seed)
    for split, count in (("Train", scenes), ("Val", scenes // 2), ("Test", 2)):
        for kind, (ground, objects) in _OBJECTS.items():
            for place in range(count):
                mask = np.full((pixels, pixels), ground, np.uint8)
                for _ in range(4):
                    top, left = random.integers(0, pixels - 8, 2)
                    mask[top : top + 12, left : left + 12] = random.choice(objects)
                image = np.array([_COLOURS.get(value, (0, 0, 0)) for value in range(8)])[mask]
                image = np.clip(image + random.normal(0, 12, image.shape), 0, 255).astype(np.uint8)
                for name, array in (("images_png", image), ("masks_png", mask)):
                    folder = root / split / kind / name
                    folder.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(array).save(folder / f"{place}.png")
    return root


def graphs(count: int = 160, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Rings (class 0) and paths (class 1) of 4 to 12 nodes: ``[n, 4]`` values, ``[2, m]`` edges both ways, class."""
    random = np.random.default_rng(seed)
    found = []
    for index in range(count):
        nodes = np.arange(random.integers(4, 13))
        edges = np.stack([nodes, np.roll(nodes, -1)])[:, : len(nodes) - index % 2]
        values = random.normal(size=(len(nodes), 4)).astype(np.float32)
        found.append((values, np.concatenate([edges, edges[::-1]], axis=1), index % 2))
    return found


def molecules(count: int = 160, seed: int = 0) -> list[tuple[str, str, float]]:
    """Laboratory, SMILES string and a property of chains of carbon and oxygen with a ring or a halogen at the end.

    Each of four laboratories has a kind of end of its own, and its instrument an offset.
    """
    random = np.random.default_rng(seed)
    ends = {"north": ("c1ccccc1", 1.0), "east": ("Cl", 0.2), "south": ("C1CCCCC1", -0.5), "west": ("F", 0.0)}
    rows = []
    for lab, (end, offset) in ends.items():
        for _ in range(count // len(ends)):
            chain = "".join(random.choice(["C", "C", "C", "O"], size=int(random.integers(2, 9))))
            value = 0.4 * chain.count("C") - chain.count("O") + offset + random.normal(0, 0.1)
            rows.append((lab, "C" + chain.replace("OO", "OC") + "C" + end, float(value)))
    return rows


def sales(shops: int = 12, days: int = 90, seed: int = 0) -> pd.DataFrame:
    """A table of daily sales with a weekly wave, which shops have at different days, in neuralforecast's columns."""
    import pandas as pd

    random = np.random.default_rng(seed)
    day = np.arange(days)
    tables = [
        pd.DataFrame(
            {
                "unique_id": f"shop {shop:02}",
                "ds": pd.date_range("2026-01-01", periods=days, freq="D"),
                "y": (shop + 2) * (3 + np.sin(2 * np.pi * (day + shop) / 7)) + random.normal(0, 0.3, days),
            }
        )
        for shop in range(shops)
    ]
    return pd.concat(tables)


def cells(number: int = 240, genes: int = 40, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Counts ``[number, genes]`` of single cells of two kinds, and the laboratory of each, which sees others darker."""
    random = np.random.default_rng(seed)
    place, kind = np.arange(number) % 3, random.integers(0, 2, number)
    rate = np.where((np.arange(genes) % 2)[None] == kind[:, None], 8.0, 3.0) * (1.0 + 0.3 * place[:, None])
    return random.poisson(rate).astype(np.float32), [["north", "east", "south"][i] for i in place]


def halves(number: int) -> tuple[slice, slice]:
    """Four fifths of a table for training, and the rest."""
    return slice(0, number * 4 // 5), slice(number * 4 // 5, number)


def patients(number: int = 320, seed: int = 0) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], list[str]]:
    """Values ``[number, 6]``, whether an event was seen and when it or the last visit was; and the hospital of each.

    Hospitals follow their patients for different times. The fourth sees none of them long enough for an event.
    """
    random = np.random.default_rng(seed)
    hospital, x = random.permutation(np.arange(number) % 4), random.normal(size=(number, 6))
    until = random.exponential(np.exp(-(x[:, 0] + 0.5 * x[:, 1] * (1 + hospital))))
    last = np.array([4.0, 2.0, 1.0, 0.0])[hospital] * random.uniform(0.5, 1.0, number)
    event = until <= last
    time = np.where(event, until, np.where(hospital == 3, random.uniform(0.1, 1.0, number), last))
    return (x.astype(np.float32), event, time.astype(np.float32)), [
        ["north", "east", "south", "west"][i] for i in hospital
    ]


def purchases(number: int = 1200, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Features of so many offers by name, and whether the item was bought.

    Five shops with 24 users each; of 59 items a user likes those of one kind, which the last items bought tell. Item 0
    fills up short histories.
    """
    random = np.random.default_rng(seed)
    user, item = random.integers(0, 120, number), random.integers(1, 60, number)
    kind, liked = item % 4, (user % 7) % 4
    history = 4 * random.integers(1, 15, (number, 5)) + liked[:, None]
    history[np.arange(5) >= random.integers(1, 6, number)[:, None]] = 0
    bought = random.random(number) < np.where(kind == liked, 0.8, 0.1)
    features = {"shop": user // 24, "user": user, "history": history, "item": item, "kind": kind}
    return features, bought.astype(np.float32)


def volumes(root: Path, patients: int = 5, edge: int = 32, seed: int = 0) -> Path:
    """Writes CT-like NIfTI images of spleens, bright balls, and their masks, from three hospitals' scanners."""
    import nibabel

    random = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.arange(edge)] * 3, indexing="ij"))
    for hospital, shift in (("north", 0), ("east", 15), ("south", -15)):
        for patient in range(patients):
            centre, radius = random.uniform(12, edge - 12, 3), random.uniform(6, 9)
            mask = ((grid - centre[:, None, None, None]) ** 2).sum(0) < radius**2
            image = np.where(mask, 90, 0) + shift + random.normal(0, 15, mask.shape)
            for kind, array in (("imagesTr", image.astype(np.float32)), ("labelsTr", mask.astype(np.uint8))):
                (root / kind).mkdir(parents=True, exist_ok=True)
                file = root / kind / f"{hospital}_{patient}.nii.gz"
                nibabel.save(nibabel.Nifti1Image(array, np.diag([1.5, 1.5, 2.0, 1.0])), file)
    return root


def pictures(root: Path, cameras: int = 3, number: int = 16, seed: int = 0) -> Path:
    """Writes a folder of 32 x 32 pictures of stripes per camera; cameras see colours in their own way."""
    random = np.random.default_rng(seed)
    for camera in range(cameras):
        folder = root / f"camera_{camera}"
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(number):
            wave = np.sin(np.arange(32) * random.uniform(0.2, 1.2))[:, None, None] * random.uniform(20, 80, 3)
            picture = 128 + wave + random.normal(0, 10, (32, 32, 3)) + 20 * camera * np.array([1, 0, -1])
            Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)).save(folder / f"{index:02}.png")
    return root


def scenes(count: int, pixels: int = 32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Squares (1) and bars (2) on noise: ``[n, 3, pixels, pixels]`` float32 images, ``[n, pixels, pixels]`` masks."""
    random = np.random.default_rng(seed)
    masks = np.zeros((count, pixels, pixels), np.int64)
    for mask in masks:
        for kind, (height, width) in ((1, (10, 10)), (2, (4, 20))):
            top, left = random.integers(0, pixels - height), random.integers(0, pixels - width)
            mask[top : top + height, left : left + width] = kind
    colours = np.array([(0.2, 0.2, 0.2), (0.9, 0.3, 0.1), (0.1, 0.4, 0.9)], np.float32)
    images = colours[masks].transpose(0, 3, 1, 2) + random.normal(0, 0.1, (count, 3, pixels, pixels))
    return images.astype(np.float32), masks


def image_folders(root: Path, seed: int = 0) -> Path:
    """Writes ``train`` and ``val`` with a folder of images per class, as torchvision's ``ImageFolder`` reads them."""
    random = np.random.default_rng(seed)
    for split, count in (("train", 24), ("val", 8)):
        for kind, colour in (("clay", (170, 90, 60)), ("grass", (70, 140, 50)), ("water", (40, 80, 190))):
            folder = root / split / kind
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                image = np.clip(colour + random.normal(0, 40, (56, 56, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(image).save(folder / f"{number}.png")
    return root
