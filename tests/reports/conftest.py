import pytest


@pytest.fixture(autouse=True)
def png_alone(request, monkeypatch):
    """Reports draw PNG alone: PDF and SVG take twice as long, and tests that are marked `vector` look at them."""
    if not request.node.get_closest_marker("vector"):
        monkeypatch.setattr("anchorlora.reports.page.VECTOR", ())
