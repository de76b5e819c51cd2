import pytest


@pytest.fixture(autouse=True)
def svg_alone(request, monkeypatch):
    """Reports draw SVG alone, which the page shows: PNG and PDF take longer, and tests marked `vector` see them."""
    if not request.node.get_closest_marker("vector"):
        monkeypatch.setattr("anchorlora_lab.report.page.FILES", ())


@pytest.fixture
def without_pictures(monkeypatch):
    """Pages of words and tables, for tests that look at these."""
    monkeypatch.setattr("anchorlora_lab.report.page.all_pictures", lambda *args, **kwargs: {})
