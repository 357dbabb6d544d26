"""Address and port of rank 0 on one node."""

from __future__ import annotations

import socket

import pytest

from deepspeed.launcher import rendezvous
from deepspeed.launcher.console import Console
from deepspeed.launcher.rendezvous import local_rendezvous

SILENT = Console("critical")


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


@pytest.fixture
def busy_port() -> int:  # type: ignore[misc]
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        yield holder.getsockname()[1]  # type: ignore[misc]


def test_a_free_port_outside_the_range_of_outgoing_connections_is_chosen() -> None:
    with local_rendezvous("", None, {}, SILENT) as meeting:
        assert meeting.address == "127.0.0.1"
        assert 20000 <= meeting.port < rendezvous._outgoing_range_start()
        assert can_bind(meeting.port)


def test_launchers_that_start_together_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two ports only, the second launcher gets the other one although nobody listens yet."""
    monkeypatch.setattr(rendezvous, "_outgoing_range_start", lambda: 32768)
    monkeypatch.setattr(rendezvous, "_can_listen", lambda port: None if port in (31001, 31002) else 98)
    monkeypatch.setattr(rendezvous, "_ATTEMPTS", 200_000)
    with local_rendezvous("", None, {}, SILENT) as first, local_rendezvous("", None, {}, SILENT) as second:
        assert {first.port, second.port} == {31001, 31002}
        with pytest.raises(RuntimeError, match=f"{first.port}: port busy: another deepspeed launcher"):
            local_rendezvous("", first.port, {}, SILENT)
    with local_rendezvous("", first.port, {}, SILENT) as again:
        assert again.port == first.port


def test_a_given_port_that_is_busy_is_refused_with_the_holder(busy_port: int) -> None:
    said = rf"--master_port {busy_port}: port busy: .*\(pid \d+: .*leave --master_port out"
    with pytest.raises(RuntimeError, match=said):
        local_rendezvous("", busy_port, {}, SILENT)


def test_port_of_the_environment_is_used_if_free_and_else_replaced_with_a_line(
    busy_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_rendezvous("", None, {}, SILENT) as meeting:
        free = meeting.port
    with local_rendezvous("", None, {"MASTER_PORT": str(free)}, Console()) as meeting:
        assert meeting.port == free
    assert capsys.readouterr().err == ""
    with local_rendezvous("", None, {"MASTER_PORT": str(busy_port)}, Console()) as meeting:
        assert meeting.port != busy_port
    assert f"MASTER_PORT={busy_port} of the environment is busy" in capsys.readouterr().err


@pytest.mark.parametrize("port", (0, -1, 65536))
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="1 to 65535"):
        local_rendezvous("", port, {}, SILENT)
    with pytest.raises(ValueError, match="1 to 65535"):
        local_rendezvous("", None, {"MASTER_PORT": str(port)}, SILENT)


def test_addresses_of_this_host_are_taken_and_others_refused() -> None:
    with local_rendezvous("localhost", None, {}, SILENT) as meeting:
        assert meeting.address == "localhost"
    for elsewhere in ("192.0.2.77", "no-such-host.invalid"):
        with pytest.raises(ValueError, match=f"--master_addr {elsewhere}: not a name or address of this host"):
            local_rendezvous(elsewhere, None, {}, SILENT)


def test_unused_address_of_the_environment_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with local_rendezvous("", None, {"MASTER_ADDR": "node7"}, Console()):
        pass
    assert "MASTER_ADDR=node7 of the environment is not used" in capsys.readouterr().err
