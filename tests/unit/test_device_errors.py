"""Known errors of devices, such as codes of CANN, HCCL and torch_npu: cause and remedy are appended to the message."""

from __future__ import annotations

import pytest
import torch

from lockstep.device.cuda import Cuda
from lockstep.device.device_errors import NPU_ERRORS as TABLE
from lockstep.device.device_errors import explanation
from lockstep.device.npu import Npu
from lockstep.device.select import select

# Messages as the libraries write them, each with a word of the cause and one of the remedy.
MESSAGES = {
    "EI0006": ("EI0006: 2025-01-01-00:00:00 Getting socket times out. Reason: ...", "socket", "HCCL_CONNECT_TIMEOUT"),
    "EZ9999": ("EZ9999: Inner Error!\nEZ9999 The error from device(chipId:0, dieId:0)", "operator", "lockstep doctor"),
    "507015": (
        "NPU function error: aclrtSynchronizeStream, error code is 507015",
        "exception on the device",
        "ASCEND_LAUNCH_BLOCKING=1",
    ),
    "207001": ("call aclrtMalloc failed, error code is 207001", "no memory left", "batch.tokens"),
    "107001": (
        "Set device failed, error code is 107001",
        "no device with the requested number",
        "ASCEND_RT_VISIBLE_DEVICES",
    ),
    "E19999": ("E19999: Inner Error, Please contact support engineer!", "runtime or graph engine", "lockstep doctor"),
}


@pytest.mark.parametrize("code", MESSAGES)
def test_a_known_code_gets_cause_and_remedy(code: str) -> None:
    message, cause, remedy = MESSAGES[code]
    told = explanation(message)
    assert told is not None
    first, second = told.splitlines()
    assert first.startswith("what it means: ")
    assert cause in first
    assert second.startswith("-> ")
    assert remedy in second


@pytest.mark.parametrize(
    "message",
    [
        "",
        "size of tensor a (3) must match b (4)",
        "error code is 1207001",
        "error code is 2070011",
        "at 0xE19999",
        "EI00061",
    ],
)
def test_an_unknown_message_gets_nothing(message: str) -> None:
    assert explanation(message) is None


def test_memory_is_known_without_a_code() -> None:
    told = explanation("NPU out of memory. Tried to allocate 2.00 GiB")
    assert told == explanation("error code is 207001")


def test_every_code_of_a_message_is_explained() -> None:
    """A failed kernel comes with the line of the operator."""
    told = explanation("aclrtSynchronizeStream failed, error code is 507015\nEZ9999: Inner Error!")
    assert told is not None
    causes = [line for line in told.splitlines() if line.startswith("what it means: ")]
    assert len(causes) == 2
    assert "(AI Core, AI CPU or vector core)" in causes[0]
    assert "CANN" in causes[1]


def test_every_row_is_whole() -> None:
    assert all(known.pattern and known.cause and known.remedy for known in TABLE)
    assert len({known.pattern for known in TABLE}) == len(TABLE)


class DeviceError(RuntimeError):
    """A type of its own, as torch_npu's errors have."""


@pytest.mark.parametrize("kind", [RuntimeError, DeviceError, ImportError])
def test_the_explanation_is_appended_to_the_same_error(kind: type[Exception]) -> None:
    error = kind("error code is 207001", "a second argument")
    with pytest.raises(kind) as caught, Npu().explained():
        raise error
    assert caught.value is error
    assert type(caught.value) is kind
    message, second = caught.value.args
    first, cause, remedy = message.splitlines()[:3]
    assert first == "error code is 207001"
    assert cause.startswith("what it means: ")
    assert remedy.startswith("-> lower batch.tokens")
    assert second == "a second argument"


@pytest.mark.parametrize("error", [RuntimeError("nothing known"), RuntimeError(), ValueError("error code is 207001")])
def test_other_errors_pass_unchanged(error: Exception) -> None:
    before = error.args
    with pytest.raises(type(error)) as caught, Npu().explained():
        raise error
    assert caught.value is error
    assert error.args == before


def test_a_device_without_memory_is_explained_on_every_device() -> None:
    with pytest.raises(RuntimeError) as caught, select("cpu").explained():
        torch.empty(2**50)
    assert "\nwhat it means: the machine has no memory left for the host's tensors\n-> " in str(caught.value)
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"what it means: the device has no memory left"),
        Cuda().explained(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 748.00 MiB.")


@pytest.mark.parametrize(
    "message",
    [
        "shape '[207001, 4]' is invalid for input of size 621003",
        "The size of tensor a (107001) must match the size of tensor b (107002) at non-singleton dimension 0",
        "my reward: grading not implemented for 'math'",
    ],
)
def test_numbers_and_words_of_other_errors_are_no_codes(message: str) -> None:
    assert explanation(message) is None


@pytest.mark.parametrize(
    "message", ["runtime result = 507015", "ret: 507015", "Error code 507015", "errno is 507015", "ErrCode:507015"]
)
def test_a_number_after_a_word_for_an_error_is_a_code(message: str) -> None:
    assert "what it means: a kernel stopped" in str(explanation(message))


def test_an_import_error_shows_its_explanation_once() -> None:
    with pytest.raises(ImportError) as caught, Npu().explained(), Npu().explained():
        raise ImportError("libascendcl.so: cannot open shared object file")
    assert str(caught.value).count("what it means: the CANN libraries are not found") == 1


def test_nothing_happens_without_an_error() -> None:
    with Npu().explained():
        done = True
    assert done
