import pytest


@pytest.fixture
def without_pictures(monkeypatch):
    """Pages of words and tables, for tests that look at these."""
    monkeypatch.setattr("anchorlora_lab.report.page.all_pictures", lambda *args, **kwargs: {})
