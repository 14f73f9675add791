# SPDX-License-Identifier: Apache-2.0
"""Small files in the layout that the projects read, so that they run without a download. Nothing here is federated."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image

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
