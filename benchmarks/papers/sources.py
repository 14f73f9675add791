# SPDX-License-Identifier: Apache-2.0
"""The papers' data sets from a folder, as tensors of bytes: torchvision's readers where it has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate
from torch.utils.data import TensorDataset
from torchvision import datasets

OFFICE = ("amazon", "caltech10", "dslr", "webcam")


class MissingDataError(Exception):
    """A data set is not in the folder; the message is one sentence that says what to put where."""


class Pair(NamedTuple):
    """The two halves as published: images ``[n, ...]`` uint8, classes ``[n]`` int64."""

    train: TensorDataset
    test: TensorDataset


@dataclass(frozen=True)
class Source:
    """A data set with its numbers of samples, which are known before it is read.

    Attributes:
        name: for messages.
        shape: of one image.
        train: training samples.
        test: test samples.
        read: reads it from a folder.
        needs: what the folder must hold.
    """

    name: str
    shape: tuple[int, ...]
    train: int
    test: int
    read: Callable[[Path], Pair]
    needs: str

    def load(self, root: Path) -> Pair:
        """Reads the data set.

        Raises:
            MissingDataError: it is not there.
        """
        try:
            return self.read(root)
        except (OSError, RuntimeError, ModuleNotFoundError) as error:
            raise MissingDataError(
                f"{self.name} is needed: --data-root must be a folder that holds {self.needs}, found {root} "
                f"({str(error).splitlines()[0]})"
            ) from error


def _idx(kind: type[datasets.MNIST], root: Path) -> Pair:
    halves = [kind(root, train=train, download=False) for train in (True, False)]
    return Pair(*(TensorDataset(half.data, half.targets) for half in halves))


def _cifar(kind: type[datasets.CIFAR10], root: Path) -> Pair:
    halves = [kind(root, train=train, download=False) for train in (True, False)]
    return Pair(
        *(
            TensorDataset(torch.from_numpy(half.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(half.targets))
            for half in halves
        )
    )


FASHION = Source(
    "Fashion-MNIST",
    (28, 28),
    60000,
    10000,
    partial(_idx, datasets.FashionMNIST),
    "FashionMNIST/raw with the four idx files",
)
MNIST = Source("MNIST", (28, 28), 60000, 10000, partial(_idx, datasets.MNIST), "MNIST/raw with the four idx files")
CIFAR10 = Source(
    "CIFAR-10",
    (3, 32, 32),
    50000,
    10000,
    partial(_cifar, datasets.CIFAR10),
    "cifar-10-batches-py with the python batches",
)
CIFAR100 = Source(
    "CIFAR-100",
    (3, 32, 32),
    50000,
    10000,
    partial(_cifar, datasets.CIFAR100),
    "cifar-100-python with the python version",
)


def usps(root: Path) -> Pair:
    """USPS digits, 16 x 16: torchvision's two bz2 files, or ``usps.h5`` with groups ``train`` and ``test``."""
    folder = root / "USPS"
    if (folder / "usps.bz2").is_file():
        halves = [datasets.USPS(str(folder), train=train) for train in (True, False)]
        return Pair(*(TensorDataset(torch.from_numpy(half.data), torch.tensor(half.targets)) for half in halves))
    import h5py  # type: ignore[import-not-found, unused-ignore]

    with h5py.File(folder / "usps.h5", "r") as file:
        return Pair(
            *(
                TensorDataset(
                    torch.from_numpy(file[half]["data"][:]).mul(255).round().byte().view(-1, 16, 16),
                    torch.from_numpy(file[half]["target"][:]).long(),
                )
                for half in ("train", "test")
            )
        )


USPS = Source("USPS", (16, 16), 7291, 2007, usps, "USPS/usps.bz2 and USPS/usps.t.bz2, or USPS/usps.h5 (with h5py)")


def resized(images: Tensor, side: int) -> Tensor:
    """Images ``[n, h, w]`` or ``[n, 3, h, w]`` uint8 as ``[n, 3, side, side]``."""
    images = images if images.dim() == 4 else images[:, None]
    small = interpolate(images.float(), (side, side), mode="bilinear", antialias=True, align_corners=False)
    return small.round().clamp(0, 255).byte().expand(-1, 3, -1, -1).contiguous()


def rendered(size: int, seed: int) -> TensorDataset:
    """Digits in random colours, places, turns and sizes on noise, ``[size, 3, 16, 16]`` uint8: a stand-in for SYN."""
    from PIL import Image, ImageDraw, ImageFont
    from torchvision.transforms.functional import pil_to_tensor

    font, glyphs = ImageFont.load_default(24), []
    for digit in range(10):
        picture = Image.new("L", (32, 32))
        ImageDraw.Draw(picture).text((16, 16), str(digit), fill=255, font=font, anchor="mm")
        glyphs.append(pil_to_tensor(picture).float().div(255))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (size,), generator=generator)
    turn = (torch.rand(size, generator=generator) - 0.5) * 0.8
    stretch = 0.9 + 0.6 * torch.rand(size, 2, 1, generator=generator)
    place = (torch.rand(size, 2, 1, generator=generator) - 0.5) * 0.4
    rotation = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], 1).view(-1, 2, 2)
    grid = affine_grid(torch.cat([stretch * rotation, place], 2), [size, 1, 16, 16], align_corners=False)
    mask = grid_sample(torch.stack(glyphs)[labels], grid, align_corners=False)
    ink, paper = torch.rand(2, size, 3, 1, 1, generator=generator)
    pixels = paper + (ink - paper) * mask + 0.15 * torch.randn(size, 3, 16, 16, generator=generator)
    return TensorDataset(pixels.clamp(0, 1).mul(255).byte(), labels)


def made_up_digits(name: str) -> Pair:
    """``"uci"``: the 8 x 8 digits that come with scikit-learn. ``"rendered"``: see :func:`rendered`."""
    if name == "rendered":
        return Pair(rendered(10000, 0), rendered(2000, 1))
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = images.view(-1, 8, 8).mul(15.9375).byte()
    return Pair(*(TensorDataset(images[half], labels[half]) for half in (slice(1437), slice(1437, None))))


def office(root: Path, domain: str, side: int) -> Pair:
    """One domain of Office-Caltech-10; of ten images in a row, sorted by class and name, eight are for training.

    Raises:
        MissingDataError: it is not there.
    """
    folder = root / "OfficeCaltech10" / domain
    try:
        pictures = datasets.ImageFolder(str(folder), loader=_square(side))
    except (OSError, RuntimeError) as error:
        raise MissingDataError(
            "Office-Caltech-10 is needed: --data-root must be a folder that holds "
            f"OfficeCaltech10/{{{','.join(OFFICE)}}}/<class>/*.jpg, found {root} without {domain}"
        ) from error
    images = torch.stack([pictures[i][0] for i in range(len(pictures))])
    labels = torch.tensor(pictures.targets)
    training = torch.arange(len(labels)) % 10 <= 7
    return Pair(*(TensorDataset(images[half], labels[half]) for half in (training, ~training)))


def _square(side: int) -> Callable[[str], Any]:
    def load(path: str) -> Tensor:
        from PIL import Image
        from torchvision.transforms.functional import pil_to_tensor

        with Image.open(path) as image:
            image.draft("RGB", (side, side))  # decodes JPEGs at a reduced scale, not below this size
            pixels: Tensor = pil_to_tensor(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR))
            return pixels

    return load
