"""The metrics of a discovery server for Prometheus, and its state as JSON for people."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from distill_reader.balance.server.balancer import Balancer, RegistryView
from distill_reader.balance.table import ServiceState, Table


class DiscoveryMetrics:
    """The metrics of one server, in a Prometheus registry of their own."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, balancer: Balancer, connections: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._messages = Counter(
            "edl_discovery_messages",
            "Messages by type and by how they ended: ok, refused.",
            ("type", "outcome"),
            registry=self.registry,
        )
        self.registry.register(_Services(balancer, connections))

    def answered(self, kind: str, outcome: str) -> None:
        self._messages.labels(kind, outcome).inc()

    def text(self) -> bytes:
        """Return the exposition format, of CONTENT_TYPE."""
        return generate_latest(self.registry)


class _Services(Collector):
    """Reads the balancer's state for each scrape."""

    def __init__(self, balancer: Balancer, connections: Callable[[], int]) -> None:
        self._balancer = balancer
        self._connections = connections

    def collect(self) -> list[GaugeMetricFamily]:
        view = self._balancer.view
        families = []
        for name, text, value in (
            ("edl_discovery_connections", "Open connections.", float(self._connections())),
            ("edl_discovery_registry_up", "Whether the registry answers.", float(not view.away)),
            (
                "edl_discovery_moves",
                "Links new to their students.",
                self._balancer.moves,
            ),
        ):
            families.append(GaugeMetricFamily(name, text, value=value))
        for name, text, count in (
            ("edl_discovery_teachers", "Teachers that are registered.", _count_teachers),
            ("edl_discovery_students", "Students that are registered.", _count_students),
            ("edl_discovery_links", "Teachers of all students, added up.", _count_links),
            ("edl_discovery_samples_per_s", "Of all students, added up.", samples_per_s),
            ("edl_discovery_wait_share", "Of students' time, for teachers; mean.", wait_share),
        ):
            family = GaugeMetricFamily(name, text, labels=("service",))
            for service, known in view.services.items():
                family.add_metric((service,), count(known))
            families.append(family)
        return families


def describe(view: RegistryView) -> dict[str, Any]:
    """Return the state of all services as JSON for people."""
    return {
        "registry": view.away or "ok",
        "services": {name: _describe(service) for name, service in view.services.items()},
    }


def wait_share(service: ServiceState) -> float:
    """Return the mean wait share of the students that have reported one."""
    shares = [each.wait_share for each in service.students.values() if each.wait_share is not None]
    return sum(shares) / len(shares) if shares else 0.0


def samples_per_s(service: ServiceState) -> float:
    """Return the samples per second of all students together."""
    return sum(each.samples_per_s or 0.0 for each in service.students.values())


def _describe(service: ServiceState) -> dict[str, Any]:
    table = service.table or Table()
    return {
        "version": table.version,
        "teachers": sorted(service.teachers),
        "students": {
            name: {
                "teachers": table.links.get(name, ()),
                "require": student.require,
                "wait_share": student.wait_share,
                "samples_per_s": student.samples_per_s,
                "unusable": student.unusable,
            }
            for name, student in service.students.items()
        },
        "speed_classes": _sorted(table.classes),
    }


def _sorted(classes: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(classes.items()))


def _count_teachers(service: ServiceState) -> float:
    return len(service.teachers)


def _count_students(service: ServiceState) -> float:
    return len(service.students)


def _count_links(service: ServiceState) -> float:
    links = (service.table or Table()).links
    return sum(len(links.get(student, ())) for student in service.students)
