"""Interfaces by address, on the machine that runs the tests."""

import psutil
import pytest

from pod_runtime.network import interface_of

LOOPBACK = next(
    name
    for name, addresses in psutil.net_if_addrs().items()
    if any(each.address == "127.0.0.1" for each in addresses)
)


@pytest.mark.parametrize("addr", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_loopback_by_any_of_its_addresses_and_by_name(addr):
    assert interface_of(addr) == LOOPBACK


def test_every_address_of_this_machine_has_its_interface():
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family.name == "AF_INET" and not each.address.startswith("127."):
                assert interface_of(each.address) == name


@pytest.mark.parametrize("addr", ["203.0.113.77", "no such name", "", "a..b"], ids=repr)
def test_an_address_of_no_interface_and_a_name_that_does_not_resolve(addr):
    assert interface_of(addr) is None
