"""Tensors that share blocks of the host's memory: their own values, and little more room than they need."""

from __future__ import annotations

import torch

from lockstep.parallel.offload import HostRoom


def test_tensors_share_blocks_without_sharing_numbers() -> None:
    room = HostRoom(torch.device("cpu"), block=4096)
    shapes = [(300,), (7, 11), (5000,), (100,), (), (0, 3), (400,)]
    tensors = [room.empty(torch.Size(shape), torch.float32, pinned=False) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 4 == 0
        assert (tensor == number).all()
    # 20,000 bytes take a block of 32,768, whose rest the later ones fill: nothing else is allocated.
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}) == 2


def test_where_host_and_device_are_one_a_copy_is_made() -> None:
    weight = torch.arange(3.0)
    copied = HostRoom(torch.device("cpu")).copy(weight)
    copied[0] = 9
    assert weight.tolist() == [0, 1, 2]
