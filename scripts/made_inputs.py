"""Inputs for networks that read text, look at photographs and listen, made on the spot.

Lines of text are drawn with strings that are known, pages with places that are known; photographs are the
sample images of scikit-image and scikit-learn, cut and mirrored.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Array = np.ndarray[Any, Any]

_WORDS = (
    "order invoice total street number summer winter river garden window paper market station travel ticket "
    "coffee bread apple orange silver golden small large north south east west open closed first second "
    "third Monday Friday March August Berlin Oslo Paris Madrid Quartz Jumbo Vector Hybrid "
    "Zigzag Fjord Exit Entry"
)


class MissingFileError(Exception):
    """A file is not to be had here; the message says what to install or where to put it."""


@cache
def photographs() -> list[Image.Image]:
    folders = []
    for module, inside in (("skimage", "data"), ("sklearn", "datasets/images")):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent / inside)
    paths = [
        path for folder in folders for path in sorted(folder.glob("*")) if path.suffix in (".png", ".jpg")
    ]
    if not paths:
        raise MissingFileError("scikit-image is missing: pip install scikit-image")
    return [Image.open(path).convert("RGB") for path in paths]


def _crop(size: tuple[int, int], generator: np.random.Generator) -> Image.Image:
    """Cut a piece of a photograph, mirrored or not, as (width, height) pixels."""
    images = photographs()
    image = images[generator.integers(len(images))]
    side = generator.uniform(0.35, 1.0) * min(image.size)
    width, height = (
        min(side * size[0] / max(size), image.width),
        min(side * size[1] / max(size), image.height),
    )
    left, top = generator.uniform(0, image.width - width), generator.uniform(0, image.height - height)
    piece = image.resize(size, Image.Resampling.BILINEAR, (left, top, left + width, top + height))
    return piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if generator.random() < 0.5 else piece


def _text(generator: np.random.Generator, words: int) -> str:
    parts = [str(each) for each in generator.choice(_WORDS.split(), words)]
    if generator.random() < 0.4:
        parts[-1] = "".join(generator.choice(list("0123456789"), generator.integers(3, 7)))
    return " ".join(parts)


def _line(generator: np.random.Generator) -> tuple[Image.Image, str]:
    """Draw a line of text, 48 pixels high and at most 320 wide, and what it says."""
    text, size = _text(generator, int(generator.integers(1, 4))), int(generator.integers(20, 34))
    dark, light = sorted(generator.integers(0, 255, 2))
    if light - dark < 90:
        dark, light = max(0, dark - 60), min(255, light + 60)
    ink, paper = (int(dark), int(light)) if generator.random() < 0.7 else (int(light), int(dark))
    font = ImageFont.load_default(size)
    left, top, right, bottom = font.getbbox(text)
    border = int(generator.integers(2, 7))
    image = Image.new("RGB", (int(right - left) + 2 * border, int(bottom - top) + 2 * border), (paper,) * 3)
    ImageDraw.Draw(image).text((border - left, border - top), text, (ink,) * 3, font)
    noise = generator.normal(0, generator.uniform(0, 18), (image.height, image.width, 1))
    noisy = Image.fromarray((np.asarray(image, np.float32) + noise).clip(0, 255).astype(np.uint8))
    return noisy.resize((min(320, max(16, round(48 * noisy.width / noisy.height))), 48)), text


def _centred(image: Image.Image, width: int) -> Array:
    """Scale pixels to lie from -1 to 1, channels first, as wide as asked for: zeros follow on the right."""
    pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1
    filled = np.zeros((3, image.height, width), np.float32)
    filled[:, :, : min(width, image.width)] = pixels[:, :, :width]
    return filled


def photograph(generator: np.random.Generator) -> tuple[Array, None]:
    """Cut a piece of a photograph, (224, 224, 3), blue first, less the mean of ImageNet."""
    pixels = np.asarray(_crop((224, 224), generator), np.float32)[:, :, ::-1]
    return pixels - np.array([104, 117, 123], np.float32), None


def text_page(generator: np.random.Generator) -> tuple[Array, Any]:
    """Draw a page, (3, 480, 640), and the places of its lines: left, top, right, bottom."""
    image, places = _page_of((640, 480), generator)
    return _centred(image, 640), places


def _page_of(
    size: tuple[int, int], generator: np.random.Generator
) -> tuple[Image.Image, list[tuple[float, ...]]]:
    """Draw a photograph or a sheet with lines of text on it, and the places of the lines."""
    if generator.random() < 0.5:
        page = _crop(size, generator)
    else:
        page = Image.new("RGB", size, tuple(int(each) for each in generator.integers(170, 255, 3)))
    drawing, places, top = ImageDraw.Draw(page), [], float(generator.integers(5, 40))
    while True:
        font = ImageFont.load_default(int(generator.integers(16, 40)))
        text = _text(generator, int(generator.integers(1, 5)))
        box = font.getbbox(text)
        left = generator.uniform(5, max(6, size[0] - box[2] - 5))
        if top + box[3] + 5 > size[1]:
            return page, places
        if left + box[2] < size[0]:
            under = page.crop(tuple(int(each) for each in (left, top, left + box[2], top + box[3])))
            dark = np.asarray(under.convert("L")).mean() < 128
            drawing.text((left, top), text, (245, 245, 230) if dark else (20, 20, 40), font)
            places.append((left + box[0], top + box[1], left + box[2], top + box[3]))
        top += box[3] + float(generator.integers(12, 60))


def line_of_text(generator: np.random.Generator) -> tuple[Array, str]:
    """Draw a line of text, (3, 48, 320), and what it says."""
    image, text = _line(generator)
    return _centred(image, 320), text


def turned_line(generator: np.random.Generator) -> tuple[Array, int]:
    """Draw a line of text, (3, 48, 192), and whether it stands upside down."""
    image, turned = _line(generator)[0], int(generator.integers(2))
    return _centred(image.rotate(180) if turned else image, 192), turned


def windows(generator: np.random.Generator, count: int = 32) -> Array:
    """Make windows of sound one after the other, (count, 576) at 16 kHz: vowels with pauses, in noise."""
    length = 64 + 512 * count
    seconds = np.arange(length) / 16000
    pitch = generator.uniform(90, 240) * (1 + 0.05 * np.sin(2 * np.pi * generator.uniform(2, 6) * seconds))
    phase = 2 * np.pi * np.cumsum(pitch) / 16000
    formants = generator.uniform((300, 900, 2200), (800, 2200, 3200))
    sound = np.zeros(length)
    for number in range(1, 30):
        near = np.exp(-(((number * pitch[0] - formants[:, None]) / 180) ** 2)).sum()
        sound += (0.02 + near) / number**0.5 * np.sin(number * phase)
    loud = np.clip(
        2 * np.sin(2 * np.pi * generator.uniform(0.8, 3) * seconds + generator.uniform(0, 6)), 0, 1
    )
    sound = sound / np.abs(sound).max() * loud * generator.uniform(0.1, 0.8)
    sound = (sound + generator.normal(0, generator.uniform(0.001, 0.05), length)).astype(np.float32)
    return np.stack([sound[512 * index : 512 * index + 576] for index in range(count)])
