"""Files like those of LIBERO's initial states: a zip, as torch writes it, with a pickle of one array."""

import io
import pickle
import zipfile

import numpy as np


def array_pickle(array: np.ndarray) -> bytes:
    """The array as numpy 1, with which LIBERO's files were written, pickled arrays."""
    return pickle.dumps(array, protocol=2).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def torch_file(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    return out.getvalue()
