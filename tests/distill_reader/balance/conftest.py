import pytest


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Students report often, so that tests are short; probes bear with a busy machine."""
    monkeypatch.setattr("distill_reader.balance.client.REPORT_S", 0.2)
    monkeypatch.setattr("distill_reader.balance.registry.registrar._PROBE_S", 20.0)


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    for name in ("EDL_TOKEN", "EDL_TEACHER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)
