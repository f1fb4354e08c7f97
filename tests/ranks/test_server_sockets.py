# SPDX-License-Identifier: Apache-2.0
"""The sockets of a parameter server: which ranks may connect, and when the server ends."""

import gc
import socket
import threading

import pytest
import torch

from lockstep.errors import PeerLostError
from lockstep.serialization import join, pack, split, unpack
from lockstep.sync import ParameterServer, ServerAddress
from lockstep.sync.parameter_server.messages import Message
from lockstep.sync.parameter_server.server_connection import connect_to_server
from ranks.served import server


def add(channel, value):
    return channel.ask(Message("all_reduce", tensors=[torch.full((3,), float(value))])).tensors[0]


def sums(channels, tensors, order):
    """What every rank is answered, by rank, when they ask in `order`."""
    found = [None] * len(channels)

    def one(rank):
        found[rank] = channels[rank].ask(Message("all_reduce", tensors=[tensors[rank]])).tensors[0]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_sums_are_added_in_rank_order_whoever_comes_first():
    values = [torch.tensor([x], dtype=torch.float64) for x in (1e16, 1.0, -1e16)]
    with server(3) as address:
        channels = [connect_to_server(address, rank) for rank in range(3)]
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            found = sums(channels, values, order)
            assert [tensor.item() for tensor in found] == [(1e16 + 1.0) - 1e16] * 3
        for channel in channels:
            channel.close()


def test_low_precision_is_added_in_float32():
    with server(3) as address:
        channels = [connect_to_server(address, rank) for rank in range(3)]
        tensors = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
        found = sums(channels, tensors, range(3))
        assert [(t.item(), t.dtype) for t in found] == [(258.0, torch.bfloat16)] * 3
        for channel in channels:
            channel.close()


def test_a_stranger_without_the_secret_is_sent_away_and_harms_nobody():
    with server(2) as address:
        with socket.create_connection((address.host, address.port)) as stranger:
            stranger.sendall(b"x" * len(address.secret) + b"cos\nsystem\n")
            stranger.settimeout(10)
            with pytest.raises(ConnectionError):
                _read_to_the_end(stranger)
        channels = [connect_to_server(address, rank) for rank in range(2)]
        for channel in channels:
            channel.close()


def _read_to_the_end(connection):
    if connection.recv(1) == b"":
        raise ConnectionError("closed in order")


@pytest.mark.parametrize("orderly", [True, False], ids=["leaves", "vanishes"])
def test_who_waits_for_a_worker_that_goes_is_freed(orderly):
    with server(2) as address:
        one, other = (connect_to_server(address, rank) for rank in range(2))
        errors = []

        def wait():
            try:
                add(one, 1)
            except PeerLostError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        other.close() if orderly else other._messages.close()
        waiting.join()
        one.close()
    assert len(errors) == 1
    assert errors[0].code == "LS601"


def test_a_second_connection_of_each_rank_is_a_session_of_its_own():
    with server(2) as address:
        first = [connect_to_server(address, rank) for rank in range(2)]
        second = [connect_to_server(address, rank) for rank in (1, 0)][::-1]
        values = [torch.ones(2), torch.ones(2)]
        assert sums(second, values, range(2))[0].tolist() == [2, 2]
        for channel in second:
            channel.close()
        assert sums(first, values, range(2))[1].tolist() == [2, 2]
        for channel in first:
            channel.close()


def test_what_is_due_to_the_others_comes_although_one_has_gone():
    # More than fits on the way: what was sent is being read, in this order, and the server finds
    # the line broken when it answers.
    much = torch.ones(8 << 20)
    with server(2) as address:
        gone, left = (connect_to_server(address, rank) for rank in range(2))
        left._messages.send(Message("all_reduce", tensors=[much]))
        gone._messages.send(Message("all_reduce", tensors=[much]))
        gone._messages.close()
        assert torch.equal(left._messages.receive().tensors[0], much * 2)
        with pytest.raises(PeerLostError):
            add(left, 1)
        left.close()


def test_a_server_whose_workers_will_not_come_is_called_off():
    listening = ParameterServer("127.0.0.1", 2, b"secret", 5.0)
    thread = threading.Thread(target=listening.serve)
    thread.start()
    waiting = connect_to_server(listening.address, 0)
    listening.stop()
    thread.join()
    with pytest.raises(PeerLostError):
        add(waiting, 1)
    waiting.close()
    listening.stop()


def test_nobody_there():
    listening = ParameterServer("127.0.0.1", 1, b"secret", 5.0)
    listening.close()
    with pytest.raises(PeerLostError, match="parameter server"):
        connect_to_server(listening.address, 0)


def test_a_server_that_ends_during_the_welcome_leaves_no_socket_behind():
    # More than fits on the way, so that the end is met while the secret is being sent.
    secret = b"x" * (64 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = _open_sockets()
        ending = threading.Thread(target=lambda: listener.accept()[0].close())
        ending.start()
        # What is caught keeps the frames alive, and with them a socket that nobody closed.
        with pytest.raises(PeerLostError) as caught:
            connect_to_server(ServerAddress(*listener.getsockname(), secret, 20.0), 0)
        ending.join()
        assert _open_sockets() == before, caught.value


def _open_sockets():
    sockets = (each for each in gc.get_objects() if type(each) is socket.socket)
    return {id(each) for each in sockets if each.fileno() != -1}


def test_every_kind_of_tensor_travels():
    tensors = [
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.arange(5, dtype=torch.int8),
        torch.tensor([True, False, True]),
        torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).t(),
        torch.ones(3, dtype=torch.complex128) * 1j,
        torch.ones(5, dtype=torch.bfloat16),
    ]
    structure, buffers = split(tensors)
    found = join(structure, unpack(pack(buffers), [buffer.numel() for buffer in buffers]))
    for sent, got in zip(tensors, found, strict=True):
        assert sent.dtype == got.dtype
        assert torch.equal(sent, got)
