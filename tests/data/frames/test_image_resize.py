import numpy as np
import pytest

from acrlpd.data.frames.store import resize_with_pad
from acrlpd.robots.base import parse_image


@pytest.mark.parametrize("case", ["wide_down", "tall_down", "wide_up", "odd_pad", "vga"])
def test_pixels_equal_openpi_client(goldens, case):
    golden = np.load(goldens / "resize_with_pad.npz")
    height, width = golden[f"{case}/target_hw"].tolist()
    np.testing.assert_array_equal(
        resize_with_pad(golden[f"{case}/in_uint8"], height, width), golden[f"{case}/client_uint8"]
    )


def test_leading_axes_are_images():
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 20, 30, 3), np.uint8)
    resized = resize_with_pad(images, 16, 16)
    assert resized.shape == (2, 3, 16, 16, 3)
    np.testing.assert_array_equal(resized[1, 2], resize_with_pad(images[1, 2], 16, 16))


def test_an_image_of_the_right_size_is_not_copied():
    image = np.zeros((4, 16, 16, 3), np.uint8)
    assert resize_with_pad(image, 16, 16) is image


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="uint8"):
        resize_with_pad(np.zeros((16, 16, 3), np.float32), 8, 8)


def test_float_images_become_the_bytes_that_openpi_makes(goldens):
    golden = np.load(goldens / "resize_with_pad.npz")
    np.testing.assert_array_equal(parse_image(golden["convert_to_uint8/in"]), golden["convert_to_uint8/out"])
