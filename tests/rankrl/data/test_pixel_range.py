"""Images of more than 8 bits: they show what the same image of 8 bits shows."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rankrl.data.imagefolder import decode_images
from rankrl.errors import DataError

SHADES = np.arange(256, dtype=np.uint8).reshape(16, 16)
WIDE = SHADES.astype(np.uint16) * 257


def decoded(file: Path) -> NDArray[np.uint8]:
    return decode_images([file], 16, 16, 16, "L")[0, ..., 0]


def png(samples: NDArray[np.uint16], colour_type: int) -> bytes:
    """Write samples (height, width, channels) as a PNG of 16 bits, which Pillow writes of grey alone."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    height, width, _ = samples.shape
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def tiff(bits: int, photometric: int, rows: bytes) -> bytes:
    """Write grey samples of 16 x 16 pixels as a little-endian TIFF of one strip."""
    tags = {256: 16, 257: 16, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 16, 279: len(rows)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(rows))
        + rows
        + struct.pack("<H", len(tags))
        + entries
        + b"\0" * 4
    )


def twelve_bits(values: NDArray[np.uint16]) -> bytes:
    """Pack two samples into three bytes."""
    first, second = values.reshape(-1, 2).T
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=1)
    return packed.astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("grey.png", WIDE),
        ("grey.tif", WIDE),
        ("big_endian.tif", WIDE.astype(">u2")),
        ("floats.tif", (SHADES / 255).astype(np.float32)),
    ],
)
def test_shades_of_more_than_8_bits_are_those_of_8(
    name: str, pixels: NDArray[np.generic], tmp_path: Path
) -> None:
    Image.fromarray(pixels).save(tmp_path / name)
    np.testing.assert_array_equal(decoded(tmp_path / name), SHADES)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("alpha.png", png(np.stack([WIDE, WIDE[::-1]], axis=-1), 4)),
        ("colours.png", png(np.stack([WIDE] * 3, axis=-1), 2)),
        ("grey.ppm", b"P5 16 16 65535\n" + WIDE.astype(">u2").tobytes()),
        ("white_is_zero.tif", tiff(16, 0, (65535 - WIDE).astype("<u2").tobytes())),
    ],
)
def test_files_of_other_writers_show_the_same(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    np.testing.assert_array_equal(decoded(tmp_path / name), SHADES)


def test_samples_of_12_bits_go_up_to_4095(tmp_path: Path) -> None:
    shades = np.rint(SHADES * (4095 / 255)).astype(np.uint16)
    (tmp_path / "camera.tif").write_bytes(tiff(12, 1, twelve_bits(shades)))
    np.testing.assert_array_equal(decoded(tmp_path / "camera.tif"), SHADES)


@pytest.mark.parametrize("mode", ["LA", "P", "CMYK", "1"])
def test_other_modes_are_what_pillow_makes_of_them(mode: str, tmp_path: Path) -> None:
    image = (
        Image.fromarray(SHADES).convert("RGB").convert(mode)
        if mode != "LA"
        else Image.new("LA", (16, 16), (9, 3))
    )
    image.save(tmp_path / "image.tif")
    np.testing.assert_array_equal(decoded(tmp_path / "image.tif"), np.asarray(image.convert("L")))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (SHADES.astype(np.float32), r"numbers from 0 to 255, .*scale them to \[0, 1\]"),
        (np.full((16, 16), np.nan, np.float32), "numbers from nan"),
        (SHADES.astype(np.int32), "32 bits or with a sign"),
    ],
)
def test_files_that_do_not_say_what_white_is_are_named(
    pixels: NDArray[np.generic], message: str, tmp_path: Path
) -> None:
    Image.fromarray(pixels).save(tmp_path / "odd.tif")
    with pytest.raises(DataError, match=rf"odd\.tif: its pixels are .*{message}"):
        decoded(tmp_path / "odd.tif")
