"""Objects whose DLPack methods break the protocol: a typed error, whatever they do."""

from __future__ import annotations

import datetime

import pytest

from gpu_ops import errors
from tests.calls import call


class Says:
    """An object whose DLPack methods do what they are told to."""

    def __init__(self, device, capsule):
        self._device, self._capsule = device, capsule

    def __dlpack__(self, **options):
        return self._capsule()

    def __dlpack_device__(self):
        return self._device()


class WithoutADevice:
    def __dlpack__(self, **options):
        raise AssertionError("nothing to ask for")


def lacking():
    raise AttributeError("no such thing")


@pytest.mark.parametrize(
    ("thing", "error"),
    [
        (WithoutADevice(), errors.DeviceError),
        (Says(lacking, lacking), errors.DeviceError),
        (Says(tuple, lacking), errors.DeviceError),
        (Says(lambda: (1, 0), lacking), errors.DTypeError),
        (Says(lambda: (1, 0), object), errors.DTypeError),
        # a capsule of something else
        (Says(lambda: (1, 0), lambda: datetime.datetime_CAPI), errors.DTypeError),
    ],
)
def test_objects_that_speak_dlpack_badly_are_refused(thing, error):
    with pytest.raises(error, match=r"^rmsnorm: x .*(shared|is on device \(\))"):
        call("rmsnorm").having(x=thing)()
